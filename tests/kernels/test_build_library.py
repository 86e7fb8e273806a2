"""The build of the native library: how many compilers run at once, and what ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from pdserve.cli.doctor import native_check
from pdserve.common.settings.worker_settings import PrefillSettings
from pdserve.kernels.native import build_library, compiler_jobs, native_library
from pdserve.kernels.native.build_library import BuildError, build, library_name
from pdserve.kernels.native.compiler_jobs import BYTES_PER_JOB, max_jobs
from tests.support.run.waiting import HANG_S, wait_until

COUNTING = """#!{python}
import os, sys, time
if "-fsyntax-only" in sys.argv:
    sys.exit(0)
mine = os.path.join("{folder}", f"running-{{os.getpid()}}")
open(mine, "w").close()
running = len([name for name in os.listdir("{folder}") if name.startswith("running-")])
with open("{folder}/counts", "a") as counts:
    counts.write(f"{{running}}\\n")
time.sleep(0.02)
os.unlink(mine)
with open(sys.argv[sys.argv.index("-o") + 1], "w") as made:
    made.write("object")
"""
HANGING = """#!/bin/sh
case "$*" in *fsyntax*) exit 0;; esac
echo $$ >> {folder}/pids
sleep 600 &
echo $! >> {folder}/pids
wait
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for the library; the fake compiler's notes are next to it."""
    made = tmp_path / "built"
    made.mkdir()
    return made


def fake_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    notes = folder.parent
    compiler = notes / "compiler"
    compiler.write_text(script.format(folder=notes, python=sys.executable))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return notes


def counts(notes: Path) -> list[int]:
    return [int(line) for line in (notes / "counts").read_text().splitlines()]


def pids(notes: Path) -> list[int]:
    path = notes / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def all_ended(started: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in started)


@pytest.mark.few(1)
@pytest.mark.parametrize("at_once", [1, 3])
def test_no_more_compilers_than_allowed_run_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    notes = fake_compiler(monkeypatch, folder, COUNTING)
    monkeypatch.setattr(compiler_jobs, "max_jobs", lambda: at_once)
    assert build(folder).name == library_name()
    seen = counts(notes)
    assert len(seen) > 10
    assert max(seen) == at_once
    assert [path.name for path in folder.iterdir()] == [library_name()]


def test_processors_and_free_memory_bound_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert max_jobs(lambda: 3 * BYTES_PER_JOB + 1) == 3
    assert max_jobs(lambda: BYTES_PER_JOB // 2) == 1
    assert max_jobs(lambda: 0) == 1
    assert max_jobs(lambda: 1 << 40) == 16
    assert max_jobs(lambda: None) == 16
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    assert max_jobs(lambda: 1 << 40) == 1


def test_a_compiler_that_hangs_ends_with_all_that_it_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = fake_compiler(monkeypatch, folder, HANGING)
    monkeypatch.setattr(compiler_jobs, "max_jobs", lambda: 2)
    monkeypatch.setattr(compiler_jobs, "TIMEOUT_S", 1.0)
    with pytest.raises(BuildError, match="took more than 1 s"):
        build(folder)
    started = pids(notes)
    assert started
    wait_until(lambda: all_ended(started))
    assert not list(folder.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_build_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    notes = fake_compiler(monkeypatch, folder, HANGING)
    command = [sys.executable, "-m", "pdserve.kernels.native.build_library", str(folder)]
    building = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(pids(notes)) >= 2)
    building.send_signal(number)
    assert building.wait(HANG_S)
    started = pids(notes)
    wait_until(lambda: all_ended(started))
    assert not list(folder.iterdir())


def test_the_first_failure_ends_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = HANGING.replace("echo $$ >>", 'case "$*" in *int8_rows*) echo no such thing; exit 1;; esac\necho $$ >>')
    notes = fake_compiler(monkeypatch, folder, script)
    monkeypatch.setattr(compiler_jobs, "max_jobs", lambda: 1000)
    with pytest.raises(BuildError, match=r"int8_rows\.cpp .* failed:\nno such thing"):
        build(folder)
    started = pids(notes)
    wait_until(lambda: all_ended(started))


@pytest.mark.slow
def test_two_builds_at_once_share_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = fake_compiler(monkeypatch, folder, COUNTING)
    (folder / ".build-of-a-killed-one").mkdir()
    with ThreadPoolExecutor() as threads:
        begin = threading.Barrier(3)

        def run(_: int) -> Path:
            begin.wait(HANG_S)
            return build(folder)

        assert len(set(threads.map(run, range(3)))) == 1
    shared = len(counts(notes))
    (notes / "counts").unlink()
    (folder / library_name()).unlink()
    build(folder)
    assert len(counts(notes)) == shared
    assert [path.name for path in folder.iterdir()] == [library_name()]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("compiler", "status", "line"),
    [("no-such-compiler", 1, "left out, torch computes instead: no C++ compiler"), ("COUNTING", 0, "built, ")],
)
def test_one_line_says_how_it_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, status: int, line: str
) -> None:
    if compiler == "COUNTING":
        fake_compiler(monkeypatch, folder, COUNTING)
    else:
        monkeypatch.setenv("CXX", compiler)
    command = [sys.executable, "-m", "pdserve.kernels.native.build_library", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    [said] = (done.stdout + done.stderr).splitlines()
    assert (done.returncode, said.startswith("kernels in C++"), line in said) == (status, True, True), said


def test_the_doctor_says_why_it_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "LIBRARY_FOLDER", tmp_path)
    native_library.load_library.cache_clear()
    try:
        monkeypatch.setenv("CXX", "no-such-compiler")
        [found, _] = native_check.check_native(PrefillSettings())
        assert (found.verdict.value, "looked for no-such-compiler" in found.what) == ("warning", True)
        assert found.advice.startswith("install a C++ compiler")
        monkeypatch.setattr(build_library, "find_compiler", lambda: ["/usr/bin/c++"])
        [found, _] = native_check.check_native(PrefillSettings())
        assert (found.verdict.value, "/usr/bin/c++ is here" in found.what) == ("warning", True)
        [found] = native_check.check_native(PrefillSettings(device="cuda"))
        assert found.verdict.value == "ok"
    finally:
        native_library.load_library.cache_clear()


@pytest.mark.usefixtures("built")
def test_the_doctor_names_the_instruction_sets() -> None:
    native_library.load_library.cache_clear()
    [found, _] = native_check.check_native(PrefillSettings())
    assert (found.verdict.value, "baseline" in found.what) == ("ok", True)
