"""Fixtures for every test."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from fuzz_cases import Fuzzer
    from tls_authority import Authority

# Tiny models on busy machines: two spinning threads make a test twenty times slower. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Examples have no time limit each: a busy machine would fail tests that are right. pytest-timeout ends what hangs.
hypothesis.settings.register_profile("pdserve", deadline=None)
hypothesis.settings.load_profile("pdserve")


class _SharedModules(MetaPathFinder):
    """Lets tests import the modules that lie beside this file by name.

    The folder itself must not be on `sys.path`: its subfolders `kernels` and `models` would then be importable, and
    `transformers` looks for a package `kernels`.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = Path(__file__).with_name(f"{fullname}.py")
        return spec_from_file_location(fullname, file) if path is None and file.is_file() else None


sys.meta_path.append(_SharedModules())


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_checkpoints("qwen2", **options)`: `make_checkpoint` in a folder that the whole session shares; read only."""
    from checkpoints import make_checkpoint

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
    from tls_authority import Authority

    return Authority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="session")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A CA of others, shared likewise."""
    from tls_authority import Authority

    return Authority(tmp_path_factory.mktemp("tls") / "other-ca")


_FUZZ_REPORT = "fuzz report"


@pytest.fixture
def fuzzer(request: pytest.FixtureRequest) -> Iterator[Fuzzer]:
    """Of a test marked `fuzz`, for its part of the time; what it did is said at the end of the run."""
    from fuzz_cases import Fuzzer, seconds_of
    from process_memory import return_large_blocks

    return_large_blocks()
    made = Fuzzer(seconds_of(request.node, request.session.items))
    # as a service does at its start: a full collection of all that the tests have loaded takes 0.1 s
    gc.collect()
    gc.freeze()
    yield made
    gc.unfreeze()
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
