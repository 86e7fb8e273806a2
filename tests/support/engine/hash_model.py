"""A `DecoderModel` without weights: the next token is a hash of what stands in the KV cache, read by block tables.

A wrong block, slot, order, position or stale content gives another token, at the speed of a table look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.sampling.sampler import Sampler, SamplingMetadata
from pdserve.kernels.attention.attention_batch import AttentionBatch, StepLengths
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.layer_plans import LayerBackend, LayerSpec, attention_plan
from pdserve.kernels.state.state_backend import StateBackend, StatePlan
from pdserve.kernels.state.state_spec import StateSpec
from pdserve.models.model_inputs import ModelInputs

VOCAB_SIZE = 64
_PRIME = 2**31 - 1
_MAX_TOKENS = 4096
_OF_GROUP = 1 << 24
"""Difference between what one KV cache group and the next hold of a token."""
_UNWRITTEN = -7
STATE = 0
"""In place of a window: the group keeps a state per sequence."""
HEAD = -1
"""In place of the last window: the group is that of a draft head, whose entries the next token does not depend on."""
_OF_HIDDEN, _HIDDEN = 1 << 32, 997
"""A draft head's entry of a token holds the remainder of the hidden state there, and the next token."""


class Chunk(int):
    """In place of a window: a query sees the tokens of its own chunk of so many positions."""


Window = int | None | tuple[int | None, ...]
"""Tokens that a query sees, None for all; one for each KV cache group, if there are several."""


def prompt_of(length: int) -> list[int]:
    """Tokens of its vocabulary; two lengths below 60 begin with different ones."""
    return [(7 * place + length) % 60 for place in range(length)]


def _powers() -> NDArray[np.int64]:
    values, power = [], 1
    for _ in range(_MAX_TOKENS):
        power = power * 48271 % _PRIME
        values.append(power)
    return np.array(values, dtype=np.int64)


_WEIGHTS = _powers()
_SPREAD = (np.arange(1, VOCAB_SIZE + 1, dtype=np.int64) * 1_103_515_245) % _PRIME


def _stored(token_ids: NDArray[np.int64], positions: NDArray[np.int64], group: int = 0) -> NDArray[np.int64]:
    return group * _OF_GROUP + positions * 1024 + token_ids


def stored_block(token_ids: Sequence[int], first: int, group: int = 0) -> list[int]:
    """The content of a block whose first token is at position `first`."""
    return [group * _OF_GROUP + (first + place) * 1024 + token_id for place, token_id in enumerate(token_ids)]


def state_block(token_ids: Sequence[int], block_size: int, group: int) -> list[int]:
    """The content of a state's block after these tokens."""
    values = _stored(np.asarray(token_ids, dtype=np.int64), np.arange(len(token_ids)), group)
    return [_rolled(0, values)[-1], len(token_ids), *[0] * (block_size - 2)]


def head_block(token_ids: Sequence[int], block_size: int, window: Window) -> list[int]:
    """The content of a draft head's last block of these tokens, with token 0 after them. window: of the model, with the head's."""
    return draft_entries([*token_ids, 0], window)[-block_size:]


def draft_entries(token_ids: Sequence[int], window: Window) -> list[int]:
    """A draft head's entries of all of these tokens but the last."""
    windows, ids = windows_of(window), np.asarray(token_ids, dtype=np.int64)
    hidden = np.array([_hidden(ids[:end], windows) for end in range(1, len(ids))], dtype=np.int64)
    entries: list[int] = _entries(ids[1:], np.arange(len(ids) - 1), hidden, len(windows) - 1).tolist()
    return entries


def _entries(
    next_ids: NDArray[np.int64], positions: NDArray[np.int64], hidden: NDArray[np.int64], group: int
) -> NDArray[np.int64]:
    return _stored(next_ids, positions, group) + hidden % _HIDDEN * _OF_HIDDEN


