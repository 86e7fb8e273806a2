"""`docs/parameters.md` has a row for each field of `SamplingParams`, with its default and tests that know it."""

from __future__ import annotations

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


def test_the_tests_of_a_row_use_its_parameter() -> None:
    for name, _, _, _, tests in rows():
        paths = re.findall(r"`(tests/[\w/]+\.py)`", tests)
        assert paths, name
        for path in paths:
            # told by its own name, or by what it is in a test's words
            assert name.split("_")[0] in (ROOT / path).read_text(), f"{path} says nothing of {name}"
