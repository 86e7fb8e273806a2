"""The table of slow files, and the order of files in the next run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.run.file_schedule import SHARED, scope_of
from tests.support.run.run_report import file_times

ROOT = Path(__file__).parents[2]


def report(nodeid: str, seconds: float, when: str = "call") -> pytest.TestReport:
    return pytest.TestReport(nodeid, (nodeid, 0, ""), {}, "passed", None, when, duration=seconds)  # type: ignore[arg-type]


def test_set_up_and_tear_down_count_and_the_longest_comes_first() -> None:
    short, long = file_times(
        [
            report("a.py::test_one", 1.0),
            report("b.py::test_one", 1.0, "setup"),
            report("b.py::test_one", 2.0),
            report("b.py::test_one", 1.0, "teardown"),
            report("b.py::test_two[x::y]", 3.5),
        ]
    )[::-1]
    assert (short.file, short.seconds, short.num_tests) == ("a.py", 1.0, 1)
    assert (long.file, long.seconds, long.num_tests) == ("b.py", 7.5, 2)
    assert (long.longest_s, long.longest) == (4.0, "test_one")


def test_tests_of_the_shared_cluster_run_in_one_process() -> None:
    scopes = {scope_of(f"{SHARED}/{name}") for name in ("test_a.py::test_x", "test_b.py::test_y[1]")}
    assert scopes == {SHARED}
    assert scope_of("tests/cluster/test_tls.py::TestA::test_x[a::b]") == "tests/cluster/test_tls.py"


def test_the_files_that_took_longest_begin_first(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b", "c")):
        (tmp_path / f"test_{name}.py").write_text(
            f"import time, pytest\ndef test_first(): time.sleep({0.2 * number})\ndef test_second(): pass\n"
        )
    plugins = ("xdist", "tests.support.run.run_report", "tests.support.run.file_schedule")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-n",
        "1",
        "--dist",
        "loadfile",
        "-c",
        str(tmp_path / "pytest.ini"),
    ]
    command += ["--rootdir", str(tmp_path), *(part for plugin in plugins for part in ("-p", plugin)), str(tmp_path)]
    orders = []
    for _ in range(2):
        done = subprocess.run(
            command, cwd=tmp_path, text=True, capture_output=True, check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        passed = [line.split()[-1] for line in done.stdout.splitlines() if " PASSED " in line]
        orders.append([nodeid.partition("::")[0] for nodeid in passed if nodeid.endswith("test_first")])
    assert orders == [["test_a.py", "test_b.py", "test_c.py"], ["test_c.py", "test_b.py", "test_a.py"]]