def _rolled(state: int, values: NDArray[np.int64]) -> list[int]:
    """The state after each value."""
    found = []
    for value in values.tolist():
        state = (state * 48271 + value) % _PRIME
        found.append(state)
    return found


def _hashes(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """`[n]`: of each beginning of the values."""
    hashes: NDArray[np.int64] = (values * _WEIGHTS[: len(values)] % _PRIME).cumsum() % _PRIME
    return hashes


def _logits(hashes: NDArray[np.int64]) -> NDArray[np.float32]:
    return ((hashes[:, None] * _SPREAD) % _PRIME / _PRIME * 6).astype(np.float32)


def _windowed_hashes(values: NDArray[np.int64], count: int, window: int) -> NDArray[np.int64]:
    """`[count]`: of the values that the last one of each of the last beginnings sees."""
    ends = range(len(values) - count + 1, len(values) + 1)
    return np.array([_hashes(values[first_seen(end, window) : end])[-1] for end in ends], dtype=np.int64)


def first_seen(num_tokens: int, window: int | None) -> int:
    """The first token that the last of `num_tokens` sees."""
    if window is None:
        return 0
    return (num_tokens - 1) // window * window if isinstance(window, Chunk) else max(0, num_tokens - window)


def windows_of(window: Window) -> tuple[int | None, ...]:
    """One per KV cache group."""
    return window if isinstance(window, tuple) else (window,)


def next_logits(token_ids: Sequence[int], window: Window = None) -> NDArray[np.float32]:
    """`[V]`: what a correct engine sees after these tokens."""
    found = _hidden(np.asarray(token_ids, dtype=np.int64), windows_of(window))
    logits: NDArray[np.float32] = _logits(np.array([found]))[0]
    return logits


def _hidden(ids: NDArray[np.int64], windows: Sequence[int | None]) -> int:
    """What the model computes of the last of these tokens."""
    found = np.zeros(1, np.int64)
    for group, of_group in enumerate(windows):
        if of_group == HEAD:
            continue
        if of_group == STATE:
            [state, *_] = state_block(ids.tolist(), 2, group)
            found = _joined(found, np.array([state]), group)
            continue
        first = first_seen(len(ids), of_group)
        found = _joined(found, _hashes(_stored(ids[first:], np.arange(first, len(ids)), group))[-1:], group)
    return int(found[0])


def _joined(hashes: NDArray[np.int64], of_group: NDArray[np.int64], group: int) -> NDArray[np.int64]:
    """A hash of what a token sees in this group and those before."""
    joined: NDArray[np.int64] = (hashes + (group + 1) * of_group) % _PRIME
    return joined


def logits_of(contents: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """`[V]`: the same for tokens with these contents and positions, `[T]` each."""
    logits: NDArray[np.float32] = _logits(_hashes(_stored(contents, positions))[-1:])[0]
    return logits


def greedy_answer(prompt: Sequence[int], count: int, window: Window = None) -> list[int]:
    """The reference: `count` tokens after the prompt, without any engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(next_logits(tokens, window).argmax()))
    return tokens[len(prompt) :]


def sampled_answer(prompt: Sequence[int], count: int, *, seed: int, index: int = 0, window: Window = None) -> list[int]:
    """The reference for a sampled sequence: one token at a time, in no batch and without a cache. Temperature 1."""
    tokens = list(prompt)
    for position in range(count):
        tokens.append(sampled_token(next_logits(tokens, window), position, seed=seed, index=index))
    return tokens[len(prompt) :]


def sampled_token(
    logits: NDArray[np.float32], position: int, *, temperature: float = 1.0, seed: int = 0, index: int = 0
) -> int:
    """logits `[V]`. The token that a sequence alone in its batch has at this output position."""
    metadata = SamplingMetadata(
        temperature=np.array([temperature], dtype=np.float32),
        top_p=np.ones(1, dtype=np.float32),
        top_k=np.array([VOCAB_SIZE]),
        min_p=np.zeros(1, dtype=np.float32),
        seeds=np.array([seed]),
        indexes=np.array([index]),
        positions=np.array([position]),
    )
    return int(Sampler()(torch.from_numpy(logits).unsqueeze(0), metadata).sampled_token_ids[0])


def make_hash_cache(num_blocks: int, block_size: int) -> Tensor:
    """The pool: one number a token, `[num_blocks, block_size]` int64."""
    return torch.full((num_blocks, block_size), _UNWRITTEN, dtype=torch.int64)


class HashAttention:
    """An `AttentionBackend` over such a pool: a query sees the hash of its whole sequence, or of its window."""

    is_capturable = False

    def __init__(self, kv_cache: Tensor) -> None:
        self.kv_cache = kv_cache
        self._cache = kv_cache.numpy()

    def plan_arrays(self, lengths: StepLengths, specs: Sequence[AttentionSpec]) -> dict[str, NDArray[np.int64]]:
        return {"lengths": lengths.seq_lens, "rows": lengths.query_lens}

    def plan(self, batch: AttentionBatch, spec: AttentionSpec) -> HashPlan:
        batch.verify(self._cache.shape[1])
        assert torch.equal(batch.seq_lens, batch.seq_lens_cpu)
        assert torch.equal(batch.query_start_loc, batch.query_start_loc_cpu)
        return HashPlan(batch, self.kv_cache, spec.window if spec.chunk is None else Chunk(spec.chunk))


class HashPlan:
    """One step. A query of a chunk sees the hash of the sequence up to it."""

    def __init__(self, batch: AttentionBatch, kv_cache: Tensor, window: int | None = None) -> None:
        self._window = window
        self.kv_cache = kv_cache
        self.slot_mapping = batch.slot_mapping
        self._batch = batch
        self._cache: NDArray[np.int64] = kv_cache.numpy()

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        slots = self._batch.slot_mapping.numpy()
        assert len(set(slots.tolist())) == len(slots), "two tokens of one step share a slot"
        self._cache.reshape(-1)[slots] = k.numpy().reshape(-1)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        distance_bias: Tensor | None = None,
    ) -> Tensor:
        batch, block_size = self._batch, self._cache.shape[1]
        found = np.full(len(q), -1, dtype=np.int64)
        starts = batch.query_start_loc.tolist()
        lengths = batch.seq_lens.tolist()
        for table, (start, end), length in zip(batch.block_tables.numpy(), pairwise(starts), lengths, strict=True):
            values = self._cache[table[: -(-length // block_size)]].reshape(-1)[:length]
            if self._window is None:
                found[start:end] = _hashes(values)[length - (end - start) :]
            else:
                found[start:end] = _windowed_hashes(values, end - start, self._window)
        return torch.from_numpy(found).unsqueeze(-1)


def make_backends(kv_caches: Sequence[Tensor], window: Window) -> list[LayerBackend]:
    """One per KV cache group."""
    return [_backend(kv_cache, of_group) for kv_cache, of_group in zip(kv_caches, windows_of(window), strict=True)]


def _backend(kv_cache: Tensor, window: int | None) -> LayerBackend:
    if window != STATE:
        return HashAttention(kv_cache)
    num_blocks, block_size = kv_cache.shape
    return StateBackend(kv_cache.view(num_blocks, 1, 1, 1, 1, block_size), block_size)


_SPEC = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0)


def _spec_of(window: int | None, group: int) -> AttentionSpec:
    if isinstance(window, Chunk):
        return replace(_SPEC, chunk=int(window), kv_cache_group=group)
    return replace(_SPEC, window=None if window == HEAD else window, kv_cache_group=group)


class HashHead:
    """What a `HeadDrafter` asks of a model's head: entries take the model's last hidden states."""

    tapped_layers = ()

    def taken(self, hidden: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        return hidden


class HashModel:
    """See above. `num_tokens` counts every token computed."""

    hidden_size = 1
    classifier = None
    draft_head = HashHead()
    dtype = torch.int64
    attention_specs: Sequence[Sequence[LayerSpec]] = ((_SPEC,),)

    def __init__(self, window: Window = None, block_size: int = 4) -> None:
        """block_size: of states."""
        self.window = window
        self.attention_specs = tuple(
            (
                StateSpec(num_heads=1, head_size=block_size, kv_cache_group=group)
                if of_group == STATE
                else _spec_of(of_group, group),
            )
            for group, of_group in enumerate(windows_of(window))
        )
        self.num_tokens = 0
        self.batches: list[tuple[int, int]] = []
        """(decode rows, prefill rows) of each step."""
        self.before_step: Callable[[], None] | None = None

    def forward(self, inputs: ModelInputs) -> Tensor:
        if self.before_step is not None:
            self.before_step()
        if inputs.before_layer is not None:
            inputs.before_layer()
        assert inputs.token_ids is not None
        total = len(inputs.token_ids)
        self.num_tokens += total
        self.batches.append((inputs.batch.num_decodes, total - inputs.batch.num_decodes))
        found = np.zeros((total, 1), np.int64)
        for (group, [spec]), of_group in zip(enumerate(self.attention_specs), windows_of(self.window), strict=True):
            if of_group == HEAD:
                continue
            values = _stored(inputs.token_ids.numpy(), inputs.positions.numpy(), group)
            if isinstance(plan := inputs.plans[spec], StatePlan):
                found = _joined(found, self._states(plan, torch.from_numpy(values), inputs.positions), group)
                continue
            plan = attention_plan(plan)
            stored = torch.from_numpy(values).view(-1, 1, 1)
            plan.store(0, stored, stored)
            found = _joined(found, plan.attend(0, stored, stored, stored).numpy(), group)
        return inputs.read_rows(torch.from_numpy(found))

    def draft(self, inputs: ModelInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As `Decoder.draft`. What it predicts is what the model did."""
        assert inputs.token_ids is not None
        group = len(self.attention_specs) - 1
        [spec] = self.attention_specs[group]
        entries = _entries(inputs.token_ids.numpy(), inputs.positions.numpy(), hidden.numpy()[:, 0], group)
        attention_plan(inputs.plans[spec]).store(0, torch.from_numpy(entries), torch.from_numpy(entries))
        read = inputs.read_rows(hidden)
        return read, read

    @classmethod
    def _states(cls, plan: StatePlan, contents: Tensor, places: Tensor) -> NDArray[np.int64]:
        """`[T, 1]`: the state after each token."""
        plan.keep(cls._states, contents, places)
        values, positions = contents.numpy(), places.numpy()
        before = plan.read(0)
        after = torch.zeros_like(before)
        found = np.full((len(values), 1), -1, np.int64)
        rows = [(row, row + 1) for row in range(plan.num_decodes)] + plan.chunks
        for place, (start, stop) in enumerate(rows):
            if start == stop:
                continue
            state, num_tokens = before[place, 0, :2].tolist()
            assert num_tokens == positions[start], f"a state of {num_tokens} tokens before token {positions[start]}"
            found[start:stop, 0] = _rolled(state, values[start:stop])
            after[place, 0, 0], after[place, 0, 1] = int(found[stop - 1, 0]), num_tokens + stop - start
        plan.write(0, after)
        return found

    def embed_input_ids(self, token_ids: Tensor) -> Tensor:
        raise AssertionError("a prompt of this model is never embeddings")

    def compute_logits(self, hidden: Tensor) -> Tensor:
        hashes = hidden.squeeze(-1).numpy()
        assert (hashes >= 0).all(), "sampled from a padded row"
        return torch.from_numpy(_logits(hashes))

    def compute_draft_logits(self, hidden: Tensor) -> Tensor:
        return self.compute_logits(hidden)
