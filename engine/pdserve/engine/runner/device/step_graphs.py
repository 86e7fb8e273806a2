"""`StepGraphs`: decode steps and short prompts as captured graphs, so that a step of some hundred kernels is one launch.

A graph contains the decoder from the embedding to the last norm, for one `StepShape`: a number of decode rows, or a number of
tokens in a few chunks of prompts. The steps of a shape have the same launches over the same memory, whatever their lengths and
blocks are. What depends on a step is written before: token ids, positions, what the attention back end plans, and which row has
which LoRA adapter. The output layer, sampling, penalties, grammars, log-probabilities and pooling run after it.

Longer prompts are computed longer than their launches take, and a step of decode rows and chunks has no graph: in graphs of every
pair of numbers, decode rows would be chunks of one token, which read a long context in one program.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.arrays import IntArray
from pdserve.engine.config import EngineConfig
from pdserve.engine.lora.lora_runner import LoraRunner
from pdserve.engine.runner.decoder_model import DecoderModel
from pdserve.engine.runner.device.device_runtime import DeviceRuntime
from pdserve.engine.runner.inputs.block_table import NO_SLOT
from pdserve.engine.runner.inputs.step_inputs import StepInputs, StepShape, attention_plans
from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layer_plans import LayerBackend, LayerPlan, LayerSpec, attention_plan
from pdserve.kernels.lora.lora_linear import NO_ADAPTER
from pdserve.models.model_inputs import ModelInputs

_SMALL = (1, 2, 4)
_STEP = 8
_PROMPT_SIZES = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
_MOST_CHUNKS = 16
"""Chunks of a captured step of prompts, at most: each adds a program per KV head, which ends at once if there is no such chunk."""


def graph_shapes(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> list[StepShape]:
    """Steps that have a graph, ascending: 1, 2, 4 and multiples of 8 decode rows, and `max_num_seqs`; then prompts of up to 512
    tokens, as far as a step may have so many."""
    rows = {*(size for size in (*_SMALL, *range(_STEP, max_num_seqs, _STEP)) if size < max_num_seqs), max_num_seqs}
    chunks = min(max_num_seqs, _MOST_CHUNKS)
    return [
        *(StepShape(size) for size in sorted(rows)),
        *(
            StepShape(size, chunks)
            for size in _PROMPT_SIZES
            if size <= min(max_num_batched_tokens, chunks * max_model_len)
        ),
    ]


def can_capture(attention: Sequence[LayerBackend], runtime: DeviceRuntime) -> bool:
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
        attention: Sequence[LayerBackend],
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
        shapes = graph_shapes(config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len)
        self._rows = [shape for shape in shapes if shape.most_chunks is None]
        self._prompts = [shape for shape in shapes if shape.most_chunks is not None]
        most = max(shape.num_tokens for shape in shapes)
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._hidden = torch.zeros((most, model.hidden_size), dtype=dtype, device=device)
        self._graphs: dict[tuple[StepShape, bool], _Graph] = {}
        """Keys: the shape, and True if some rows may have LoRA adapters."""

    def shape_for(self, counts: IntArray, has_adapters: bool) -> StepShape | None:
        """The smallest captured shape with room for a step; None: there is none. counts `[S]`: tokens of each row, single ones
        first."""
        num_tokens, is_prompts = int(counts.sum()), int(counts[0]) > 1
        if not is_prompts and counts[-1] > 1:
            return None
        shapes = self._prompts if is_prompts else self._rows
        place = bisect_left(shapes, num_tokens, key=lambda shape: shape.num_tokens)
        if place == len(shapes):
            return None
        shape = shapes[place]
        if (shape, has_adapters) not in self._graphs:
            return None
        return shape if shape.most_chunks is None or len(counts) <= shape.most_chunks else None

    def capture(self, before_each: Callable[[], None] | None, lora: LoraRunner | None = None) -> None:
        """Capture all shapes, the largest first, so that the smaller ones find their memory in it. Only decode rows have
        graphs with adapters.

        First each back end plans the largest steps there are, so that its buffers move no more. before_each: called before each
        shape, so that a caller can distinguish many graphs from one that hangs. lora: None without adapters.
        """
        config = self._config
        whole, rest = divmod(config.max_num_batched_tokens, config.max_model_len)
        prompts = [config.max_model_len] * whole + [rest] * (rest > 0)
        self._plans(self._batch(prompts, config.max_model_len))
        for shape in reversed(self._rows):
            self._plans(self._batch([1] * shape.num_tokens, config.max_model_len))
        self._capture_all([*self._rows, *self._prompts], before_each)
        if lora is not None and lora.set_any_rows():
            self._capture_all(self._rows, before_each, has_adapters=True)
            lora.set_rows(np.array([NO_ADAPTER]), np.array([1]))

    def _capture_all(
        self, shapes: Sequence[StepShape], before_each: Callable[[], None] | None, has_adapters: bool = False
    ) -> None:
        for shape in reversed(shapes):
            if before_each is not None:
                before_each()
            self._graphs[shape, has_adapters] = self._capture(shape)

    def _capture(self, shape: StepShape) -> _Graph:
        size = shape.num_tokens
        query_lens = [1] * size if shape.most_chunks is None else self._chunks(size, shape.most_chunks + 1)
        batch = self._batch(query_lens, max(query_lens), shape)
        plans = self._plans(batch)
        inputs = ModelInputs(batch, plans, token_ids=self._token_ids[:size], ops=self._ops)
        hidden = self._hidden[:size]

        def work() -> None:
            hidden.copy_(self._model.forward(inputs))

        work()  # compiles kernels and makes workspaces, which a capture must not
        return _Graph(self._runtime.capture(work), _addresses(plans))

    def _chunks(self, num_tokens: int, count: int) -> list[int]:
        """Tokens of `count` chunks of whole prompts, the longest first."""
        longest = self._config.max_model_len
        return [max(0, min(longest, num_tokens - number * longest)) for number in range(count)]

    def run(self, inputs: StepInputs, shape: StepShape, has_adapters: bool) -> Tensor:
        """Hidden states `[T, H]` of a step that is padded to a shape of `shape_for`; valid until the next step."""
        size, graph = shape.num_tokens, self._graphs[shape, has_adapters]
        self._token_ids[:size].copy_(inputs.token_ids)
        self._positions[:size].copy_(inputs.batches[0].positions)
        plans = attention_plans(self._attention, inputs.batches, self._model.attention_specs)
        if _addresses(plans) != graph.addresses:
            raise RuntimeError(f"the attention back end moved its buffers after the graph of {shape} was captured")
        graph.replay()
        return self._hidden[:size]

    def _plans(self, batch: AttentionBatch) -> dict[LayerSpec, LayerPlan]:
        specs = self._model.attention_specs
        return attention_plans(self._attention, [batch] * len(specs), specs)

    def _batch(self, query_lens: Sequence[int], seq_len: int, shape: StepShape | None = None) -> AttentionBatch:
        """Sequences of `seq_len` tokens, or of none where they have no query token, in blocks 0, that write nothing.

        shape: of a step that is captured.
        """
        config, count = self._config, sum(query_lens)
        batch = AttentionBatch.from_arrays(
            positions=np.zeros(count, np.int64),
            slot_mapping=np.full(count, NO_SLOT, np.int64),
            query_lens=np.array(query_lens),
            seq_lens=np.array([seq_len if query_len else 0 for query_len in query_lens]),
            block_tables=np.zeros((len(query_lens), config.blocks_for(config.max_model_len)), np.int64),
            device=self._device,
            most_chunks=None if shape is None else shape.most_chunks,
        )
        return batch if shape is None else replace(batch, positions=self._positions[:count])


def _addresses(plans: dict[LayerSpec, LayerPlan]) -> list[int]:
    return [attention_plan(plan).slot_mapping.data_ptr() for plan in plans.values()]
