"""The contract of every back end of states. A test class binds it: `class TestMine(StateContract)` with `make_backend`."""

from __future__ import annotations

import abc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from pdserve.kernels.state.causal_conv import CausalConv, ColumnPart
from pdserve.kernels.state.delta_rule import DELTA_RULE
from pdserve.kernels.state.selective_scan import SELECTIVE_SCAN
from pdserve.kernels.state.state_backend import StateBackend, StatePlan
from pdserve.kernels.state.state_spec import StateSpec
from tests.support.kernels.attention_batches import packed_batch

BLOCK_SIZE, NUM_LAYERS, LAYER = 4, 2, 1
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
LENS = {
    "one": [(1, 5)],
    "first token": [(1, 1)],
    "a new block, the same, and none before": [(1, 5), (1, 8), (1, 1), (1, 12)],
    "sixteen": [(1, length) for length in range(1, 17)],
    "tokens and chunks": [(1, 9), (1, 1), (1, 4), (5, 5), (3, 10)],
    "chunks": [(2, 2), (7, 8)],
    "chunks that begin and end anywhere in a block": [(5, 9), (5, 10), (5, 11), (5, 12), (6, 6)],
    "a long chunk": [(1, 3), (19, 23)],
    "padding": [(1, 6), (1, 0), (1, 3), (1, 0)],
    "a padded chunk": [(1, 0), (3, 7), (2, 0)],
}
"""Query tokens and tokens in all of each sequence."""
STRONG = 5e3
"""Of strong decays; sums of them in float32 say nothing of the others."""
NextState = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""A state `[M, ...]` in float64 and a token's number -> the state after it, and its result `[M, ...]`."""


@dataclass
class Step:
    """A step over a pool, all of whose numbers are NaN but for the states before it."""

    pool: Tensor
    """`[num_blocks, H, L, 1, 1, N]`"""
    plan: StatePlan
    lens: Sequence[tuple[int, int]]
    before: Sequence[int | None]
    """Block of each sequence's state before the step; None: it has none."""
    after: Sequence[int | None]
    """Block of the one after it; None: padding."""

    @property
    def rows(self) -> list[range]:
        """Each sequence's tokens."""
        starts = [sum(num for num, _ in self.lens[:place]) for place in range(len(self.lens) + 1)]
        return [range(start, stop) for start, stop in pairwise(starts)]

    @property
    def num_tokens(self) -> int:
        return sum(num for num, _ in self.lens)


