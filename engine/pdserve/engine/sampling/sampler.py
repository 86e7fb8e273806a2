"""`Sampler`: samples one token per row from logits, in fixed stages over the whole batch.

    1. log-probabilities of the unchanged logits, for rows that request them (`logprobs.py`)
    2. structured_outputs: tokens that the grammar does not allow get -inf (`grammar_mask.py`); then allowed_token_ids:
       all other tokens get -inf (`token_mask.py`, to stage 4)
    3. bad_words, and EOS and stop tokens before min_tokens, get -inf
    4. logit_bias is added
    5. logits_processors: plug-ins, in the order in which a row names them (`logits_plugin_stage.py`)
    6. repetition, then frequency, then presence penalty (`penalties.py`)
    7. greedy rows take the most likely token, of equal ones the lowest id; other rows are divided by their temperature
    8. min_p, then top_k, then top_p keep some tokens (`kept_tokens.py`)
    9. of these the one with the highest sum of scaled logit and noise (`token_draw.py`, `seeded_uniform.py`)

A row's result does not depend on other rows: each number is computed from its own row only, in an order that does not depend on
other rows. A row whose rules leave no token gets `NO_TOKEN`.
Source: order and meaning of the stages are those of vLLM's V1 sampler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.common.errors import InternalError
from pdserve.engine.arrays import FloatArray, IntArray
from pdserve.engine.sampling import device_draw
from pdserve.engine.sampling.grammar_mask import GrammarMask
from pdserve.engine.sampling.kept_tokens import Border, Cut, border, top_p_alone
from pdserve.engine.sampling.logits_plugin_stage import LogitsProcessorStage
from pdserve.engine.sampling.logprobs import LogprobsRows, LogprobsTensors, RawLogprobs
from pdserve.engine.sampling.penalties import Penalties
from pdserve.engine.sampling.placed_arrays import PlacedArrays
from pdserve.engine.sampling.scratch import Scratch
from pdserve.engine.sampling.token_draw import KeptRows, NoiseRows, draw
from pdserve.engine.sampling.token_mask import TokenMask
from pdserve.engine.scheduler_output import NO_TOKEN
from pdserve.kernels.layer_ops import SampleTokens
from pdserve.kernels.sampled_rows import PackedRows, SamplingStages, packed

SAMPLER_VERSION = 2
"""Part of a worker's identity: workers of one version sample the same tokens. Raise it with any change of stages 7 to 9."""

_BLOCK_LOGITS, _BLOCK_ROWS = 1 << 18, 128
"""Logits and rows processed at once: arrays of this size stay in the CPU's cache."""


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The sampled rows' parameters, `[N]` each."""

    temperature: FloatArray
    """0 for greedy."""
    top_p: FloatArray
    top_k: IntArray
    """Vocabulary size: no limit."""
    min_p: FloatArray
    seeds: IntArray
    indexes: IntArray
    positions: IntArray
    """Output position of the token to sample."""
    token_rules: TokenMask | None = None
    plugins: LogitsProcessorStage | None = None
    penalties: Penalties | None = None
    grammar_mask: GrammarMask | None = None
    logprobs: LogprobsRows | None = None
    """The rows that request log-probabilities; None if no row does."""

    def arrays(self) -> list[NDArray[Any]]:
        """Arrays that the stages need on the logits' device, in addition to the parameters."""
        stages = (self.logprobs, self.grammar_mask, self.token_rules, self.penalties)
        return [array for stage in stages if stage is not None for array in stage.arrays()]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """`sampled_token_ids` `[N]` int64, on the host; `NO_TOKEN` where the rules leave none."""

    sampled_token_ids: IntArray
    logprobs: LogprobsTensors | None = None
    """Log-probabilities of the rows that request them."""
    failed: Mapping[int, InternalError] = field(default_factory=dict)
    """Row -> error of a plug-in that ends its request. The row's token has no meaning."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens, on the device of their logits: nothing has been waited for."""

    tokens: Tensor
    """`[2, N]` int64, see `SampleTokens`."""
    has_rules: bool
    """True if a row's rules may leave no token."""
    logprobs: LogprobsTensors | None
    failed: Mapping[int, InternalError]

    @property
    def token_ids(self) -> Tensor:
        """`[N]` int64; a row whose rules leave no token has any."""
        return self.tokens[0]

    def tensors(self) -> list[Tensor]:
        """Tensors to copy to the host."""
        return [self.tokens, *([] if self.logprobs is None else self.logprobs.tensors())]

    def on_host(self, arrays: Sequence[NDArray[Any]]) -> SamplerOutput:
        """arrays: copies of `tensors`."""
        sampled, highest = arrays[0][0], arrays[0][1].astype(np.int32).view(np.float32)
        if self.has_rules:
            sampled = np.where(np.isneginf(highest), NO_TOKEN, sampled)
        logprobs = None if self.logprobs is None else self.logprobs.on_host(arrays[1:])
        return SamplerOutput(sampled, logprobs, self.failed)


