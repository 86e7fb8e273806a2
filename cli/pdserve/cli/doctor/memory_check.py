"""Memory: compares weights, KV pool and one step with the free memory of machine, control group and GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pdserve.cli.doctor.finding import Finding, failed, ok, warning
from pdserve.cli.doctor.gpu_check import NoView, gpu_index, look_at_gpus
from pdserve.common.errors import PdServeError
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.models.model_folder import model_folder

TIGHT_SHARE = 0.9
"""Share of free memory above which a warning is given."""


def check_memory(settings: WorkerSettings, root: Path = Path("/")) -> Iterator[Finding]:
    """Compare the memory that a worker needs with the free memory. root: folder that contains `proc` and `sys`."""
    from pdserve.engine.runner.loaded_model import rank_device  # imports torch
    from pdserve.engine.runner.pool.memory_needs import memory_needs

    try:
        needs = memory_needs(model_folder(settings.model, download=False), settings)
    except PdServeError as error:
        yield failed(f"what a worker needs is not known: {error.message}", "correct model or settings")
        return
    parts = {"weights": needs.weights, "KV pool": needs.pool, "a step, about": needs.step}
    parts |= {"images, about": needs.images} if needs.images else {}
    draft = {"the draft model": needs.draft_model} if needs.draft_model else {}
    on_host = {"KV blocks in transfer": needs.transfers} if needs.on_gpu else parts
    on_device = parts | {"KV blocks in transfer": needs.transfers}
    free = free_memory(root)
    if free is None:
        yield warning("this system does not report its free memory", f"see to {_mib(needs.host)}")
    else:
        tier = {"the host-memory tier": needs.host_tier} if needs.host_tier else {}
        on_host = on_host | {"the process, about": needs.process} | tier
        of_ranks = "" if needs.ranks == 1 else f" of {needs.ranks} ranks"
        on_host = {name + of_ranks: needs.ranks * size for name, size in on_host.items()}
        on_host |= {} if needs.on_gpu else draft
        yield _fit("main memory", on_host, needs.host, free.num_bytes, free.limited_by)
    for rank in range(needs.ranks if needs.on_gpu else 0):
        device = rank_device(settings.device, rank, needs.ranks)
        if rank == 0:
            yield _on_gpu(device, on_device | draft, needs.device)
        else:
            yield _on_gpu(device, on_device, needs.device - needs.draft_model)


def _on_gpu(device: str, parts: dict[str, int], num_bytes: int) -> Finding:
    try:
        gpus = look_at_gpus().gpus
    except NoView as error:
        return failed(f"the memory of {device} is not known: {error}", "see the check gpu")
    index = gpu_index(device)
    if index is None or index >= len(gpus):
        return failed(f"{_needed(parts, num_bytes)} on {device}, which is not here", "see the check gpu")
    return _fit(device, parts, num_bytes, gpus[index].free_bytes, gpus[index].name)


def _fit(where: str, parts: dict[str, int], num_bytes: int, free_bytes: int, limited_by: str) -> Finding:
    shown = f"{where}: {_needed(parts, num_bytes)}, free {_mib(free_bytes)} by {limited_by}"
    advice = "set a smaller kv_cache_mib (or num_blocks) or kv_host_mib, a smaller dtype or model, or free memory"
    if num_bytes > free_bytes:
        return failed(shown, advice)
    if num_bytes > TIGHT_SHARE * free_bytes:
        return warning(f"{shown}: tight", advice)
    return ok(shown)


def _needed(parts: dict[str, int], num_bytes: int) -> str:
    return f"needs {_mib(num_bytes)} ({', '.join(f'{name} {_mib(size)}' for name, size in parts.items())})"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"


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


def _machine(root: Path) -> Iterator[FreeMemory]:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield FreeMemory(int(value.split()[0]) << 10, "this machine")


def _groups(root: Path) -> Iterator[FreeMemory]:
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
            if (free := _left(top / group, *names)) is not None:
                # in a container the path of the group may not be visible; the topmost group is then the container's
                yield FreeMemory(max(0, free), f"the control group /{'' if str(group) == '.' else group}")


def _left(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Free bytes of a group; None if it has no limit. Cached files count as free, since they are reclaimed first."""
    with contextlib.suppress(OSError, ValueError):
        allowed = int((folder / limit).read_text())
        if allowed < _NO_LIMIT:
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
