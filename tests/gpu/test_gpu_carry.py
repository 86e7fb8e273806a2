"""`make gpu-carry`: what it carries is enough, and NIXL's wheel stays a wheel."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy.gpu_carry import LEFT_OUT, NIXL, OF_TESTS, THERE, pack_again, requirements

WITH_PYTHON = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
ELSEWHERE = {"torch", "triton", "pip", "nixl-cu12"}
"""Packages that the machine has; and NIXL for another CUDA."""


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.chdir(Path(__file__).parents[2])
    return {entry.partition("==")[0] for entry in requirements()}


def test_all_that_a_carried_package_needs_is_carried_or_there(names: set[str]) -> None:
    missing = set()
    for name in names:
        try:
            needed = requires(name) or []
        except PackageNotFoundError:  # only other Pythons need it
            continue
        for text in needed:
            requirement = Requirement(text)
            other = re.sub(r"[-_.]+", "-", requirement.name).lower()
            if requirement.marker is None or requirement.marker.evaluate(WITH_PYTHON):
                missing |= {f"{other}, which {name} needs"} if other not in names | THERE | ELSEWHERE else set()
    assert not missing


def test_what_pdserve_and_its_tests_need_is_carried_or_there(names: set[str]) -> None:
    needed = {
        re.sub(r"[-_.]+", "-", Requirement(text).name).lower()
        for text in requires("pdserve") or []
        if "extra" not in text
    }
    assert len(needed) > 20
    assert needed - ELSEWHERE <= names | THERE
    assert {*OF_TESTS, *NIXL} <= names


def test_no_package_is_carried_twice_and_each_has_its_hash(names: set[str]) -> None:
    found = [entry.partition("==")[0] for entry in requirements()]
    assert len(names) == len(found)
    assert all("--hash=sha256:" in entry for entry in requirements())


def test_a_packed_wheel_keeps_what_is_loaded_and_its_record(tmp_path: Path) -> None:
    wheel = tmp_path / "nixl_cu13-1-py3-none-any.whl"
    kept = {
        "nixl_cu13/a.py": b"1",
        "nixl_cu13.libs/nixl/libplugin_UCX.so": b"2" * 900,
        "nixl_cu13-1.dist-info/METADATA": b"3",
    }
    dropped = [
        "nixl_ep/b.so",
        "nixl_cu13.libs/nixl/libplugin_POSIX.so",
        "nixl_cu13.libs/ucx/libucx_perftest.so.0",
        "x.la",
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in {**kept, **dict.fromkeys(dropped, b"0")}.items():
            archive.writestr(name, content)
        archive.writestr("nixl_cu13-1.dist-info/RECORD", "".join(f"{name},,\n" for name in [*kept, *dropped]))
    pack_again(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert {name: archive.read(name) for name in kept} == kept
        assert not [name for name in archive.namelist() if LEFT_OUT.search(name)]
        record = archive.read("nixl_cu13-1.dist-info/RECORD").decode().splitlines()
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"1").digest()).rstrip(b"=").decode()
    assert record[0] == f"nixl_cu13/a.py,sha256={digest},1"
    assert record[-1] == "nixl_cu13-1.dist-info/RECORD,,"
    assert len(record) == len(kept) + 1
