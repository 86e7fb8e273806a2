"""`StatLoggerBase`: an installed or given class that gets the statistics of each step; `LoggingStatLogger` is one.

An entry point of the group `pdserve.stat_loggers` is a factory: a callable with the engine's `EngineInfo` and its index, always 0,
that makes a logger. An installed one is imported only if the setting `stat_loggers` names it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pdserve.common import clock
from pdserve.common.errors import ConfigError
from pdserve.common.request.engine_types import SchedulerStats
from pdserve.engine.engine_info import EngineInfo
from pdserve.engine.stats.iteration_stats import IterationStats

ENTRY_POINT_GROUP = "pdserve.stat_loggers"
log = logging.getLogger(__name__)


class StatLoggerBase(ABC):
    """A logger. Its methods are called in the thread that reads the engine's outputs, which waits for them."""

    def __init__(self, engine_info: EngineInfo, engine_index: int = 0) -> None:
        self.engine_info = engine_info
        self.engine_index = engine_index

    @abstractmethod
    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        """Called after each step that computed something or ended a request."""

    @abstractmethod
    def log(self) -> None:
        """Called about every 10 s while there are steps, by `do_log_stats`, and at the engine's end."""


StatLoggerFactory = Callable[[EngineInfo, int], StatLoggerBase]


class LoggingStatLogger(StatLoggerBase):
    """A line of the log per period: throughput, sequences, and cache. In the setting `stat_loggers` its name is `logging`."""

    def __init__(self, engine_info: EngineInfo, engine_index: int = 0) -> None:
        super().__init__(engine_info, engine_index)
        self._stats = SchedulerStats()
        self._before = SchedulerStats()
        self._begin()

    def _begin(self) -> None:
        self._since = clock.monotonic()
        self._num_prompt_tokens = self._num_generation_tokens = 0
        self._before = self._stats

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        self._stats = scheduler_stats or self._stats
        if iteration_stats is not None:
            self._num_prompt_tokens += iteration_stats.num_prompt_tokens
            self._num_generation_tokens += iteration_stats.num_generation_tokens

    def log(self) -> None:
        elapsed_s = max(clock.monotonic() - self._since, 1e-9)
        stats, before = self._stats, self._before
        queried = stats.prefix_cache_queries - before.prefix_cache_queries
        log.info(
            "engine %d: prompts %.1f tokens/s, output %.1f tokens/s; %d sequences running, %d waiting; KV cache %.1f %% in use; "
            "prefix cache hit rate %.1f %%",
            self.engine_index, self._num_prompt_tokens / elapsed_s, self._num_generation_tokens / elapsed_s,
            stats.num_running_reqs, stats.num_waiting_reqs + stats.num_remote_kv_reqs,
            100 * stats.kv_cache_usage,
            100 * (stats.prefix_cache_hits - before.prefix_cache_hits) / max(1, queried),
        )  # fmt: skip
        self._begin()


BUILT_IN: Mapping[str, StatLoggerFactory] = {"logging": LoggingStatLogger}


def load_stat_loggers(wanted: Sequence[str | StatLoggerFactory], info: EngineInfo) -> list[StatLoggerBase]:
    """The loggers of these names and factories. Imports no other entry points.

    Raises: ConfigError for one that is not installed, is installed twice, or cannot be made.
    """
    offered: dict[str, list[EntryPoint]] = {}
    if any(isinstance(one, str) and one not in BUILT_IN for one in wanted):
        for point in entry_points(group=ENTRY_POINT_GROUP):
            offered.setdefault(point.name, []).append(point)
    return [_make(one, offered, info) for one in wanted]


def _make(wanted: object, offered: Mapping[str, Sequence[EntryPoint]], info: EngineInfo) -> StatLoggerBase:
    try:
        if isinstance(wanted, str):
            factory = BUILT_IN.get(wanted) or _point(wanted, offered).load()
        elif callable(wanted):
            factory = wanted
        else:
            raise ConfigError(f"stat_loggers has {wanted!r:.60}, a name or a factory is needed")
        made: Any = factory(info, 0)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"stat logger {wanted!r:.100} cannot be made: {type(error).__name__}: {error!s:.200}"
        ) from error
    if not all(callable(getattr(made, name, None)) for name in ("record", "log")):
        raise ConfigError(f"stat logger {wanted!r:.100} makes {made!r:.60}, which has no `record` and `log`")
    return made  # type: ignore[no-any-return]  # its methods were looked at


def _point(name: str, offered: Mapping[str, Sequence[EntryPoint]]) -> EntryPoint:
    points = offered.get(name, ())
    if len(points) != 1:
        found = f"is installed {len(points)} times" if points else "is not installed"
        known = ", ".join(sorted({*BUILT_IN, *offered}))
        raise ConfigError(f"stat_loggers names {name[:100]!r}, which {found}; there are {known}")
    return points[0]
