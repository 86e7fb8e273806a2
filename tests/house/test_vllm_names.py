"""`docs/vllm_names.md`: each module exists and defines the names in its row; names listed as absent are not in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/vllm_names.md"
PACKAGES = {path.name: path for path in ROOT.glob("*/pdserve/*") if path.is_dir() and path.name != "__pycache__"}


def table_rows(section: str) -> Iterator[list[str]]:
    """Cells of the tables of a section, without their heads."""
    for table in re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def sections() -> tuple[str, str]:
    """The text before the section "Absent", and that section."""
    present, absent = PAGE.read_text().split("\n## Absent\n")
    return present, absent


def source_of(path: str) -> Path:
    """`package/file.py` -> its file."""
    return PACKAGES[path.split("/")[0]].parent / path


def targets(node: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        yield from node.targets
    elif isinstance(node, ast.AnnAssign):
        yield node.target


def members(node: ast.ClassDef) -> set[str]:
    """Methods, class fields, and fields that a method sets on `self`."""
    names = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)}
    names |= {target.id for inner in node.body for target in targets(inner) if isinstance(target, ast.Name)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.stmt):
            of_self = (target for target in targets(inner) if isinstance(target, ast.Attribute))
            names |= {target.attr for target in of_self if ast.unparse(target.value) == "self"}
    return names


@cache
def defined(path: Path) -> frozenset[str]:
    """Names that a module defines: `Class`, `Class.member`, `function`, `CONSTANT`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {node.name, *(f"{node.name}.{member}" for member in members(node))}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        names |= {target.id for target in targets(node) if isinstance(target, ast.Name)}
    return frozenset(names)


def test_each_module_defines_the_names_of_its_row() -> None:
    rows = list(table_rows(sections()[0]))
    assert len(rows) > 80
    for vllm, module, here, _ in rows:
        path = source_of(module.strip("`"))
        assert path.is_file(), module
        names = re.findall(r"`([^`]+)`", here)
        assert names, f"{vllm} names nothing"
        missing = set(names) - defined(path)
        assert not missing, f"{module} does not define {missing}"


@pytest.mark.slow
def test_absent_names_are_not_defined() -> None:
    all_defined = {
        part
        for package in PACKAGES.values()
        for path in package.rglob("*.py")
        if "_pb2" not in path.name
        for name in defined(path)
        for part in name.split(".")
    }
    rows = list(table_rows(sections()[1]))
    assert len(rows) > 10
    for vllm, _ in rows:
        names = set(re.findall(r"`([^`]+)`", vllm))
        assert names
        assert not names & all_defined, f"{names & all_defined} is defined now"
