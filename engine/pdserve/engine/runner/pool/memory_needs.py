"""`MemoryNeeds`: a worker's memory, computed from its settings and the headers of its weight files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdserve.common.settings.kv_store_url import MooncakeUrl
from pdserve.common.settings.worker_settings import ModelImpl, WorkerSettings
from pdserve.engine.runner.drafts.load_draft_model import DraftModelFolder
from pdserve.engine.runner.encoders.image_encoder import encoder_bytes
from pdserve.engine.runner.pool.pool_size import host_slots, pool_size, with_kv_cache_groups
from pdserve.engine.sequence_blocks import BlockCounts
from pdserve.models.config.draft_head_config import DraftHeadConfig
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.loading import load_decoder
from pdserve.models.lora.lora_targets import LoraTargets, with_lora_targets
from pdserve.models.model_impl import load_model_decoder, read_model_config
from pdserve.models.weights.rank_shard import WHOLE, RankShard
from pdserve.models.weights.weight_loader import LoadProgress, Quantization

PROCESS_BYTES = 400 << 20
"""Memory of a worker without model and pool: interpreter, torch, gRPC, and NIXL with its buffers (measured)."""
CUDA_PROCESS_BYTES = 1 << 30
"""Additional host memory of a CUDA context."""
_STORE_CLIENT_BYTES = 128 << 20
"""The client's process of a shared store, with its buffer and without the memory that it adds to the store (measured)."""
_SEND_BYTES = 64 << 20
"""As `SEND_BYTES` and twice `DIGEST_BYTES` of `kv_transfer/make_connectors.py`."""
_LOGITS_BYTES, _LOGITS_COPIES = 4, 3
"""Bytes of a float32 logit, and copies: the logits, a copy for rows with token rules, and log-probabilities."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes per purpose, of each rank; `step` and `process` are estimates."""

    weights: int
    """With the slots of adapters."""
    pool: int
    step: int
    process: int
    transfers: int
    """With a GPU: memory outside the pool through which blocks pass, on each side."""
    host_tier: int
    """Main memory for blocks that the pool reuses, of each rank."""
    on_gpu: bool
    store: int = 0
    """Main memory that a shared store takes for each rank: its client, and what is added to the store."""
    ranks: int = 1
    """Processes that share the model on this machine; each has a GPU of its own."""
    draft_model: int = 0
    """Weights and cache of the model that drafts, which only rank 0 has."""
    images: int = 0
    """In addition to the weights: kept outputs of the vision encoder, and what encoding the largest image needs, an estimate."""

    @property
    def host(self) -> int:
        """Bytes of main memory, of all ranks together."""
        each = self.process + (self.transfers if self.on_gpu else self._of_model)
        return self.ranks * (each + self.host_tier + self.store) + (0 if self.on_gpu else self.draft_model)

    @property
    def device(self) -> int:
        """Bytes of GPU memory, of the GPU of rank 0; the others need as much without the draft model."""
        return self._of_model + self.draft_model + self.transfers if self.on_gpu else 0

    @property
    def _of_model(self) -> int:
        return self.weights + self.pool + self.step + self.images


def weight_bytes(
    folder: Path,
    dtype: str,
    load_format: str = "auto",
    quantization: Quantization = None,
    shard: RankShard = WHOLE,
    model_impl: ModelImpl = "auto",
    device: str = "cpu",
    draft_head: DraftHeadConfig | None = None,
) -> int:
    """Bytes of all weights as they are served on a device, or of one rank's part.

    draft_head: loaded with the model. An EAGLE-3 head is not counted: it has fewer weights than a layer of the model.

    Checks every weight's name, shape and dtype against config.json as at loading, without reading weights.
    Raises: ConfigError, UnsupportedModel.
    """
    total = 0

    def count(progress: LoadProgress) -> None:
        nonlocal total
        total = progress.kept_bytes

    load_model_decoder(
        folder,
        dtype=dtype,
        model_impl=model_impl,
        device="meta",
        load_format=load_format,
        quantization=quantization,
        shard=shard,
        progress=count,
        draft_head=draft_head,
        served_on=device,
    )
    return total


