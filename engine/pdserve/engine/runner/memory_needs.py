"""`MemoryNeeds`: what a worker will take, from its settings and the headers of its weight files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdserve.common.kv_layout import KvLayout
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.runner.loaded_model import pool_size
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.loading import LoadProgress, load_decoder
from pdserve.models.read_config import read_config

PROCESS_BYTES = 400 << 20
"""Of a worker without model and pool: interpreter, torch, gRPC, and NIXL with its buffers (measured)."""
CUDA_PROCESS_BYTES = 1 << 30
"""The host's part of a CUDA context comes on top."""
_LOGITS_BYTES, _LOGITS_COPIES = 4, 3
"""Float32: the logits, a copy for rows with a rule, and log-probabilities."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes; the estimates are `step` and `process`."""

    weights: int
    pool: int
    step: int
    process: int
    on_gpu: bool

    @property
    def host(self) -> int:
        """Of main memory: with a GPU, that is the pool's twin, through which blocks are transferred."""
        return self.process + self.pool + (0 if self.on_gpu else self.weights + self.step)

    @property
    def device(self) -> int:
        """Of the GPU's memory."""
        return self.weights + self.pool + self.step if self.on_gpu else 0


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes of all weights in the dtype that they are served in.

    Every weight's name, shape and dtype is held against config.json as when it is loaded, and none is read.
    Raises: ConfigError, UnsupportedModel.
    """
    total = 0

    def count(progress: LoadProgress) -> None:
        nonlocal total
        total = progress.total_bytes

    load_decoder(folder, dtype=dtype, device="meta", progress=count)
    return total


def memory_needs(folder: Path, settings: WorkerSettings) -> MemoryNeeds:
    """Raises: ConfigError, UnsupportedModel."""
    config = read_config(folder, settings.dtype)
    layout: KvLayout = config.kv_layout(settings.block_size, "")
    num_blocks, _ = pool_size(settings, layout, config)
    on_gpu = settings.device != "cpu"
    hidden = 4 * config.hidden_size + 2 * config.intermediate_size
    return MemoryNeeds(
        weights=weight_bytes(folder, settings.dtype),
        pool=num_blocks * layout.block_bytes,
        step=settings.step_tokens * hidden * TORCH_DTYPES[config.dtype].itemsize
        + settings.max_num_seqs * config.vocab_size * _LOGITS_BYTES * _LOGITS_COPIES,
        process=CUDA_PROCESS_BYTES if on_gpu else PROCESS_BYTES,
        on_gpu=on_gpu,
    )
