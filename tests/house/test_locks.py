"""Installed packages stand in `locks/`, with hashes; nothing else decides what is fetched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = {path.stem: path.read_text() for path in sorted((ROOT / "locks").glob("*.txt"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPLOY = ROOT / "deploy"
APART = [
    path
    for folder in ("tests/clients", "tests/kernels", "deploy")
    for path in sorted((ROOT / folder / "requirements").glob("*.in"))
]


def entries_of(text: str) -> dict[str, str]:
    """Name -> its text."""
    return {entry.partition("==")[0]: entry for entry in re.findall(r"^[^#\s].*(?:\n .*)*\n", text, re.MULTILINE)}


def entries(lock: str) -> dict[str, str]:
    return entries_of(LOCKS[lock])


def locked() -> dict[str, set[str]]:
    """Name -> the versions in all files."""
    versions: dict[str, set[str]] = {}
    for lock in LOCKS:
        for name, entry in entries(lock).items():
            versions.setdefault(name, set()).add(entry.partition("==")[2].split()[0])
    return versions


TEXTS = LOCKS | {path.stem: path.with_suffix(".txt").read_text() for path in APART}


@pytest.mark.parametrize("lock", sorted(TEXTS))
def test_every_line_is_a_version_with_hashes(lock: str) -> None:
    found = entries_of(TEXTS[lock])
    assert found
    for name, entry in found.items():
        head, *hashes = entry.removesuffix("\n").split(" \\\n    ")
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*==[0-9][\w.+]*( ; .+)?", head), name
        assert hashes, name
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), name
    assert "index-url" not in TEXTS[lock]
    assert "//" not in TEXTS[lock]


@pytest.mark.parametrize("asked", APART, ids=lambda path: path.stem)
def test_what_is_installed_apart_is_locked(asked: Path) -> None:
    found = entries_of(asked.with_suffix(".txt").read_text())
    lines = [Requirement(line) for line in asked.read_text().splitlines() if not line.startswith("#")]
    assert lines
    for line in lines:
        version = found[canonicalize_name(line.name)].partition("==")[2].split()[0]
        assert line.specifier.contains(version), f"{line}: {version}; make lock"


def test_no_two_files_disagree() -> None:
    versions = locked()
    assert versions.pop("torch") == {"2.13.0", "2.13.0+cpu"}
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}
    # these may be installed without each other
    share = ("mooncake", "ray", "formats", "dev")
    known: dict[str, str] = {}
    assert all(known.setdefault(name, entry) == entry for lock in share for name, entry in entries(lock).items())
    parts = [name for lock in LOCKS if lock not in ("build", *share) for name in entries(lock)]
    assert sorted([*parts, *known]) == sorted([*set(parts) | known.keys(), "torch"]), "a package stands in two files"


@pytest.mark.parametrize("extra", [None, *PROJECT["optional-dependencies"]])
def test_what_pyproject_asks_for_is_locked(extra: str | None) -> None:
    versions = locked()
    of_users = {
        None: ["build", "torch", "runtime"],
        "nixl": ["nixl"],
        "bench": ["bench", "runtime"],
        "mooncake": ["mooncake", "runtime"],
        "ray": ["ray", "runtime"],
        "formats": ["formats", "runtime"],
        "triton": ["triton"],
    }
    parts = of_users.get(extra, list(LOCKS))
    installed = {name for part in parts for name in entries(part)}
    for line in PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]:
        asked = Requirement(line)
        if canonicalize_name(asked.name) != PROJECT["name"]:
            [*found] = versions[canonicalize_name(asked.name)]
            assert canonicalize_name(asked.name) in installed, f"{line} is not in {parts}; make lock"
            assert all(asked.specifier.contains(version) for version in found), f"{line}: {found}; make lock"


def test_what_is_installed_is_locked() -> None:
    freeze = [sys.executable, "-m", "pip", "--disable-pip-version-check", "freeze", "--exclude-editable"]
    said = subprocess.run(freeze, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    has_cuda = any(re.match("(nvidia|cuda)-", one) for one in metadata.requires("torch") or ())
    versions = locked()
    for line in said.splitlines():
        name, _, version = line.partition("==")
        name = canonicalize_name(name)
        # pip by itself fetches it for xgrammar; deploy/install.py leaves it out where torch has no CUDA
        if name != "triton" or has_cuda:
            assert version in versions.get(name, ()), f"{line} is not what locks/ say: make, or make lock"


def test_torch_is_locked_apart_for_processors_and_cuda() -> None:
    [(_, cpu)], [(_, cuda)] = entries("torch-cpu").items(), entries("torch").items()
    wheels = (ROOT / "locks/torch-cpu-wheels.sha256").read_text().splitlines()
    assert cpu.count("--hash") == len(wheels)
    assert all(f"sha256:{line.split()[0]}" in cpu for line in wheels)
    for python in ("cp311", "cp312", "cp313"):
        for machine in ("x86_64", "aarch64"):
            assert any(f"{python}-manylinux" in line and machine in line for line in wheels)
    assert not set(re.findall(r"sha256:\w+", cpu)) & set(re.findall(r"sha256:\w+", cuda))
    of_cuda = [name for lock in LOCKS for name in entries(lock) if re.match("(nvidia|cuda)-|triton$", name)]
    assert of_cuda
    assert set(of_cuda) == set(entries("torch-cuda") | entries("triton"))


FAKE_PIP = """
import json, os, sys
with open(os.environ["FAKE_PIP_LOG"], "a") as log:
    print(json.dumps(sys.argv[1:]), file=log)