def adapter_bytes(folder: Path, settings: WorkerSettings, shard: RankShard = WHOLE) -> int:
    """Bytes of the slots of LoRA adapters, or of one rank's part; 0 without `enable_lora`.

    Raises: ConfigError, UnsupportedModel.
    """
    return adapter_targets(folder, settings, shard).nbytes if settings.enable_lora else 0


def adapter_targets(folder: Path, settings: WorkerSettings, shard: RankShard = WHOLE) -> LoraTargets:
    """The layers of a model, or of one rank's part, that take adapters; no weight is read.

    Raises: ConfigError, UnsupportedModel.
    """
    decoder = load_decoder(
        folder,
        dtype=settings.dtype,
        device="meta",
        load_format=settings.load_format,
        quantization=settings.weight_form,
        shard=shard,
        served_on=settings.device,
    )
    return with_lora_targets(
        decoder, max_loras=settings.limits.max_loras, max_rank=settings.limits.max_lora_rank, shard=shard
    )[1]


def draft_model_bytes(
    folder: Path, settings: WorkerSettings, config: ModelConfig, num_blocks: int, max_model_len: int
) -> int:
    """Bytes of the weights and of the cache of the model that drafts; 0 without one.

    folder, config, num_blocks, max_model_len: of the model for which it drafts. Raises: ConfigError, UnsupportedModel.
    """
    draft = DraftModelFolder.of(settings, folder, config, download=False)
    if draft is None:
        return 0
    weights = weight_bytes(draft.folder, settings.dtype, settings.load_format, model_impl=settings.model_impl)
    return weights + draft.num_blocks(settings, num_blocks, max_model_len) * draft.block_bytes


def store_bytes(settings: WorkerSettings) -> int:
    """Bytes that a shared store takes on this machine for one rank; 0 without one. Raises: ConfigError."""
    if settings.kv_store is None:
        return 0
    return (MooncakeUrl.parse(settings.kv_store).segment_mib << 20) + _STORE_CLIENT_BYTES


def memory_needs(folder: Path, settings: WorkerSettings) -> MemoryNeeds:
    """The memory of a worker with these settings. Raises: ConfigError, UnsupportedModel."""
    config = with_kv_cache_groups(read_model_config(folder, settings.dtype, settings.model_impl), settings)
    config.verify_options(settings.rounded_weights, settings.enable_lora)
    shard = RankShard(0, settings.tensor_parallel_size)
    if shard.size > 1:
        config.verify_sharding(shard.size, folder)
    groups = config.kv_cache_groups(settings.block_size, "", shard, cache_dtype=settings.cache_dtype)
    layout = config.kv_layout(settings.block_size, "", shard, settings.cache_dtype)
    on_gpu = settings.device != "cpu"
    # a pool without a size of its own takes what is left, and needs two blocks
    takes_rest = settings.num_blocks is None and settings.pool_mib is None
    num_blocks: BlockCounts = (2,) * len(layout.shapes)
    max_model_len = settings.block_size
    if not takes_rest:
        num_blocks, max_model_len = pool_size(settings, groups, config)
    slots = host_slots(settings, layout, num_blocks)
    hidden = 4 * config.hidden_size + 2 * config.intermediate_size
    return MemoryNeeds(
        weights=weight_bytes(
            folder,
            settings.dtype,
            settings.load_format,
            settings.weight_form,
            shard,
            settings.model_impl,
            settings.device,
            config.draft_head,
        )
        + adapter_bytes(folder, settings, shard),
        pool=layout.pool_bytes(num_blocks),
        step=settings.step_tokens * hidden * TORCH_DTYPES[config.dtype].itemsize
        + (settings.max_num_seqs + settings.step_drafts) * config.vocab_size * _LOGITS_BYTES * _LOGITS_COPIES,
        process=CUDA_PROCESS_BYTES if on_gpu else PROCESS_BYTES,
        transfers=(settings.limits.kv_ring_mib << 20) + _SEND_BYTES if on_gpu else 0,
        host_tier=layout.pool_bytes(slots) if slots else 0,
        on_gpu=on_gpu,
        store=store_bytes(settings),
        ranks=shard.size,
        images=encoder_bytes(folder, settings, config),
        draft_model=draft_model_bytes(folder, settings, config, min(num_blocks) // len(groups), max_model_len),
    )
