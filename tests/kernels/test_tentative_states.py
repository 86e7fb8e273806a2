"""`StatePlan.advance`: the states of tentative sequences are those of the tokens that stand, and others are those of the step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.attention.make_attention import AttentionBackendError
from pdserve.kernels.state.causal_conv import CausalConv, ColumnPart
from pdserve.kernels.state.delta_rule import DELTA_RULE
from pdserve.kernels.state.make_states import make_states
from pdserve.kernels.state.state_backend import StateBackend, StatePlan
from pdserve.kernels.state.state_spec import StateSpec

HEADS, KEY, VALUE, TAPS, LAYERS, BLOCK_SIZE = 2, 4, 6, 3, 2, 8
CHANNELS = 2 * KEY + VALUE
COLUMNS = CHANNELS * (TAPS - 1)
SPEC = StateSpec(num_heads=HEADS, head_size=COLUMNS + KEY * VALUE)


@dataclass(frozen=True)
class Layer:
    """A convolution before a gated delta rule, as the layers of models have them."""

    index: int
    conv: CausalConv

    @classmethod
    def random(cls, index: int) -> Layer:
        return cls(index, CausalConv(torch.randn(HEADS * CHANNELS, TAPS), None, [ColumnPart(CHANNELS)]))

    def attend(self, plan: StatePlan, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """mixed `[T, H * C]`, decay `[T, H, 1]` and beta `[T, H]` -> `[T, H, V]`."""
        plan.keep(self.attend, mixed, decay, beta)
        made = plan.convolve(self.index, self.conv, mixed).view(len(mixed), HEADS, -1)
        query, key, value = torch.split(made, [KEY, KEY, VALUE], -1)
        return plan.recur(self.index, DELTA_RULE, (query, key, value, decay, beta), COLUMNS, (KEY, VALUE))


@dataclass(frozen=True)
class Step:
    """Sequences in an order in which single tokens come first, and of these the tentative ones last."""

    context: Sequence[int]
    counts: Sequence[int]
    tentative: Sequence[int]
    tables: np.ndarray

    def batch(self, counts: Sequence[int], tentative: Sequence[int], chosen: Sequence[int]) -> AttentionBatch:
        lens = np.array(counts, np.int64)
        return AttentionBatch.from_arrays(
            positions=np.zeros(int(lens.sum()), np.int64),
            slot_mapping=np.zeros(int(lens.sum()), np.int64),
            query_lens=lens,
            seq_lens=np.array([self.context[index] for index in chosen], np.int64) + lens,
            block_tables=self.tables[list(chosen)],
            device=torch.get_default_device(),
            tentative=tentative,
        )


def drawn_step(draw: random.Random) -> Step:
    kinds = sorted(
        [(draw.choice([1, 1, 3, 5]), draw.random() < 0.6) for _ in range(6)], key=lambda kind: (kind[0] > 1, kind[1])
    )
    context = [draw.choice([0, 5, 8, 9, 16]) for _ in kinds]
    # a run ends with the block of its first token
    counts = [
        min(count, BLOCK_SIZE - before % BLOCK_SIZE) if is_tentative else count
        for (count, is_tentative), before in zip(kinds, context, strict=True)
    ]
    order = sorted(range(len(kinds)), key=lambda index: (counts[index] > 1, kinds[index][1]))
    tables = np.array(draw.sample(range(1, 40), 24), np.int64).reshape(6, 4)
    return Step(
        [context[index] for index in order],
        [counts[index] for index in order],
        [place for place, index in enumerate(order) if kinds[index][1]],
        tables,
    )


def tokens_of(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(num_tokens, HEADS * CHANNELS) / 2,
        -torch.rand(num_tokens, HEADS, 1),
        torch.rand(num_tokens, HEADS),
    )


@pytest.mark.parametrize("name", ["torch", "native"])
@pytest.mark.parametrize("seed", range(20))
def test_states_are_those_of_the_tokens_that_stand(seed: int, name: str) -> None:
    """name: of the back end that has tentative sequences. Tensors are on the default device."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    step = drawn_step(draw)
    pool = torch.randn(40, HEADS, LAYERS, 1, 1, SPEC.head_size)
    layers = [Layer.random(index) for index in range(LAYERS)]
    given = [tokens_of(sum(step.counts)) for _ in layers]
    standing = [draw.randint(0, step.counts[index]) for index in step.tentative]

    found_pool = pool.clone()
    try:
        backend = make_states(name, found_pool, BLOCK_SIZE)
    except AttentionBackendError as error:
        pytest.skip(str(error))
    plan = backend.plan(step.batch(step.counts, step.tentative, range(6)), SPEC)
    assert isinstance(plan, StatePlan)
    found = [layer.attend(plan, *tokens) for layer, tokens in zip(layers, given, strict=True)]
    plan.advance(standing)

    # the same step in which nothing is tentative: results are equal
    plain = StateBackend(pool.clone(), BLOCK_SIZE).plan(step.batch(step.counts, (), range(6)), SPEC)
    for layer, tokens, results in zip(layers, given, found, strict=True):
        torch.testing.assert_close(layer.attend(plain, *tokens), results)

    # each sequence by itself, with the tokens that stand
    lengths = dict(enumerate(step.counts)) | dict(zip(step.tentative, standing, strict=True))
    starts = np.cumsum(step.counts) - step.counts
    expected = pool.clone()
    for index, length in lengths.items():
        if length:
            alone = StateBackend(expected, BLOCK_SIZE).plan(step.batch([length], (), [index]), SPEC)
            for layer, tokens in zip(layers, given, strict=True):
                layer.attend(alone, *(each[starts[index] : starts[index] + length] for each in tokens))
    torch.testing.assert_close(found_pool, expected)


def test_a_step_is_advanced_once_and_with_a_number_for_each() -> None:
    step = Step([5, 5], [1, 3], [0, 1], np.array([[1], [2]], np.int64))
    pool = torch.randn(4, HEADS, LAYERS, 1, 1, SPEC.head_size)
    plan = StateBackend(pool, BLOCK_SIZE).plan(step.batch(step.counts, step.tentative, range(2)), SPEC)
    Layer.random(0).attend(plan, *tokens_of(4))
    before = pool.clone()
    with pytest.raises(ValueError, match="zip"):
        plan.advance([1])
    plan.advance([0, 2])
    once = pool.clone()
    assert torch.equal(once[1], before[1])
    assert not torch.equal(once[2, :, 0], before[2, :, 0])
    plan.advance([1, 3])
    assert torch.equal(pool, once)
