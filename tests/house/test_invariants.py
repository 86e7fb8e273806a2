"""`docs/invariants.md` defines each invariant that code, documents and tests name, and each has a test."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/invariants.md"
NAMED = re.compile(r"\b(I(?:[1-9]|1\d))\b(?![-'\w])")
"""An invariant's number in prose, as a word."""
SHOWN = re.compile(r"\bdef test((?:_i\d+)+)_")


def defined() -> set[str]:
    return set(re.findall(r"^\| (I\d+) \|", PAGE.read_text(), re.MULTILINE))


def files(suffix: str) -> list[Path]:
    # environments, which are not walked through: they have more files than all else
    found: list[Path] = []
    for folder, below, names in os.walk(ROOT):
        below[:] = [name for name in below if not name.startswith(".") and name != "node_modules"]
        found += [Path(folder, name) for name in names if name.endswith(suffix) and "_pb2" not in name]
    return found


def shown() -> set[str]:
    groups = (found for path in files(".py") for found in SHOWN.findall(path.read_text()))
    return {number.upper() for group in groups for number in group.split("_") if number}


def test_what_code_and_documents_name_is_defined() -> None:
    named = {
        number
        for suffix in (".py", ".md", ".proto")
        for path in files(suffix)
        for number in NAMED.findall(path.read_text())
    }
    assert named <= defined()


def test_each_has_a_test() -> None:
    assert shown() == defined()
