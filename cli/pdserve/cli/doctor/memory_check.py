"""Memory: compares weights, KV pool and one step with the free memory of machine, control group and GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdserve.cli.doctor.finding import Finding, failed, ok, warning
from pdserve.cli.doctor.gpu_check import NoView, gpu_index, look_at_gpus
from pdserve.cli.doctor.machine_memory import free_memory
from pdserve.common.errors import PdServeError
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.models.model_folder import model_folder

TIGHT_SHARE = 0.9
"""Share of free memory above which a warning is given."""


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Checks a worker's memory. Implements `Check`. root: folder that contains `proc` and `sys`."""

    settings: WorkerSettings
    root: Path = Path("/")
    name: str = "memory"
    deadline_s: float = 70.0

    def run(self) -> list[Finding]:
        """See `Check.run`."""
        from pdserve.engine.runner.memory_needs import memory_needs  # imports torch

        settings = self.settings
        try:
            needs = memory_needs(model_folder(settings.model), settings)
        except PdServeError as error:
            return [failed(f"what a worker needs is not known: {error.message}", "correct model or settings")]
        if needs.on_gpu:
            parts = {"KV staging, as large as the pool": needs.pool, "the process, about": needs.process}
        else:
            parts = {"weights": needs.weights, "KV pool": needs.pool, "a step, about": needs.step}
            parts["the process, about"] = needs.process
        free = free_memory(self.root)
        if free is None:
            findings = [warning("this system does not report its free memory", f"see to {_mib(needs.host)}")]
        else:
            findings = [_fit("main memory", parts, needs.host, free.num_bytes, free.limited_by)]
        if needs.on_gpu:
            gpu_parts = {"weights": needs.weights, "KV pool": needs.pool, "a step, about": needs.step}
            findings.append(self._on_gpu(gpu_parts, needs.device))
        return findings

    def _on_gpu(self, parts: dict[str, int], num_bytes: int) -> Finding:
        device = self.settings.device
        try:
            gpus = look_at_gpus().gpus
        except NoView as error:
            return failed(f"the memory of {device} is not known: {error}", "see the check gpu")
        index = gpu_index(device)
        if index is None or index >= len(gpus):
            return failed(f"{_needed(parts, num_bytes)} on {device}, which is not here", "see the check gpu")
        return _fit(device, parts, num_bytes, gpus[index].free_bytes, gpus[index].name)


def _fit(where: str, parts: dict[str, int], num_bytes: int, free_bytes: int, limited_by: str) -> Finding:
    told = f"{where}: {_needed(parts, num_bytes)}, free {_mib(free_bytes)} by {limited_by}"
    advice = "set a smaller kv_cache_mib (or num_blocks), a smaller dtype or model, or free memory"
    if num_bytes > free_bytes:
        return failed(told, advice)
    if num_bytes > TIGHT_SHARE * free_bytes:
        return warning(f"{told}: tight", advice)
    return ok(told)


def _needed(parts: dict[str, int], num_bytes: int) -> str:
    return f"needs {_mib(num_bytes)} ({', '.join(f'{name} {_mib(size)}' for name, size in parts.items())})"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"
