"""`docs/parameters.md` has a row for each field of `SamplingParams`, with its default and tests that know it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import msgspec

from pdserve.common.request.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/parameters.md"


def rows() -> list[tuple[str, ...]]:
    """parameter, rule, default, range, tests."""
    section = DOCUMENT.read_text().split("\n## Parameters\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)


def test_every_field_has_a_row_in_its_place_with_its_default() -> None:
    fields = msgspec.structs.fields(SamplingParams)
    assert [name for name, *_ in rows()] == [field.name for field in fields]
    written = {name: default for name, _, default, *_ in rows()}
    for field in fields:
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        text = "none" if default is None else str(default).lower()
        assert written[field.name] == text, field.name


def words_of_code(path: Path) -> set[str]:
    """Keywords of calls, attributes and whole strings of a file: what can set or read a parameter."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    words = {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
    words |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return words | {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_the_tests_of_a_row_use_its_parameter() -> None:
    for name, _, _, _, tests in rows():
        paths = re.findall(r"`(tests/[\w/]+\.py)`", tests)
        assert paths, name
        for path in paths:
            assert name in words_of_code(ROOT / path), f"{path} does not use {name}"
