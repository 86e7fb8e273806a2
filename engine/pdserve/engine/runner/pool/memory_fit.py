"""`allocating`: allocates the memory of a setting, or fails with a sentence that says how much fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.common.errors import ConfigError
from pdserve.kernels.cpu.free_memory import free_memory, memory_limit


@contextmanager
def allocating(given: str, num_bytes: int, device: str = "cpu") -> Iterator[None]:
    """Inside, `num_bytes` are allocated. given: settings with their values, for the message. device: its memory.

    Raises: ConfigError if the machine or its control group has less in all, without a try, since memory that is reserved but not
    there ends the process later; or if the allocation fails.
    """
    limit = memory_limit() if device == "cpu" else None
    if limit is not None and num_bytes > limit.num_bytes:
        raise ConfigError(_message(given, num_bytes, device))
    try:
        yield
    except (OSError, OverflowError, MemoryError, RuntimeError) as error:
        # torch has no type of its own for main memory
        raise ConfigError(_message(given, num_bytes, device)) from error


def _message(given: str, num_bytes: int, device: str) -> str:
    needs = f"{given} needs {num_bytes >> 20:,} MiB"
    if device != "cpu":
        return f"{needs} on {device}, which has less free"
    free = free_memory()
    return (
        f"{needs}, free are {free.num_bytes >> 20:,} MiB by {free.limited_by}"
        if free
        else f"{needs}, more than is free"
    )
