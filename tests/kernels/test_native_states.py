"""States in C++, at every level that this CPU has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.kernels.attention.make_attention import AttentionBackendError
from pdserve.kernels.native import native_library
from pdserve.kernels.native.native_library import NativeLibraryError, load_library
from pdserve.kernels.native.native_states import NativeStateBackend
from pdserve.kernels.state import make_states as choice
from pdserve.kernels.state.causal_conv import CausalConv, ColumnPart
from pdserve.kernels.state.delta_rule import DELTA_RULE
from pdserve.kernels.state.make_states import make_states
from pdserve.kernels.state.selective_scan import SELECTIVE_SCAN
from pdserve.kernels.state.state_backend import StateBackend, StatePlan
from pdserve.kernels.state.state_spec import StateSpec
from tests.kernels.state_contract import BLOCK_SIZE, StateContract
from tests.support.engine.pretend_device import pretended_device
from tests.support.kernels.attention_batches import packed_batch
from tests.support.run.torch_threads import num_threads

try:
    LIBRARY = load_library()
except NativeLibraryError as error:
    pytest.skip(str(error), allow_module_level=True)


class TestNativeStates(StateContract):
    @pytest.fixture(autouse=True, params=LIBRARY.levels)
    def level(self, request: pytest.FixtureRequest) -> None:
        self._level: str = request.param

    def make_backend(self, kv_cache: Tensor) -> NativeStateBackend:
        return NativeStateBackend(kv_cache, BLOCK_SIZE, LIBRARY, self._level)


NUM_HEADS, CHANNELS, SHAPE = 2, 70, (40, 24)
RATES = -torch.linspace(0.1, 2, 3 * NUM_HEADS * 40 * 24).view(3 * NUM_HEADS, *SHAPE)


def plan_of(pool: Tensor, blocks: list[int]) -> StatePlan:
    """A plan of decode rows whose states are in these blocks before and after it."""
    num = len(blocks)
    batch = packed_batch([2] * num, [0] * num, [1] * num, [3] * num, [[block] for block in blocks])
    spec = StateSpec(num_heads=NUM_HEADS, head_size=pool.shape[5])
    return NativeStateBackend(pool, BLOCK_SIZE, LIBRARY).plan(batch, spec)


def change(pool: Tensor, blocks: list[int], columns: Tensor, tokens: Sequence[Tensor]) -> list[Tensor]:
    """Results of a convolution, the delta rule and the scan over the same matrices, in turns.

    Where the delta rule has a decay per row, the scan has one per element.
    """
    conv = CausalConv(torch.linspace(-1, 1, 4 * columns.shape[1]).view(-1, 4), None, [ColumnPart(CHANNELS)])
    plan, (query, key, value, decay, beta) = plan_of(pool, blocks), tokens
    rates = RATES[:, :1, :1] if decay.shape[2] == 1 else RATES
    scanned = query, value, value, rates.expand(len(query), -1, -1, -1), -decay
    return [
        plan.convolve(0, conv, columns),
        plan.recur(0, DELTA_RULE, (query, key, value, decay, beta), conv.num_kept, SHAPE),
        plan.recur(0, SELECTIVE_SCAN, scanned, conv.num_kept, SHAPE),
    ]


@pytest.fixture(params=[1, SHAPE[0]], ids=["a decay per head", "per row"])
def tokens(request: pytest.FixtureRequest) -> list[Tensor]:
    """Five, each with three matrices per head."""
    num = 3 * NUM_HEADS
    sizes = [(5, num, SHAPE[0]), (5, num, SHAPE[0]), (5, num, SHAPE[1]), (5, num, request.param), (5, num)]
    return [-torch.rand(*size) / 5 for size in sizes]


@pytest.fixture
def pool() -> Tensor:
    return torch.randn(9, NUM_HEADS, 1, 1, 1, 3 * CHANNELS + 3 * SHAPE[0] * SHAPE[1])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_whatever_is_beside_it(threads: int, pool: Tensor, tokens: list[Tensor]) -> None:
    blocks, columns = [7, 2, 4, 1, 8], torch.randn(5, NUM_HEADS * CHANNELS)
    alone, together = pool.clone(), pool.clone()
    with num_threads(threads):
        found = change(together, blocks, columns, tokens)
        for row, block in enumerate(blocks):
            own = slice(row, row + 1)
            for one, of_all in zip(
                change(alone, [block], columns[own], [each[own] for each in tokens]), found, strict=True
            ):
                assert torch.equal(one[0], of_all[row])
    assert torch.equal(alone, together)


def test_no_state_of_a_decode_row_is_copied(
    monkeypatch: pytest.MonkeyPatch, pool: Tensor, tokens: list[Tensor]
) -> None:
    monkeypatch.delattr(StatePlan, "read")
    monkeypatch.delattr(StatePlan, "write")
    change(pool, [7, 2, 4, 1, 8], torch.randn(5, NUM_HEADS * CHANNELS), tokens)


def test_arguments_that_do_not_fit_are_refused(pool: Tensor, tokens: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="block_tables names a block outside the cache of 9 blocks"):
        plan_of(pool, [3, 9])
    plan, conv = plan_of(pool, [3, 5, 7, 1, 2]), CausalConv(torch.ones(8, 4), None, [ColumnPart(4)])
    with pytest.raises(ValueError, match=r"columns \(5, 9\) in a convolution of 8 channels"):
        plan.convolve(0, conv, torch.ones(5, 9))
    with pytest.raises(ValueError, match="tokens of 2 rows in a step of 5"):
        plan.convolve(0, conv, torch.ones(2, 8))
    with pytest.raises(IndexError, match="layer 1 of 1"):
        plan.convolve(1, conv, torch.ones(5, 8))
    with pytest.raises(ValueError, match=r"6 matrices \(40, 24\) do not fit states .* from 211 on"):
        plan.recur(0, DELTA_RULE, tokens, 3 * CHANNELS + 1, SHAPE)
    with pytest.raises(ValueError, match=r"tokens .* for matrices \(24, 40\)"):
        plan.recur(0, DELTA_RULE, tokens, 0, (24, 40))
    vectors = tokens[0], tokens[2], tokens[2]
    for rates, steps in ((RATES, tokens[4].unsqueeze(2)), (RATES[:, :, :1], tokens[0]), (RATES[:, :1, :1], tokens[0])):
        with pytest.raises(ValueError, match=r"tokens .* for matrices \(40, 24\)"):
            plan.recur(0, SELECTIVE_SCAN, (*vectors, rates.expand(5, -1, -1, -1), steps), 0, SHAPE)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        plan.recur(0, DELTA_RULE, [each.double() for each in tokens], 0, SHAPE)
    with pytest.raises(ValueError, match="supports states in float32, not bfloat16"):
        NativeStateBackend(pool.bfloat16(), BLOCK_SIZE, LIBRARY)


# ---- choice


@pytest.fixture
def _unloaded() -> Iterator[None]:
    load_library.cache_clear()
    yield
    load_library.cache_clear()


def test_the_attention_back_end_decides(pool: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("auto", "native", "of another package"):
        assert type(make_states(name, pool, BLOCK_SIZE)) is NativeStateBackend
    assert type(make_states("torch", pool, BLOCK_SIZE)) is StateBackend
    caplog.set_level("INFO", choice.__name__)
    with pretended_device() as device:
        elsewhere = torch.zeros(2, 1, 1, 1, 1, 8, device=device)
        assert type(make_states("auto", elsewhere, BLOCK_SIZE)) is StateBackend
        assert "states in torch operations: it needs states in main memory" in caplog.text
        with pytest.raises(AttentionBackendError, match="'native', but it needs states in main memory"):
            make_states("native", elsewhere, BLOCK_SIZE)


@pytest.mark.usefixtures("_unloaded")
def test_without_the_library_torch_computes_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pool: Tensor
) -> None:
    monkeypatch.setattr(native_library, "LIBRARY_FOLDER", tmp_path)
    caplog.set_level("INFO", choice.__name__)
    assert type(make_states("auto", pool, BLOCK_SIZE)) is StateBackend
    assert "states in torch operations: the native library is not built" in caplog.text
    with pytest.raises(AttentionBackendError, match="'native', but the native library is not built"):
        make_states("native", pool, BLOCK_SIZE)
