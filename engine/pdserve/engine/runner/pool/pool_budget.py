"""`PoolBudget`: the GPU memory that is left for the KV pool, after a step at the largest shapes has shown what steps need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.common.request.sampling_params import MAX_LOGPROBS
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.runner.decoder_model import DecoderModel
from pdserve.engine.runner.device.step_graphs import graph_shapes
from pdserve.engine.sampling.logprobs import LogprobsRows
from pdserve.engine.sampling.placed_arrays import PlacedArrays
from pdserve.engine.sampling.sampler import Sampler, SamplingMetadata
from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layer_plans import LayerBackend, plan_of
from pdserve.kernels.sampled_rows import PackedRows, SamplingStages, packed
from pdserve.models.model_inputs import ModelInputs

GRAPH_BYTES = 4 << 20
"""A captured graph's own memory, without that of its tensors: an estimate, no graph has been measured."""
_TABLE_ENTRY_BYTES = 8
_MIB = 1 << 20


class DeviceMemory(Protocol):
    """Memory of one device. Tests replace it."""

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Counts all processes."""

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Bytes that `work` has at once, without those that were allocated before."""


class CudaMemory:
    """Implements `DeviceMemory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total_bytes(self) -> tuple[int, int]:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)

    def peak_bytes(self, work: Callable[[], None]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before


@dataclass(frozen=True, slots=True)
class LargestSteps:
    """The steps of a worker that need most memory. They read and write only block 0 of the caches."""

    model: DecoderModel
    attention: Sequence[LayerBackend]
    """Over caches of at least one block."""
    ops: LayerOps
    device: torch.device
    block_size: int
    num_tokens: int
    """Tokens of a step, at most."""
    num_rows: int
    """Sequences of a step, at most."""
    max_model_len: int
    num_drafts: int = 0
    """Drafts of a step, at most: each has a row of logits."""
    num_logprobs: int = MAX_LOGPROBS
    """Most likely tokens that each row reports, at most."""

    @property
    def table_bytes(self) -> int:
        """Block tables of all rows and KV cache groups on the device."""
        num_blocks = -(-self.max_model_len // self.block_size)
        return len(self.attention) * self.num_rows * num_blocks * _TABLE_ENTRY_BYTES

    @torch.inference_mode()
    def prefill(self) -> None:
        """The largest chunk at the end of the longest prompt, and as many rows sampled as there can be."""
        whole, rest = divmod(self.num_tokens, self.max_model_len)
        hidden = self._forward([self.max_model_len] * whole + [rest] * (rest > 0))
        self._sample(hidden[:1].expand(self.num_rows + self.num_drafts, -1).contiguous())

    @torch.inference_mode()
    def decode(self) -> None:
        """All rows, with the longest context."""
        self._forward([1] * self.num_rows)

    def _forward(self, query_lens: list[int]) -> Tensor:
        count = sum(query_lens)
        batch = AttentionBatch.from_arrays(
            positions=np.zeros(count, np.int64),
            slot_mapping=np.arange(count) % self.block_size,
            query_lens=np.array(query_lens),
            seq_lens=np.full(len(query_lens), self.max_model_len),
            block_tables=np.zeros((len(query_lens), -(-self.max_model_len // self.block_size)), np.int64),
            device=self.device,
        )
        groups = zip(self.attention, self.model.attention_specs, strict=True)
        plans = {spec: plan_of(attention, batch, spec) for attention, specs in groups for spec in specs}
        token_ids = torch.zeros(count, dtype=torch.int64, device=self.device)
        return self.model.forward(ModelInputs(batch, plans, token_ids=token_ids, ops=self.ops))

    def _sample(self, hidden: Tensor) -> None:
        """With every stage that needs memory of the vocabulary's size; nothing for a model with a classification head."""
        if self.model.classifier is not None:
            return
        logits = self.model.compute_logits(hidden)
        count, vocab_size = logits.shape
        if not vocab_size:  # a rank above 0, which does not sample
            return
        metadata = SamplingMetadata(
            temperature=np.ones(count, np.float32),
            top_p=np.full(count, 0.9, np.float32),
            top_k=np.full(count, max(1, vocab_size // 2)),
            min_p=np.zeros(count, np.float32),
            seeds=np.zeros(count, np.int64),
            indexes=np.zeros(count, np.int64),
            positions=np.zeros(count, np.int64),
            logprobs=LogprobsRows.of(np.full(count, min(self.num_logprobs, vocab_size))),
        )
        placed = PlacedArrays().copy_to(metadata.arrays(), self.device)
        rows = None
        if self.ops.sample is not None or self.device.type != "cpu":
            parameters = torch.from_numpy(packed(metadata)).to(self.device)
            rows = PackedRows(parameters, SamplingStages.of(metadata, vocab_size))
        Sampler(self.ops.sample).launch(logits, metadata, placed, rows)


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """Bytes of a GPU per purpose, before there is a pool."""

    total: int
    used: int
    """Taken by weights and the CUDA context, and by other processes."""
    step: int
    """Needed by the largest step."""
    graphs: int
    """Needed by captured graphs: the tensors of the largest captured step, and `GRAPH_BYTES` each."""
    transfers: int

    @classmethod
    def measured(
        cls, settings: WorkerSettings, steps: LargestSteps, memory: DeviceMemory, *drafting: LargestSteps
    ) -> PoolBudget:
        """Run the largest steps. drafting: those of a model that drafts, which run after the others."""
        prefill, decode = memory.peak_bytes(steps.prefill), memory.peak_bytes(steps.decode)
        drafts = max((memory.peak_bytes(each.prefill) for each in drafting), default=0)
        step = max(prefill, decode, drafts) + steps.table_bytes
        free, total = memory.free_and_total_bytes()
        graphs = 0
        if not settings.enforce_eager:
            shapes = graph_shapes(settings.max_num_seqs, settings.step_tokens, steps.max_model_len)
            largest = max((shape.num_tokens for shape in shapes if shape.most_chunks is not None), default=0)
            graphs = max(decode, prefill * largest // settings.step_tokens) + len(shapes) * GRAPH_BYTES
        return cls(total, total - free, step, graphs, settings.limits.kv_ring_mib << 20)

    def pool_bytes(self, settings: WorkerSettings, block_bytes: int, image_bytes: int = 0) -> int:
        """Bytes that `gpu_memory_utilization` leaves for the pool. image_bytes: needed by the vision encoder.

        Raises: ConfigError if that is less than two blocks.
        """
        allowed = int(self.total * settings.gpu_memory_utilization)
        left = allowed - self.used - self.step - self.graphs - self.transfers - image_bytes
        if left < 2 * block_bytes:
            images = f", images {image_bytes // _MIB} MiB" if image_bytes else ""
            raise ConfigError(
                f"gpu_memory_utilization is {settings.gpu_memory_utilization}, which allows {allowed // _MIB} of the GPU's "
                f"{self.total // _MIB} MiB: {self.used // _MIB} MiB are in use by weights and other processes, a step of "
                f"max_num_batched_tokens {settings.step_tokens} and max_num_seqs {settings.max_num_seqs} needs "
                f"{self.step // _MIB} MiB, graphs {self.graphs // _MIB} MiB{images} and kv_ring_mib {self.transfers // _MIB} MiB; "
                f"{max(left, 0) // _MIB} MiB are left for the KV pool, and two of its blocks have {2 * block_bytes // _MIB} MiB"
            )
        return left