class StateContract(abc.ABC):
    """Compares with the formulas in float64, token by token."""

    device = "cpu"

    @abc.abstractmethod
    def make_backend(self, kv_cache: Tensor) -> StateBackend:
        """Make the back end under test, with blocks of `BLOCK_SIZE` tokens."""

    def step(self, lens: Sequence[tuple[int, int]], num_heads: int, head_size: int) -> Step:
        """Sequences whose blocks are scattered; the first two with a full block before have the same state before the step."""
        numbers = list(range(1, 2 * len(lens) + 4))
        random.Random(7).shuffle(numbers)
        pool = torch.full((len(numbers) + 1, num_heads, NUM_LAYERS, 1, 1, head_size), torch.nan)
        tables: list[list[int]] = []
        before: list[int | None] = []
        after: list[int | None] = []
        full: list[int] = []
        for num, length in lens:
            # only the places before and after the step have blocks of the sequence's own
            table = [0] * -(-length // BLOCK_SIZE)
            if length:
                table[-1] = numbers.pop()
            if length > num and (place := (length - num - 1) // BLOCK_SIZE) < len(table) - 1:
                table[place] = numbers.pop()
                if (length - num) % BLOCK_SIZE == 0:
                    full.append(table[place])
                    table[place] = full[0]
            tables.append(table or [0])
            before.append(table[(length - num - 1) // BLOCK_SIZE] if length > num else None)
            after.append(table[-1] if length else None)
        for block in filter(None, before):
            pool[block, :, LAYER] = torch.randn(num_heads, 1, 1, head_size)
        pool = pool.to(self.device)
        num_tokens = sum(num for num, _ in lens)
        batch = packed_batch(
            range(num_tokens),
            [0] * num_tokens,
            [num for num, _ in lens],
            [length for _, length in lens],
            tables,
            pool.device,
        )
        spec = StateSpec(num_heads=num_heads, head_size=head_size)
        return Step(pool, self.make_backend(pool).plan(batch, spec), lens, before, after)

    def rows(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random numbers `[shape]`, between whose rows there is NaN."""
        inner = torch.Size(shape[1:]).numel()
        held = torch.full((shape[0], inner + 24), torch.nan, dtype=dtype)
        held[:, :inner] = torch.randn(shape[0], inner)
        return held.to(self.device)[:, :inner].unflatten(1, shape[1:])

    def decays(self, *shape: int, strength: float) -> Tensor:
        """Logarithms; half of them are `strength` times as large as the others."""
        weak = -self.rows(*shape).abs()
        return torch.where(torch.rand(shape, device=self.device) < 0.5, weak, strength * weak)

    def _check_pool(self, step: Step, before: Tensor, written: dict[int, Tensor], place: slice) -> None:
        """written: block -> its numbers in `place`, `[H, n]`; all others are as they were."""
        expected = before.cpu()
        for block, numbers in written.items():
            expected[block, :, LAYER, 0, 0, place] = numbers.float()
        assert step.pool.cpu()[list(written), :, LAYER, 0, 0, place].isfinite().all()
        torch.testing.assert_close(step.pool.cpu(), expected, atol=2e-5, rtol=2e-5, equal_nan=True)
        untouched = torch.ones_like(expected, dtype=torch.bool)
        untouched[list(written), :, LAYER, 0, 0, place] = False
        assert torch.equal(step.pool.cpu().view(torch.int32)[untouched], before.cpu().view(torch.int32)[untouched])

    @pytest.mark.diagonal(2)
    @pytest.mark.parametrize("lens", LENS.values(), ids=list(LENS))
    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    @pytest.mark.parametrize(
        ("num_heads", "channels", "taps", "groups", "has_bias", "has_silu"),
        [
            (1, 7, 4, None, False, False),
            (3, 70, 3, None, True, False),
            (2, 64, 2, None, False, True),
            (2, 130, 5, None, True, True),
            (4, 33, 4, [0, 0, 1, 1], True, True),
            (3, 16, 3, [0, 0, 0], False, True),
            (1, 5, 20, None, True, True),
        ],
        ids=str,
    )
    def test_convolve(
        self,
        lens: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        num_heads: int,
        channels: int,
        taps: int,
        groups: Sequence[int] | None,
        has_bias: bool,
        has_silu: bool,
    ) -> None:
        """With groups a second part of five channels per group follows the first."""
        parts, kept = (
            [ColumnPart(channels)],
            [[head * channels + c for c in range(channels)] for head in range(num_heads)],
        )
        total = num_heads * channels
        if groups is not None:
            firsts = [groups.index(group) for group in sorted(set(groups))]
            parts.append(
                ColumnPart(5, torch.tensor(groups, device=self.device), torch.tensor(firsts, device=self.device))
            )
            kept = [own + [total + 5 * group + c for c in range(5)] for own, group in zip(kept, groups, strict=True)]
            total += 5 * len(firsts)
        weight = torch.randn(total, taps).to(self.device, dtype)
        bias = torch.randn(total).to(self.device, dtype) if has_bias else None
        conv = CausalConv(weight, bias, parts, has_silu=has_silu)
        step = self.step(lens, num_heads, conv.num_kept + 3)
        size = taps - 1
        # states keep columns of the dtype, and heads of a group the same
        held = torch.randn(len(step.pool), total, size).to(dtype).float()
        for block in filter(None, step.before):
            for head, own in enumerate(kept):
                step.pool[block, head, LAYER, 0, 0, : conv.num_kept] = held[block][own].flatten().to(self.device)
        before, columns = step.pool.clone(), self.rows(step.num_tokens, total, dtype=dtype)
        found = step.plan.convolve(LAYER, conv, columns)
        assert found.dtype is dtype
        written = {}
        for own_rows, source, target in zip(step.rows, step.before, step.after, strict=True):
            if target is None:
                continue
            known = torch.zeros(total, size) if source is None else held[source]
            row = torch.cat((known, columns[list(own_rows)].cpu().float().t()), 1)
            expected = row.double().unfold(1, taps, 1) @ weight.cpu().double().unsqueeze(-1)
            expected = expected.squeeze(-1).t() + (0 if bias is None else bias.cpu().double())
            if has_silu:
                expected = torch.nn.functional.silu(expected)
            torch.testing.assert_close(
                found[list(own_rows)].cpu().double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
            )
            last = row[:, row.shape[1] - size :]
            written[target] = torch.stack([last[own].flatten() for own in kept])
        self._check_pool(step, before, written, slice(conv.num_kept))

    @pytest.mark.diagonal(2)
    @pytest.mark.parametrize("lens", LENS.values(), ids=list(LENS))
    @pytest.mark.parametrize(
        ("num_heads", "per_head", "shape"),
        [(1, 1, (1, 1)), (2, 3, (8, 5)), (3, 1, (7, 64)), (2, 2, (33, 16)), (1, 2, (24, 128)), (3, 2, (3, 100))],
        ids=str,
    )
    @pytest.mark.parametrize(
        ("by_row", "strength"),
        [(False, 1.0), (True, 1.0), (False, STRONG), (True, STRONG)],
        ids=["a decay per head", "per row", "strong, per head", "strong, per row"],
    )
    def test_delta_rule(
        self,
        lens: Sequence[tuple[int, int]],
        num_heads: int,
        per_head: int,
        shape: tuple[int, int],
        by_row: bool,
        strength: float,
    ) -> None:
        """Matrices of a state with one head have one key and one query."""
        first, num = 5, num_heads * per_head
        step = self.step(lens, num_heads, first + per_head * shape[0] * shape[1] + 2)
        key = self.rows(step.num_tokens, num, shape[0])
        key = key / key.norm(dim=-1, keepdim=True)
        query, value = self.rows(step.num_tokens, num, shape[0]), self.rows(step.num_tokens, num, shape[1])
        if num_heads == 1:
            key, query = (each[:, :1].expand(-1, num, -1) for each in (key, query))
        decay = self.decays(step.num_tokens, num, shape[0] if by_row else 1, strength=strength)
        beta = self.rows(step.num_tokens, num).sigmoid()

        def next_state(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
            q, k, v, a, b = (each[token].cpu().double() for each in (query, key, value, decay.exp(), beta))
            state = a[:, :, None] * state
            error = b[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
            state = state + torch.einsum("hk,hv->hkv", k, error)
            return state, torch.einsum("hkv,hk->hv", state, q)

        before = step.pool.clone()
        found = step.plan.recur(LAYER, DELTA_RULE, (query, key, value, decay, beta), first, shape)
        self._check_recurrence(step, before, found, next_state, first, (num, *shape))

    @pytest.mark.diagonal(2)
    @pytest.mark.parametrize("lens", LENS.values(), ids=list(LENS))
    @pytest.mark.parametrize(
        ("num_heads", "per_head", "shape"),
        [(1, 1, (1, 1)), (2, 3, (5, 8)), (3, 1, (64, 7)), (2, 2, (16, 33)), (1, 2, (12, 128)), (3, 2, (3, 100))],
        ids=str,
    )
    @pytest.mark.parametrize("by_element", [False, True], ids=["a decay per head", "per element"])
    @pytest.mark.parametrize("strength", [1.0, STRONG], ids=["decays", "strong decays"])
    def test_selective_scan(
        self,
        lens: Sequence[tuple[int, int]],
        num_heads: int,
        per_head: int,
        shape: tuple[int, int],
        by_element: bool,
        strength: float,
    ) -> None:
        """With decays of elements, as in Mamba, and where a state has one head, all matrices have the same b and c."""
        first, num = 3, num_heads * per_head
        step = self.step(lens, num_heads, first + per_head * shape[0] * shape[1] + 1)
        x = self.rows(step.num_tokens, num, shape[0])
        num_vectors = 1 if by_element or num_heads == 1 else num
        b, c = (self.rows(step.num_tokens, num_vectors, shape[1]).expand(-1, num, -1) for _ in range(2))
        rates = -torch.rand(num, *(shape if by_element else (1, 1))).to(self.device) - 0.1
        steps = -self.decays(step.num_tokens, num, rates.shape[1], strength=strength)

        def next_state(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
            own, added, read, length = (each[token].cpu().double() for each in (x, b, c, steps))
            decay = (length[:, :, None] * rates.cpu().double()).exp()
            state = decay * state + torch.einsum("hp,hn->hpn", own, added)
            return state, torch.einsum("hpn,hn->hp", state, read)

        before = step.pool.clone()
        tokens = x, b, c, rates.expand(step.num_tokens, -1, -1, -1), steps
        found = step.plan.recur(LAYER, SELECTIVE_SCAN, tokens, first, shape)
        self._check_recurrence(step, before, found, next_state, first, (num, *shape))

    def _check_recurrence(
        self,
        step: Step,
        before: Tensor,
        found: Tensor,
        next_state: NextState,
        first: int,
        shape: tuple[int, int, int],
    ) -> None:
        num_heads = before.shape[1]
        place = slice(first, first + shape[0] // num_heads * shape[1] * shape[2])
        written = {}
        for own_rows, source, target in zip(step.rows, step.before, step.after, strict=True):
            if target is None:
                continue
            state = torch.zeros(shape, dtype=torch.float64)
            if source is not None:
                state = before[source, :, LAYER, 0, 0, place].cpu().double().reshape(shape)
            for token in own_rows:
                state, expected = next_state(state, token)
                torch.testing.assert_close(found[token].cpu().double(), expected, atol=1e-4, rtol=1e-4)
            written[target] = state.reshape(num_heads, -1)
        self._check_pool(step, before, written, place)
