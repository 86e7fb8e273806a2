"""Fixtures for every test."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.support.run.run_reaper import pytest_configure as pytest_configure

if TYPE_CHECKING:
    from tests.support.inputs.fuzz_cases import Fuzzer
    from tests.support.processes.tls_authority import Authority

pytest_plugins = (
    "tests.support.run.chosen_cases",
    "tests.support.run.run_report",
    "tests.support.run.file_schedule",
)

# a run in the background of a shell ignores it, and so would every process that a test interrupts
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore = ["clients"]  # `make clients` runs them, in other environments

# Tiny models on busy machines: two spinning threads make a test twenty times slower. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Examples have no time limit each: a busy machine would fail tests that are right. pytest-timeout ends what hangs.
hypothesis.settings.register_profile("pdserve", deadline=None)
hypothesis.settings.load_profile("pdserve")


def pytest_collection() -> None:
    """Everything that is made here stays: garbage collections, of more and more objects, would take a third of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what is loaded out of garbage collection, as a service does at its start.

    A full collection of a million objects takes 0.3 s, and some tests make one each. No test's object is there yet: in a cycle it
    would stay for good.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch with the name of the test's file, so that a failed test has the same random numbers when it is run again.

    The first of a module's tests that runs makes its fixtures, and which is first differs from run to run: hence the file's name.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(zlib.crc32(item.location[0].encode()))


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_checkpoints("qwen2", **options)`: `make_checkpoint` in a folder that the whole session shares; read only."""
    from tests.support.models.checkpoints import make_checkpoint

    made: dict[str, Path] = {}

    def make(architecture: str = "llama", **options: Any) -> Path:
        key = repr((architecture, sorted(options.items())))
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(architecture), architecture, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The CA of this deployment. The whole session shares it: issue from it, and leave its own file as it is."""
    from tests.support.processes.tls_authority import Authority

    return Authority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="session")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A CA of others, shared likewise."""
    from tests.support.processes.tls_authority import Authority

    return Authority(tmp_path_factory.mktemp("tls") / "other-ca")


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage collection: a finalizer that runs within `ast.parse` and parses itself, as one does that formats a traceback,
    makes CPython 3.11 fail the outer call ("AST constructor recursion depth mismatch"), for both count in one place."""
    gc.disable()
    yield
    gc.enable()


_FUZZ_REPORT = "fuzz report"


def _drop(record: logging.LogRecord) -> bool:
    return False


@pytest.fixture
def fuzzer(request: pytest.FixtureRequest) -> Iterator[Fuzzer]:
    """Fuzzer of a test marked `fuzz`, for its part of the time; its results are printed at the end of the run."""
    from pdserve.common.processes.allocator import return_large_blocks
    from tests.support.inputs.fuzz_cases import Fuzzer, seconds_of

    return_large_blocks(128 << 10)
    # pytest keeps every log record until the test ends: after tens of thousands of cases they are most of its memory
    plugin: Any = request.config.pluginmanager.get_plugin("logging-plugin")
    kept_records: logging.Handler = plugin.report_handler
    kept_records.addFilter(_drop)
    made = Fuzzer(seconds_of(request.node, request.session.items))
    yield made
    kept_records.removeFilter(_drop)
    request.node.user_properties.append((_FUZZ_REPORT, made.report()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = [
        f"{report.nodeid}: {line}"
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "teardown"
        for name, line in report.user_properties
        if name == _FUZZ_REPORT
    ]
    if lines:
        terminalreporter.section("fuzz")
        for line in sorted(lines):
            terminalreporter.line(line)