class TokenSampler(Protocol):
    """Samples the rows of a step: `Sampler`, or the samplers of several ranks."""

    def launch(
        self, logits: Tensor, metadata: SamplingMetadata, placed: PlacedArrays, rows: PackedRows | None
    ) -> Sampled:
        """See `Sampler.launch`."""


class Sampler:
    """Samples once per step. Keeps scratch memory between calls, and no other state."""

    def __init__(self, sample: SampleTokens | None = None) -> None:
        """sample: computes stages 7 to 9; None: numpy on a CPU, torch on a device."""
        self._scratch = Scratch()
        self._sample_tokens = sample

    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """logits `[N, V]` float32; changed in place. Waits for the device."""
        placed, rows = PlacedArrays().copy_to(metadata.arrays(), logits.device), None
        if self._sample_tokens is not None or logits.device.type != "cpu":
            parameters = torch.from_numpy(packed(metadata)).to(logits.device)
            rows = PackedRows(parameters, SamplingStages.of(metadata, logits.shape[1]))
        sampled = self.launch(logits, metadata, placed, rows)
        return sampled.on_host([tensor.cpu().numpy() for tensor in sampled.tensors()])

    def launch(
        self, logits: Tensor, metadata: SamplingMetadata, placed: PlacedArrays, rows: PackedRows | None
    ) -> Sampled:
        """Sample without waiting for the device, but for plug-ins. logits `[N, V]` float32; changed in place.

        placed: the metadata's arrays on the logits' device. rows: its parameters there; None: numpy samples, on a CPU.
        """
        raw = None if metadata.logprobs is None else RawLogprobs.of(logits, metadata.logprobs, placed)
        if metadata.grammar_mask is not None:
            metadata.grammar_mask.apply(logits, placed)
        if metadata.token_rules is not None:
            metadata.token_rules.apply(logits, placed)
        failed = metadata.plugins.apply(logits) if metadata.plugins is not None else {}
        if metadata.penalties is not None:
            metadata.penalties.apply(logits, placed)
        if rows is None:
            tokens = self._on_processor(logits, metadata)
        else:
            tokens = (self._sample_tokens or device_draw.sample_tokens)(logits, rows)
        rules = (metadata.token_rules, metadata.plugins, metadata.grammar_mask)
        has_rules = any(rule is not None for rule in rules)
        return Sampled(tokens, has_rules, None if raw is None else raw.of_tokens(tokens[0]), failed)

    def _on_processor(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """As `SampleTokens`."""
        values: FloatArray = logits.numpy()
        sampled, highest = _most_likely(values)
        # a row whose highest logit is NaN or infinite has no distribution, so it gets the most likely token
        rows = np.flatnonzero((metadata.temperature > 0) & np.isfinite(highest))
        if len(rows):
            cut = Cut(metadata.temperature[rows], metadata.top_p[rows], metadata.top_k[rows], metadata.min_p[rows])
            noise = NoiseRows(metadata.seeds[rows], metadata.indexes[rows], metadata.positions[rows])
            sampled[rows] = self._draw(values, rows, highest[rows], cut, noise)
        return torch.from_numpy(np.stack((sampled, highest.view(np.int32))))

    def _draw(self, logits: FloatArray, rows: IntArray, highest: FloatArray, cut: Cut, noise: NoiseRows) -> IntArray:
        """`[R]` token ids of these rows of the logits. logits `[N, V]`, the others `[R]` or of R rows."""
        vocab_size = logits.shape[1]
        alone = top_p_alone(cut, vocab_size)
        limited = (cut.top_k < vocab_size) | (cut.min_p > 0)
        drawn = np.empty(len(rows), dtype=np.int64)
        at_once = max(1, min(_BLOCK_LOGITS // vocab_size, _BLOCK_ROWS))
        for kind, is_cut in ((alone, True), (limited, True), (~alone & ~limited, False)):
            members = np.flatnonzero(kind)
            for first in range(0, len(members), at_once):
                block = members[first : first + at_once]
                values, asked = self._rows(logits, rows[block]), cut.of(block)
                found = (
                    border(values, highest[block], asked, self._scratch)
                    if is_cut
                    else Border.of_all(len(block), vocab_size)
                )
                kept = KeptRows(values, highest[block], asked.temperature, found)
                drawn[block] = draw(kept, noise.of(block), self._scratch)
        return drawn

    def _rows(self, logits: FloatArray, rows: IntArray) -> FloatArray:
        """These ascending rows of the logits: a view if they are consecutive, else a copy."""
        if rows[-1] - rows[0] == len(rows) - 1:
            return logits[rows[0] : rows[-1] + 1]
        copied = self._scratch.array("logits", (len(rows), logits.shape[1]), np.float32)
        return np.take(logits, rows, axis=0, out=copied, mode="clip")


def _most_likely(logits: FloatArray) -> tuple[IntArray, FloatArray]:
    """`[N]` ids of the most likely tokens, the lowest of equal ones, and their logits."""
    best = logits.argmax(-1)
    return best, logits[np.arange(len(best)), best]
