"""`free_memory` and `memory_limit`: what this process may take of the machine and of its control groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 60
"""Version 1 of control groups writes a number above this if there is no limit."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    num_bytes: int
    limited_by: str
    """`this machine`, or the control group with the least free memory."""


def free_memory(root: Path = Path("/")) -> FreeMemory | None:
    """Free bytes of the machine or of the tightest control group; None if the system does not report it.

    root: folder that contains `proc` and `sys`.
    """
    found = [*_machine(root), *_groups(root)]
    return min(found, key=lambda free: free.num_bytes, default=None)


def memory_limit(root: Path = Path("/")) -> FreeMemory | None:
    """Bytes of the machine or of the smallest control group if nothing else used any; None if the system does not report it."""
    found = [*_machine(root, "MemTotal"), *_groups(root, in_all=True)]
    return min(found, key=lambda free: free.num_bytes, default=None)


def _machine(root: Path, wanted: str = "MemAvailable") -> Iterator[FreeMemory]:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == wanted:
            yield FreeMemory(int(value.split()[0]) << 10, "this machine")


def _groups(root: Path, *, in_all: bool = False) -> Iterator[FreeMemory]:
    """All control groups of this process, from its own to the topmost visible one."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, top = ("memory.max", "memory.current", "inactive_file"), root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        own = PurePosixPath(path.strip()).relative_to("/")
        for group in (own, *own.parents):
            if (free := _left(top / group, *names, in_all=in_all)) is not None:
                # in a container the path of the group may not be visible; the topmost group is then the container's
                yield FreeMemory(max(0, free), f"the control group /{'' if str(group) == '.' else group}")


def _left(folder: Path, limit: str, usage: str, reclaimable: str, *, in_all: bool) -> int | None:
    """Free bytes of a group, or its limit; None if it has none. Cached files count as free, since they are reclaimed first."""
    with contextlib.suppress(OSError, ValueError):
        allowed = int((folder / limit).read_text())
        if allowed < _NO_LIMIT:
            if in_all:
                return allowed
            used = int((folder / usage).read_text())
            for line in _lines(folder / "memory.stat"):
                name, _, value = line.partition(" ")
                if name == reclaimable:
                    used -= int(value)
            return allowed - used
    return None


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().splitlines()
    return []
