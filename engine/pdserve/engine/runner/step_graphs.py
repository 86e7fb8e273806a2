"""`StepGraphs`: decode steps as captured graphs, so that a step of some hundred kernels is one launch.

A graph contains the decoder from the embedding to the last norm, for one number of rows; the steps of a size have the same
launches over the same memory, whatever their lengths and blocks are. What depends on a step is written before: token ids,
positions, what the attention back end plans, and which row has which LoRA adapter. The output layer, sampling, penalties, grammars,
log-probabilities and pooling run after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.config import EngineConfig
from pdserve.engine.lora.lora_runner import LoraRunner
from pdserve.engine.runner.block_table import NO_SLOT
from pdserve.engine.runner.decoder_model import DecoderModel
from pdserve.engine.runner.device_runtime import DeviceRuntime
from pdserve.engine.runner.step_inputs import StepInputs, attention_plans
from pdserve.kernels.attention.attention_backend import AttentionBackend, AttentionPlan
from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.lora.lora_linear import NO_ADAPTER
from pdserve.models.model_inputs import ModelInputs

_SMALL = (1, 2, 4)
_STEP = 8


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows that have a graph, ascending: 1, 2, 4, multiples of 8, and `max_num_seqs`."""
    return sorted(
        {*(size for size in (*_SMALL, *range(_STEP, max_num_seqs, _STEP)) if size < max_num_seqs), max_num_seqs}
    )


def can_capture(attention: Sequence[AttentionBackend], runtime: DeviceRuntime) -> bool:
    """True if the device has graphs and every back end's decode steps can be captured; an absent `is_capturable` is False."""
    return runtime.has_graphs and all(getattr(backend, "is_capturable", False) for backend in attention)


@dataclass(frozen=True, slots=True)
class _Graph:
    replay: Callable[[], None]
    addresses: list[int]
    """Slots of each plan, which would move if the back end moved its buffers."""


class StepGraphs:
    """The graphs of one model runner. `capture` comes before the first `run`."""

    def __init__(
        self,
        config: EngineConfig,
        model: DecoderModel,
        attention: Sequence[AttentionBackend],
        ops: LayerOps,
        device: torch.device,
        dtype: torch.dtype,
        runtime: DeviceRuntime,
    ) -> None:
        """dtype: of the hidden states."""
        self._config = config
        self._model = model
        self._attention = attention
        self._ops = ops
        self._runtime = runtime
        self._device = device
        rows = config.max_num_seqs
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._hidden = torch.zeros((rows, model.hidden_size), dtype=dtype, device=device)
        self._sizes: list[int] = []
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        """Keys: the number of rows, and True if some may have LoRA adapters."""
        self.has_adapters = False
        """True if steps with adapters have graphs, beside those without: their products take launches in every layer."""

    def size_for(self, num_rows: int) -> int:
        """Rows of the smallest graph with room for `num_rows` decode rows, at most `max_num_seqs`."""
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def capture(self, before_each: Callable[[], None] | None, lora: LoraRunner | None = None) -> None:
        """Capture all sizes, the largest first, so that the smaller ones find their memory in it.

        First each back end plans the largest steps there are, so that its buffers move no more. before_each: called before each
        size, so that a caller can distinguish many graphs from one that hangs. lora: None without adapters.
        """
        config = self._config
        sizes = graph_sizes(config.max_num_seqs)
        whole, rest = divmod(config.max_num_batched_tokens, config.max_model_len)
        prompts = [config.max_model_len] * whole + [rest] * (rest > 0)
        self._plans(self._batch(prompts, config.max_model_len))
        for size in reversed(sizes):
            self._plans(self._batch([1] * size, config.max_model_len))
        self._capture_all(sizes, before_each)
        if lora is not None and lora.set_any_rows():
            self.has_adapters = True
            self._capture_all(sizes, before_each)
            lora.set_rows(np.array([NO_ADAPTER]), np.array([1]))
        self._sizes = sizes

    def _capture_all(self, sizes: Sequence[int], before_each: Callable[[], None] | None) -> None:
        for size in reversed(sizes):
            if before_each is not None:
                before_each()
            self._capture(size)

    def _capture(self, size: int) -> None:
        batch = self._batch([1] * size, 1)
        plans = self._plans(batch)
        inputs = ModelInputs(batch, plans, token_ids=self._token_ids[:size], ops=self._ops)
        hidden = self._hidden[:size]

        def work() -> None:
            hidden.copy_(self._model.forward(inputs))

        work()  # compiles kernels and makes workspaces, which a capture must not
        self._graphs[size, self.has_adapters] = _Graph(self._runtime.capture(work), _addresses(plans))

    def run(self, inputs: StepInputs, has_adapters: bool) -> Tensor:
        """Hidden states `[B, H]` of a step of decode rows, padded to one of the sizes; valid until the next step."""
        size = len(inputs.token_ids)
        graph = self._graphs[size, has_adapters]
        self._token_ids[:size].copy_(inputs.token_ids)
        self._positions[:size].copy_(inputs.batches[0].positions)
        plans = attention_plans(self._attention, inputs.batches, self._model.attention_specs)
        if _addresses(plans) != graph.addresses:
            raise RuntimeError(f"the attention back end moved its buffers after graphs of {size} rows were captured")
        graph.replay()
        return self._hidden[:size]

    def _plans(self, batch: AttentionBatch) -> dict[AttentionSpec, AttentionPlan]:
        specs = self._model.attention_specs
        return attention_plans(self._attention, [batch] * len(specs), specs)

    def _batch(self, query_lens: Sequence[int], seq_len: int) -> AttentionBatch:
        """Sequences of `seq_len` tokens, in blocks 0, that write nothing."""
        config, count = self._config, sum(query_lens)
        batch = AttentionBatch.from_arrays(
            positions=np.zeros(count, np.int64),
            slot_mapping=np.full(count, NO_SLOT, np.int64),
            query_lens=np.array(query_lens),
            seq_lens=np.full(len(query_lens), seq_len),
            block_tables=np.zeros((len(query_lens), config.blocks_for(config.max_model_len)), np.int64),
            device=self._device,
        )
        is_decode = batch.num_decodes == len(query_lens)
        return replace(batch, positions=self._positions[:count]) if is_decode else batch


def _addresses(plans: dict[AttentionSpec, AttentionPlan]) -> list[int]:
    return [plan.slot_mapping.data_ptr() for plan in plans.values()]
