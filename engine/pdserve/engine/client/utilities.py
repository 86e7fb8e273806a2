"""Functions of an engine that `EngineCoreClient.utility` calls by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdserve.common.errors import InternalError, InvalidRequest, PdServeError
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.lora.lora_runner import Adapters


def get_stats(core: EngineCore) -> dict[str, Any]:
    """Fields of `SchedulerStats`; those of `spec_decoding_stats` by their names, too."""
    stats = core.stats()
    drafts = stats.spec_decoding_stats
    fields = msgspec.structs.asdict(stats)
    return fields | {"spec_decoding_stats": None if drafts is None else msgspec.structs.asdict(drafts)}


def reset_prefix_cache(core: EngineCore) -> bool:
    """Drop the prefix cache. False, and nothing is dropped, while a sequence uses blocks."""
    if core.scheduler.pool.num_in_use:
        return False
    core.scheduler.pool.forget_cached()
    return True


def check_pool(core: EngineCore) -> bool:
    """Check all blocks and their owners (`Scheduler.check`); returns whether no request is open."""
    is_idle = not core.scheduler.requests
    core.scheduler.check(idle=is_idle)
    return is_idle


def remove_lora(core: EngineCore, path: str) -> None:
    """Forget the adapter in a folder. Sequences that run with it end with it."""
    _adapters(core).remove(Path(path))


def add_lora(core: EngineCore, path: str) -> str:
    """Read and check the adapter in a PEFT folder, if it is new or has changed; returns its fingerprint.

    Raises: ConfigError naming the file, the field or tensor, and the value; UnsupportedModel for what is not served; InvalidRequest
    without `enable_lora`.
    """
    return _adapters(core).add(Path(path))


def _adapters(core: EngineCore) -> Adapters:
    if core.adapters is None:
        raise InvalidRequest("lora_request is given, and this engine was made without enable_lora", "lora_request")
    return core.adapters


UTILITIES: Mapping[str, Callable[..., Any]] = {
    function.__name__: function for function in (get_stats, reset_prefix_cache, check_pool, remove_lora)
}
"""Run in the engine's thread, between two steps."""
BESIDE_STEPS: Mapping[str, Callable[..., Any]] = {"add_lora": add_lora}
"""Take long, and run in a thread of their own."""
_TAKES_PATH = {"add_lora", "remove_lora"}
"""Utilities with one argument, a text."""


def answer_of(function: Callable[..., Any] | None, name: str, core: EngineCore, args: Sequence[Any]) -> Any:
    """Call a utility. Raises: InvalidRequest for an unknown name or wrong arguments, InternalError with the text of any other
    failure."""
    if function is None:
        names = ", ".join((*UTILITIES, *BESIDE_STEPS))
        raise InvalidRequest(f"utility is {name[:100]!r}, there are {names}", "utility")
    takes = 1 if name in _TAKES_PATH else 0
    if len(args) != takes or not all(isinstance(arg, str) for arg in args):
        raise InvalidRequest(
            f"utility {name} has {len(args)} arguments, it takes {['none', 'one text'][takes]}", "args"
        )
    try:
        return function(core, *args)
    except PdServeError:
        raise
    except Exception as error:
        raise InternalError(f"{name} failed: {type(error).__name__}: {error}") from error
