"""Check of memory: compares weights, KV pool and one step with the free memory of the machine, the control group and the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pdserve.cli.doctor.finding import Finding, failed, ok, warning
from pdserve.cli.doctor.gpu_check import NoView, look_at_gpus
from pdserve.common.errors import PdServeError
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.runner.device.cuda_devices import Gpu, gpu_index, rank_devices
from pdserve.kernels.cpu.free_memory import free_memory
from pdserve.models.model_folder import model_folder

TIGHT_SHARE = 0.9
"""A warning is given if a worker needs more than this share of the free memory."""


def check_memory(settings: WorkerSettings, root: Path = Path("/")) -> Iterator[Finding]:
    """Compare the memory that a worker needs with the free memory. root: folder that contains `proc` and `sys`."""
    from pdserve.engine.runner.pool.memory_needs import memory_needs  # imports torch

    try:
        needs = memory_needs(model_folder(settings.model, download=False), settings)
    except PdServeError as error:
        yield failed(f"the memory that a worker needs is unknown: {error.message}", "correct the model or settings")
        return
    parts = {"weights": needs.weights, "KV pool": needs.pool, "a step, about": needs.step}
    parts |= {"images, about": needs.images} if needs.images else {}
    draft = {"the draft model": needs.draft_model} if needs.draft_model else {}
    on_host = {"KV blocks in transfer": needs.transfers} if needs.on_gpu else parts
    on_device = parts | {"KV blocks in transfer": needs.transfers}
    free = free_memory(root)
    if free is None:
        yield warning("this system does not report its free memory", f"make sure that {_mib(needs.host)} is free")
    else:
        tier = {"the host-memory tier": needs.host_tier} if needs.host_tier else {}
        store = {"the shared store": needs.store} if needs.store else {}
        on_host = on_host | {"the process, about": needs.process} | tier | store
        of_ranks = "" if needs.ranks == 1 else f" of {needs.ranks} ranks"
        on_host = {name + of_ranks: needs.ranks * size for name, size in on_host.items()}
        on_host |= {} if needs.on_gpu else draft
        yield _fit("main memory", on_host, needs.host, free.num_bytes, free.limited_by)
    if not needs.on_gpu:
        return
    try:
        gpus = look_at_gpus(settings).gpus
    except NoView as error:
        yield failed(f"the memory of {settings.device} is not known: {error}", "see the gpu check")
        return
    for rank, device in enumerate(rank_devices(settings)):
        if rank == 0:
            yield _on_gpu(gpus, device, on_device | draft, needs.device)
        else:
            yield _on_gpu(gpus, device, on_device, needs.device - needs.draft_model)


def _on_gpu(gpus: Sequence[Gpu], device: str, parts: dict[str, int], num_bytes: int) -> Finding:
    index = gpu_index(device)
    if index is None or index >= len(gpus):
        return failed(f"{_needed(parts, num_bytes)} on {device}, which this machine does not have", "see the gpu check")
    return _fit(device, parts, num_bytes, gpus[index].free_bytes, gpus[index].name)


def _fit(where: str, parts: dict[str, int], num_bytes: int, free_bytes: int, limited_by: str) -> Finding:
    shown = f"{where}: {_needed(parts, num_bytes)}, free {_mib(free_bytes)} by {limited_by}"
    advice = (
        "reduce kv_cache_mib (or num_blocks), kv_host_mib or the segment_mib of kv_store, "
        "use a smaller dtype or model, or free up memory"
    )
    if num_bytes > free_bytes:
        return failed(shown, advice)
    if num_bytes > TIGHT_SHARE * free_bytes:
        return warning(f"{shown}: tight", advice)
    return ok(shown)


def _needed(parts: dict[str, int], num_bytes: int) -> str:
    return f"needs {_mib(num_bytes)} ({', '.join(f'{name} {_mib(size)}' for name, size in parts.items())})"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"
