"""Pages use the words that engineers use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
]
SAY = {
    re.compile(r"\bbeside\b", re.IGNORECASE): "next to, alongside, against or other than",
    re.compile(r"(?<!logits )(?<!logits-)\bprocessors?\b", re.IGNORECASE): "CPU",
}
"""Words that pages do not use -> what to say instead."""


def reworded(text: str) -> list[str]:
    """Lines of a page that have words of `SAY`, outside code, quoted names and generated tables, each with what to say."""
    for pattern in (r"^```.*?^```", r"^<!-- made by .*?^<!-- end -->", r"`[^`\n]+`"):
        text = re.sub(pattern, "", text, flags=re.MULTILINE | re.DOTALL)
    return [
        f"{line}: say {words}" for line in text.splitlines() for pattern, words in SAY.items() if pattern.search(line)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_use_the_words_of_engineers(page: Path) -> None:
    assert not reworded(page.read_text())


def test_a_word_to_replace_is_found() -> None:
    text = "Logits processors run beside it.\n\n```\na processor\n```\n`beside` on a processor"
    assert reworded(text) == [
        "Logits processors run beside it.: say next to, alongside, against or other than",
        " on a processor: say CPU",
    ]
