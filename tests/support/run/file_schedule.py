"""A pytest plugin: where and in which order xdist runs files with `--dist loadfile`.

Files that take longest begin first, so that no long one is left for the end: by the seconds of the last run, which pytest's cache
keeps, and where a file is new there, by the number of its tests. `tests/cluster/shared/` counts as one file: it has one cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.run.run_report import file_times, reports_of

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

SHARED = "tests/cluster/shared"
_PROCESS_TEST_S = 3.0
_TEST_S = 0.05
"""Rough seconds of a test with and without processes, for files without a last run."""
_CACHE_KEY = "pdserve/seconds_of_files"


def scope_of(nodeid: str) -> str:
    """The unit that runs in one process: a file, or the folder of the shared cluster."""
    return SHARED if nodeid.startswith(f"{SHARED}/") else nodeid.partition("::")[0]


def longest_first(items: list[pytest.Item], last_s: Mapping[str, float]) -> list[pytest.Item]:
    """The tests, those of a scope in one piece and in their order. last_s: scope -> seconds of the last run."""
    scopes: dict[str, list[pytest.Item]] = {}
    for item in items:
        scopes.setdefault(scope_of(item.nodeid), []).append(item)

    def seconds(scope: str) -> float:
        rough_s = sum(_PROCESS_TEST_S if item.get_closest_marker("process") else _TEST_S for item in scopes[scope])
        return last_s.get(scope, rough_s)

    return [item for scope in sorted(scopes, key=seconds, reverse=True) for item in scopes[scope]]


@pytest.hookimpl(trylast=True)  # after the choice by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cache = getattr(config, "cache", None)  # there is none with `-p no:cacheprovider`
    if hasattr(config, "workerinput"):
        items[:] = longest_first(items, {} if cache is None else cache.get(_CACHE_KEY, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class FileSchedule(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False  # it would put files with most tests first
    return FileSchedule(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Keep the seconds of the files for the order of the next run, unless an interrupted run has only a part of them."""
    cache = getattr(terminalreporter.config, "cache", None)
    if (
        cache is not None
        and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        and terminalreporter.config.getoption("dist", "no") == "loadfile"
    ):
        seconds: dict[str, float] = {}
        for time in file_times(reports_of(terminalreporter)):
            scope = scope_of(f"{time.file}::")
            seconds[scope] = seconds.get(scope, 0.0) + time.seconds
        cache.set(_CACHE_KEY, cache.get(_CACHE_KEY, {}) | seconds)
