"""`docs/notation.md` defines terms that the code uses, at most 40; words that were replaced do not return."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_TERMS = 40
REPLACED = {
    "bury", "buries", "buried", "casualty", "casualties", "complain", "complains", "complaint", "complaints", "course",
    "desk", "desks", "doze", "farewell", "forgive", "heard", "heed", "hopeless", "lane", "lanes", "leg", "legs", "lonely", "mourn",
    "mourner", "mourners", "obey", "obeys", "placer", "poison", "poisons", "seam", "seams", "soul", "staffed", "talk", "talks",
    "unheard", "visit", "visits", "vouch", "vouched", "vouches", "wish", "wishes",
}  # fmt: skip
"""As parts of identifiers too."""
EXCEPTIONS = {"visit": {"template_budget.py"}}
"""Jinja's own names."""
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]


def terms() -> list[str]:
    section = (ROOT / "docs/notation.md").read_text().split("\n## Terms\n")[1].split("\n## ")[0]
    return re.findall(r"^\| ([a-z_ ]+) \| ", section, re.MULTILINE)[1:]


def product_files() -> Iterator[Path]:
    for suffix in ("py", "proto"):
        yield from (path for path in ROOT.glob(f"*/pdserve/**/*.{suffix}") if "_pb2" not in path.name)


@cache
def words_of(path: Path) -> frozenset[str]:
    """Lower-case words of a file; `read_queue` and `ReadQueue` are two each."""
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", path.read_text())
    return frozenset(part.lower() for part in parts)


@pytest.mark.parametrize("term", terms())
def test_each_term_occurs_in_the_code(term: str) -> None:
    assert any(set(term.split()) <= words_of(path) for path in product_files())


def test_terms_are_few_and_in_order() -> None:
    assert len(terms()) <= MAX_TERMS
    assert terms() == sorted(set(terms()))
    assert len(terms()) > 30


def test_replaced_words_do_not_return() -> None:
    files = [*product_files(), *(ROOT / "docs").glob("*.md"), *(ROOT / page for page in PAGES)]
    found = {
        str(path.relative_to(ROOT)): words
        for path in files
        if (words := {word for word in REPLACED & words_of(path) if path.name not in EXCEPTIONS.get(word, set())})
    }
    assert not found


def test_replaced_words_are_found_in_identifiers(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text("class PeerLanes:\n    max_wish_bytes = 1  # a visit\n")
    assert REPLACED & words_of(path) == {"lanes", "wish", "visit"}
