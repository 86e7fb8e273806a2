"""Docstrings begin with a subject or a verb, not with a fragment, and pages use the words that engineers use."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIRST_WORDS = {
    "Of",
    "So",
    "Who",
    "Whose",
    "Whoever",
    "Where",
    "Whether",
    "Likewise",
    "It",
    "Its",
    "They",
    "Their",
    "What",
    "By",
    "Those",
    "Which",
}
"""Words that begin no docstring."""
IN_TESTS = {"By", "Of", "So", "Those", "What", "Where", "Whether", "Who"}
"""Words that begin no docstring of tests, where `It` may be the fixture or the fake."""
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
]
SAY = {
    re.compile(r"\bbeside\b", re.IGNORECASE): "next to, alongside, against or other than",
    re.compile(r"(?<!logits )(?<!logits-)\bprocessors?\b", re.IGNORECASE): "CPU",
}
"""Words that pages do not use -> what to say instead."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those of fields and constants included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def documented_files() -> Iterator[Path]:
    for pattern in ("*/pdserve/**/*.py", "benchmarks/**/*.py", "deploy/*.py", "tools/**/*.py"):
        yield from (path for path in sorted(ROOT.glob(pattern)) if "_pb2" not in path.name)


def fragments(path: Path, words: Set[str] = FIRST_WORDS) -> list[str]:
    return [
        f"{path.name}:{line}: {text[:60]}"
        for line, text in docstrings(path)
        if text.split()[:1] and text.split()[0] in words
    ]


@pytest.mark.slow
def test_no_docstring_begins_with_a_fragment() -> None:
    found = [fragment for path in documented_files() for fragment in fragments(path)]
    found += [fragment for path in sorted((ROOT / "tests").rglob("*.py")) for fragment in fragments(path, IN_TESTS)]
    assert not found


def test_a_fragment_is_found(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text('"""A module."""\n\nLIMIT = 1\n"""Of these, at most."""\n')
    assert fragments(path) == ["file.py:4: Of these, at most."]


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
