"""Every form of stored weights in every way of serving: the texts of the same numbers stored as floats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.models.weight_form_record import RECORD
from tests.support.models.weight_form_ways import ARCHITECTURES, NAMES, WAYS, compare


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forms")


@pytest.mark.few(8)
@pytest.mark.diagonal
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_tokens(name: str, way: str, architecture: str, root: Path) -> None:
    found = compare(name, architecture, way, root)
    assert found.equal == found.compared
    assert list(found) == json.loads(RECORD.read_text())[name][way][architecture], "make family-records"


def test_the_record_has_every_form_and_way() -> None:
    record = json.loads(RECORD.read_text())
    assert {
        (name, way, architecture) for name in record for way in record[name] for architecture in record[name][way]
    } == {(name, way, architecture) for name in NAMES for way in WAYS for architecture in ARCHITECTURES}
