"""Functions of an engine that `EngineCoreClient.utility` calls by name. They run in the engine's thread, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from pdserve.common.errors import InternalError, InvalidRequest, PdServeError
from pdserve.engine.engine_core import EngineCore


def get_stats(core: EngineCore) -> dict[str, Any]:
    """Fields of `SchedulerStats`."""
    return msgspec.structs.asdict(core.scheduler.stats())


def reset_prefix_cache(core: EngineCore) -> bool:
    """Drop the prefix cache. False, and nothing is dropped, while a sequence uses blocks."""
    if core.scheduler.stats().num_blocks_in_use:
        return False
    core.scheduler.pool.forget_cached()
    return True


def check_pool(core: EngineCore) -> bool:
    """Check all blocks and their owners (`Scheduler.check`); returns whether no request is open."""
    is_idle = not core.scheduler.requests
    core.scheduler.check(idle=is_idle)
    return is_idle


UTILITIES: Mapping[str, Callable[..., Any]] = {
    function.__name__: function for function in (get_stats, reset_prefix_cache, check_pool)
}


def call_utility(core: EngineCore, name: str, args: Sequence[Any]) -> Any:
    """Raises: InvalidRequest for an unknown name or wrong arguments, InternalError with the text of any other failure."""
    function = UTILITIES.get(name)
    if function is None:
        raise InvalidRequest(f"utility is {name[:100]!r}, there are {', '.join(UTILITIES)}", "utility")
    if args:
        raise InvalidRequest(f"utility {name} has {len(args)} arguments, it takes none", "args")
    try:
        return function(core)
    except PdServeError:
        raise
    except Exception as error:
        raise InternalError(f"{name} failed: {type(error).__name__}: {error}") from error