if any(argument.endswith("torch-cpu.txt") for argument in sys.argv) and os.environ["TORCH_CPU"]:
    sys.exit(os.environ["TORCH_CPU"])
"""


def pip_calls(
    folder: Path, *arguments: str, torch_cpu: str = ""
) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run deploy/install.py, and return its calls of pip. torch_cpu: pip's answer when asked for torch's CPU build."""
    (folder / "pip").mkdir()
    (folder / "pip/__init__.py").touch()
    (folder / "pip/__main__.py").write_text(FAKE_PIP)
    log = folder / "log"
    log.touch()
    environ = os.environ | {"PYTHONPATH": str(folder), "FAKE_PIP_LOG": str(log), "TORCH_CPU": torch_cpu}
    command = [sys.executable, "deploy/install.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    return done, [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.few(2)
@pytest.mark.parametrize("torch_cpu", ["", "ERROR: No matching distribution found for torch==2.13.0+cpu"])
@pytest.mark.parametrize(
    "extras",
    [
        [],
        ["nixl"],
        ["mooncake"],
        ["ray"],
        ["nixl", "bench", "dev"],
        ["nixl", "bench", "mooncake", "ray", "triton", "dev", "helm"],
    ],
)
def test_pip_fetches_nothing_without_a_hash(tmp_path: Path, torch_cpu: str, extras: list[str]) -> None:
    done, calls = pip_calls(tmp_path, *extras, "--torch-index", "https://example.org/torch", torch_cpu=torch_cpu)
    assert done.returncode == 0, done.stderr
    installs = [call for call in calls if "install" in call]
    assert len(installs) > 3
    for call in installs:
        assert "--no-deps" in call
        assert "--require-hashes" in call or "--no-index" in call
        assert "--no-build-isolation" in call or {"--only-binary", ":all:"} <= set(call)
        assert not any("extra-index" in argument for argument in call)
        # the other index is asked for torch and for nothing else
        files = [Path(call[place + 1]).stem for place, argument in enumerate(call) if argument == "--requirement"]
        assert ("--index-url" in call) == (files in (["torch"], ["torch-cpu"]))
    asked = {Path(argument).stem for call in installs for argument in call if argument.endswith(".txt")}
    assert {"build", "runtime", "torch-cpu", *extras} <= asked
    assert ("torch" in asked) == bool(torch_cpu)


def test_a_processor_build_with_another_hash_is_no_reason_to_take_cudas(tmp_path: Path) -> None:
    mismatch = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."
    done, calls = pip_calls(tmp_path, torch_cpu=mismatch)
    assert done.returncode
    assert mismatch in done.stderr
    assert calls[-1][-1].endswith("torch-cpu.txt")


def test_an_unknown_extra_is_refused(tmp_path: Path) -> None:
    done, calls = pip_calls(tmp_path, "nosuch")
    assert done.returncode
    assert "nosuch" in done.stderr
    assert not calls


def test_the_image_installs_from_the_locks_alone() -> None:
    text = (ROOT / "Dockerfile").read_text()
    commands = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert "extra-index-url" not in text
    assert "pip install" not in commands
    assert commands.count("deploy/install.py") == 3


def test_make_installs_from_the_locks_alone() -> None:
    assert "pip install" not in (ROOT / "Makefile").read_text()


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("cyclonedx_py") is None, reason="an environment from before locks/dev.txt had cyclonedx-bom"
)
def test_the_bill_of_materials_names_every_locked_package(tmp_path: Path) -> None:
    target = tmp_path / "made/sbom.cdx.json"
    command = [sys.executable, "-W", "ignore", "deploy/sbom.py", str(target), "--no-validate"]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    bill = json.loads(target.read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == PROJECT["name"]
    named: dict[str, set[str]] = {}
    for component in bill["components"]:
        named.setdefault(component["name"], set()).add(component["version"])
        assert component["externalReferences"][0]["hashes"], component["name"]
    assert named == locked()
    assert str(ROOT) not in target.read_text()
