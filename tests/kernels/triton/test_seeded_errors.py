"""Errors that are planted in copies of the product's kernels: the checks of this suite find each of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch
from torch import Tensor

from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.lora.lora_linear import LoraOps
from pdserve.kernels.state.state_backend import StateBackend
from tests.kernels.layer_ops_contract import LayerOpsContract
from tests.kernels.lora_contract import MAX_LORAS, LoraContract
from tests.kernels.state_contract import BLOCK_SIZE, STRONG, StateContract
from tests.kernels.triton.test_triton_attention import check_pool_of_many_numbers, check_stored_rows
from tests.support.kernels.attention_cases import check_step, make_case, make_spec
from tests.support.kernels.seeded_kernels import Copies, SeededError, copied_kernels
from tests.support.kernels.triton_interpreter import Bfloat16Error, OutOfBounds, Race

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels are wrong on purpose")

Check = Callable[[Copies], None]
WRONG = AssertionError
"""The result differs from the formula, or is NaN."""


def attention(
    *,
    heads: tuple[int, int, int] = (4, 2, 10),
    prefill: str = "triton",
    dtype: torch.dtype = torch.float32,
    decodes: list[int] | None = None,
    prefills: list[tuple[int, int]] | None = None,
    value_dim: int | None = None,
    **options: Any,
) -> Check:
    """A step with these sequences."""

    def check(copies: Copies) -> None:
        torch.manual_seed(0)
        fields: dict[str, Any] = {"heads": heads, "block_size": 5, "dtype": dtype, "value_dim": value_dim}
        case = make_case(decodes=decodes or [], prefills=prefills or [], **fields)
        spec = make_spec(heads, value_dim=value_dim, **options)
        check_step(copies.attention.TritonAttentionBackend(case.kv_cache, prefill), case, spec)

    return check


def layer_ops(check: Callable[[LayerOpsContract], None]) -> Check:
    """One test of the contract."""

    def run(copies: Copies) -> None:
        class TestCopies(LayerOpsContract):
            def make_ops(self) -> LayerOps:
                ops: LayerOps = copies.layer_ops.TritonLayerOps(torch.device("cpu"))
                return ops

        torch.manual_seed(0)
        check(TestCopies())

    return run


def lora(check: Callable[[LoraContract], None]) -> Check:
    """One test of the contract."""

    def run(copies: Copies) -> None:
        class TestCopies(LoraContract):
            def make_ops(self, dtype: torch.dtype) -> LoraOps:
                ops: LoraOps = copies.lora_ops.TritonLoraOps(torch.device("cpu"), MAX_LORAS, 128)
                return ops

        torch.manual_seed(0)
        check(TestCopies())

    return run


def states(check: Callable[[StateContract], None]) -> Check:
    """One test of the contract."""

    def run(copies: Copies) -> None:
        class TestCopies(StateContract):
            def make_backend(self, kv_cache: Tensor) -> StateBackend:
                backend: StateBackend = copies.states.TritonStateBackend(kv_cache, BLOCK_SIZE)
                return backend

        torch.manual_seed(0)
        check(TestCopies())

    return run


def large_pool(copies: Copies) -> None:
    check_pool_of_many_numbers(copies.attention.TritonAttentionBackend, "decode")


def stored_rows(copies: Copies) -> None:
    check_stored_rows(copies.attention.TritonAttentionBackend)


DECODES = attention(decodes=[1, 37, 300])
CHUNKS = attention(prefills=[(17, 30), (0, 21)])
WINDOWS = attention(decodes=[60], prefills=[(17, 30)], window=13)
CHUNKED = attention(decodes=[60], prefills=[(17, 30)], chunk=13)
CAPPED = attention(prefills=[(17, 30)], softcap=2.0)
SUNK = attention(decodes=[1, 300], prefills=[(17, 30)], sinks=True)
BIASED = attention(decodes=[1, 300], prefills=[(17, 30)], distance_bias=True)
SEVEN = attention(heads=(7, 1, 8), prefills=[(3, 11)])
TWO_PARTS = attention(prefill="sdpa", prefills=[(17, 30), (0, 21), (4, 9)])
LATENT_DECODES = attention(heads=(20, 1, 30), value_dim=18, decodes=[1, 300])
LATENT_CHUNKS = attention(heads=(20, 1, 30), value_dim=18, prefills=[(17, 30)])
HALF = attention(prefills=[(17, 30)], dtype=torch.bfloat16)
NORMED = layer_ops(lambda contract: contract.test_add_norm(torch.bfloat16, "none", 5, 123))
NORMED_AFTER_PRODUCT = layer_ops(lambda contract: contract.test_add_norm(torch.bfloat16, "plain", 5, 123))
ROTATED = layer_ops(lambda contract: contract.test_rotate_and_store(torch.float32, True, (7, 1, 80), 7))
MULTIPLIED = layer_ops(lambda contract: contract.test_swiglu(torch.float32, 5, 123))
MOVED = layer_ops(lambda contract: contract.test_blocks_are_moved_whole(torch.bfloat16, (2, 80)))
DIGESTED = layer_ops(lambda contract: contract.test_digests_are_those_of_a_processor(1016))
ADAPTED = lora(lambda contract: contract.test_sizes(torch.float32, 100, (70, 33), (9, 16)))
SEQUENCES = [(1, 5), (1, 8), (1, 1), (1, 0)]
CONVOLVED = states(
    lambda contract: contract.test_convolve(SEQUENCES, torch.float32, 4, 33, 4, [0, 0, 1, 1], True, True)
)
DELTA_RULED = states(lambda contract: contract.test_delta_rule(SEQUENCES, 2, 3, (8, 5), by_row=True, strength=1.0))
SCANNED = states(lambda contract: contract.test_selective_scan(SEQUENCES, 2, 3, (5, 8), by_element=False, strength=1.0))
SCANNED_BY_ELEMENT = states(
    lambda contract: contract.test_selective_scan(SEQUENCES, 2, 1, (5, 8), by_element=True, strength=1.0)
)
STATE_CHUNKS = [(1, 5), (1, 2), (11, 14), (9, 9), (2, 0)]
CHUNKS_CONVOLVED = states(
    lambda contract: contract.test_convolve(STATE_CHUNKS, torch.float32, 4, 33, 4, [0, 0, 1, 1], True, True)
)
CHUNKS_CORRECTED = states(
    lambda contract: contract.test_delta_rule(STATE_CHUNKS, 2, 1, (8, 5), by_row=False, strength=STRONG)
)
CHUNKS_CORRECTED_BY_ROW = states(
    lambda contract: contract.test_delta_rule(STATE_CHUNKS, 2, 1, (8, 5), by_row=True, strength=1.0)
)
CHUNKS_SCANNED = states(
    lambda contract: contract.test_selective_scan(STATE_CHUNKS, 2, 3, (5, 8), by_element=False, strength=1.0)
)
CHECKS = {
    "decodes": DECODES, "chunks": CHUNKS, "windows": WINDOWS, "chunked": CHUNKED, "capped": CAPPED, "sunk": SUNK,
    "biased": BIASED, "seven": SEVEN,
    "two parts": TWO_PARTS, "latent decodes": LATENT_DECODES, "latent chunks": LATENT_CHUNKS, "stored rows": stored_rows,
    "half": HALF, "normed": NORMED, "normed after a product": NORMED_AFTER_PRODUCT, "rotated": ROTATED,
    "multiplied": MULTIPLIED, "moved": MOVED, "digested": DIGESTED, "in a large pool": large_pool,
    "adapted": ADAPTED, "convolved": CONVOLVED, "delta-ruled": DELTA_RULED, "scanned": SCANNED,
    "scanned by element": SCANNED_BY_ELEMENT,
    "chunks convolved": CHUNKS_CONVOLVED, "chunks corrected": CHUNKS_CORRECTED,
    "chunks corrected by row": CHUNKS_CORRECTED_BY_ROW, "chunks scanned": CHUNKS_SCANNED,
}  # fmt: skip

DECODE, PREFILL, TILE, STORE = (
    f"attention/{name}.py" for name in ("decode_attention", "prefill_attention", "softmax_tile", "store_kv")
)
ERRORS: dict[str, tuple[SeededError, Check, type[Exception] | tuple[type[Exception], ...]]] = {
    # addresses
    "a load without its mask": (
        SeededError(STORE, "v_head_stride + d, mask=mask, other=0.0)", "v_head_stride + d)"), DECODES, OutOfBounds),
    "a store without its mask": (
        SeededError(STORE, "key, mask=mask)", "key)"), DECODES, (Race, WRONG)),
    "an unmasked load at a row's end": (
        SeededError("add_norm.py", "value = tl.load(stream, mask=mask, other=0.0)", "value = tl.load(stream)"),
        NORMED, (OutOfBounds, Race)),
    "a block more than the table has": (
        SeededError(TILE, "seen = (at >= first) & (at < end)", "seen = at >= first"), DECODES, (OutOfBounds, WRONG)),
    "offsets of 32 bits": (
        SeededError(TILE, "block.to(tl.int64) * block_stride", "block * block_stride"), large_pool, OutOfBounds),
    # two writers of one address, and readers of what another program writes
    "rows of a tile's end belong to the next tile": (
        SeededError(PREFILL, "of_row = token < num_rows", "of_row = token <= num_rows"),
        SEVEN, Race),
    "programs that overlap": (
        SeededError("swiglu.py", "tl.program_id(1) * BLOCK +", "tl.program_id(1) * (BLOCK // 2) +"), MULTIPLIED, Race),
    "all query heads write the place of the first": (
        SeededError(DECODE, "heads = head * G + of_group", "heads = head + of_group * 0"), DECODES, Race),
    "a piece that reads another one's place": (
        SeededError(DECODE, "place = tl.load(piece + 3)", "place = tl.load(piece + 3) // 2"), DECODES, Race),
    "blocks in place that are read and written": (
        SeededError("move_blocks.py", "not {*read}.isdisjoint(written)", "False"), MOVED, (Race, WRONG)),
    "a result of another program's row": (
        SeededError(PREFILL, "acc = tl.load(out + places,", "acc = tl.load(out + (places + D) % (2 * HKV * G * D),"),
        TWO_PARTS, Race),
    # stale and undefined numbers
    "a slot behind the last token": (
        SeededError(DECODE, "load_tile(keys, table, at, first, end,",
                    "load_tile(keys, table, at, first, tl.cdiv(end, BS) * BS,"), DECODES, WRONG),
    "a slot behind a chunk's last token": (
        SeededError(PREFILL, "keys, tables, at, first_key, last_key, block_stride,",
                    "keys, tables, at, first_key, tl.cdiv(last_key, BS) * BS, block_stride,"), CHUNKS, WRONG),
    "a masked load without other": (
        SeededError("rotate_and_store.py", "given = tl.load(row, mask=here, other=0.0)", "given = tl.load(row, mask=here)"),
        ROTATED, WRONG),
    "rows that no program writes": (
        SeededError(DECODE, "tl.store(out + (row.to(tl.int64)", "tl.store(out + (row.to(tl.int64) * 0"),
        DECODES, (Race, WRONG)),
    "a block that is not written to its end": (
        SeededError("move_blocks.py", "mask = at < words", "mask = at < words - 1"), MOVED, WRONG),
    # arithmetic
    "a key later than the token": (
        SeededError(PREFILL, "(at[None, :] <= position[:, None])", "(at[None, :] <= position[:, None] + 1)"),
        CHUNKS, WRONG),
    "a full tile that is not": (
        SeededError(PREFILL, "(first_position + 1 if CAUSAL", "(first_position + 8 if CAUSAL"), CHUNKS, WRONG),
    "a window that is one too wide": (
        SeededError(PREFILL, "return position - WINDOW + 1", "return position - WINDOW"), WINDOWS, WRONG),
    "a chunk that begins a key too early": (
        SeededError(PREFILL, "return position // WINDOW * WINDOW", "return position // WINDOW * WINDOW - 1"), CHUNKED, WRONG),
    "sums that do not fade": (
        SeededError(TILE, "acc * fade[:, None]", "acc"), CHUNKS, WRONG),
    "denominators that do not fade": (
        SeededError(TILE, "total = total * fade +", "total = total +"), CHUNKS, WRONG),
    "pieces of equal weight": (
        SeededError(DECODE, "parts * weights[:, None]", "parts"), DECODES, WRONG),
    "a natural logarithm taken for one of base 2": (
        SeededError(PREFILL, "other=0.0) * LOG2E", "other=0.0)"), TWO_PARTS, WRONG),
    "a chunk that counts for one key": (
        SeededError(PREFILL, "total = tl.full([BLOCK_M], 1.0, tl.float32)", "total = tl.full([BLOCK_M], 2.0, tl.float32)"),
        TWO_PARTS, WRONG),
    "a sink of another base": (
        SeededError(PREFILL, "(sinks + heads).to(tl.float32) * LOG2E", "(sinks + heads).to(tl.float32)"), SUNK, WRONG),
    "a sink that a decode row lacks": (
        SeededError(DECODE, "total += tl.exp2(sink - highest)", "total += 0.0"), SUNK, WRONG),
    "a bias of another base": (
        SeededError(TILE, "bias.to(tl.float32) * LOG2E", "bias.to(tl.float32)"), BIASED, WRONG),
    "a bias of the next distance": (
        SeededError(PREFILL, "of_row, position[:, None] - at", "of_row, position[:, None] + 1 - at"), BIASED, WRONG),
    "a bias that counts from a row's end": (
        SeededError(DECODE, "tl.load(seq_lens + row) - 1 - at", "tl.load(seq_lens + row) - at"), BIASED, WRONG),
    "a bias behind the table's end": (
        SeededError(TILE, "num_columns - 1)", "num_columns)"), BIASED, (OutOfBounds, WRONG)),
    "a soft cap of a base too small": (
        SeededError(TILE, "1.0 - 2.0 / (tl.exp2(scores) + 1.0)", "1.0 - 2.0 / (tl.exp(scores) + 1.0)"), CAPPED, WRONG),
    "products of float32 in tf32": (
        SeededError("attention/attention_launch.py", '"ieee" if is_exact', '"tf32" if is_exact'), CHUNKS, WRONG),
    "weights that are not rounded to the values' dtype": (
        SeededError(TILE, "weights.to(v.dtype)", "(weights * 1.1).to(v.dtype)"), HALF, WRONG),
    "arithmetic on bfloat16": (
        SeededError("add_norm.py", "value = tl.load(stream, mask=mask, other=0.0).to(tl.float32)",
                    "value = tl.load(stream, mask=mask, other=0.0)"), NORMED_AFTER_PRODUCT, Bfloat16Error),
    "a value that is rotated": (
        SeededError("rotate_and_store.py", "tl.where(is_rotated, rotated, given)", "rotated"), ROTATED, WRONG),
    "a key in the place of a value": (
        SeededError("rotate_and_store.py", "(plane // HKV) * value_stride", "(plane // HKV) * 0"), ROTATED, Race),
    "a stripe that is not summed": (
        SeededError("block_digests.py", "tl.where(kibibyte == num_whole, rest, 0)", "tl.where(kibibyte == num_whole, 0, 0)"),
        DIGESTED, WRONG),
    # latent rows
    "a value of its own where a row is both": (
        SeededError(TILE, "if not LATENT:", "if True:"), LATENT_CHUNKS, (OutOfBounds, WRONG)),
    "a row written as key and value": (
        SeededError(STORE, "if not LATENT:", "if True:"), stored_rows, (OutOfBounds, Race, WRONG)),
    "a score of the first part of a key": (
        SeededError(TILE, "scores = tl.dot(q_rest,", "tl.dot(q_rest,"), LATENT_DECODES, WRONG),
    "the second part of a key from its beginning": (
        SeededError(TILE, "load_numbers(rows + DV, seen", "load_numbers(rows, seen"), LATENT_CHUNKS, WRONG),
    "a second part that is the next key's": (
        SeededError(TILE, "seen, D - DV, BLOCK_R", "seen, BLOCK_R, BLOCK_R"), LATENT_DECODES, (OutOfBounds, WRONG)),
    "heads of the first tile in each": (
        SeededError(DECODE, "item % TILES * BLOCK_G + g", "g"), LATENT_DECODES, Race),
    "heads of the last tile behind the group's": (
        SeededError(DECODE, "is_head = of_group < G", "is_head = of_group < TILES * BLOCK_G"),
        LATENT_DECODES, (OutOfBounds, Race)),
    "a tile of a chunk with another tile's heads": (
        SeededError(PREFILL, "tl.program_id(1) * H + m % H", "m % H"), LATENT_CHUNKS, Race),
    # adapters
    "tokens of the next slot": (
        SeededError("lora_products.py", "is_token = (place < end)[:, None]", "is_token = (place < end + 1)[:, None]", 2),
        ADAPTED, (OutOfBounds, Race, WRONG)),
    "columns of the next product": (
        SeededError("lora_products.py", "is_column = (column < tl.multiple_of(tl.load(tile + 2), ALIGN))[None, :]",
                    "is_column = (column < OUT)[None, :]"), ADAPTED, (Race, WRONG)),
    "a part of the inputs that is not summed": (
        SeededError("lora_products.py", "for split in range(SPLITS):", "for split in range(SPLITS - 1):"), ADAPTED, WRONG),
    "the matrices of another slot": (
        SeededError("lora_products.py", "b_rows = b + (slot * MAX_RANK", "b_rows = b + ((slot ^ 1) * MAX_RANK"), ADAPTED, WRONG),
    # states
    "two heads write the channels of their group": (
        SeededError("state_columns.py", "if tl.load(run + 4) == 1:", "if True:"), CONVOLVED, Race),
    "a column kept in its old place": (
        SeededError("state_columns.py", "kept + tap - 1", "kept + tap"),
        CONVOLVED, (OutOfBounds, Race, WRONG)),
    "a state before the first token": (
        SeededError("state_steps.py", "mask=here & (before >= 0), other=0.0)", "mask=here, other=0.0)", 2),
        DELTA_RULED, (OutOfBounds, WRONG)),
    "the first row's decay for all": (
        SeededError("state_steps.py", "tl.load(decays + r, mask=r < ROWS, other=0.0))[:, None]", "tl.load(decays))"),
        DELTA_RULED, WRONG),
    "the first column's rate for all": (
        SeededError("state_steps.py", "rate + r[:, None] * COLUMNS + n[None, :]", "rate + r[:, None] * COLUMNS"),
        SCANNED_BY_ELEMENT, WRONG),
    "padding that is written": (
        SeededError("state_steps.py", "state, mask=here & (after >= 0))", "state, mask=here)", 2),
        SCANNED, (OutOfBounds, Race, WRONG)),
    "the state before overwritten": (
        SeededError("state_steps.py", "tl.store(states + after * block_stride + numbers, state, mask",
                    "tl.store(states + tl.maximum(before, 0) * block_stride + numbers, state, mask", 2), SCANNED, (Race, WRONG)),
    # chunks of states
    "columns before a chunk that are one too early": (
        SeededError("state_columns.py", "tl.load(kept + token + tap,", "tl.load(kept + token + tap - 1,"),
        CHUNKS_CONVOLVED, (OutOfBounds, WRONG)),
    "a column of the sequence before": (
        SeededError("state_columns.py", "mask=here & (number >= 0), other", "mask=here, other"),
        CHUNKS_CONVOLVED, (OutOfBounds, WRONG)),
    "columns kept of the chunk's beginning": (
        SeededError("state_columns.py", "row = stop - TAPS + tap", "row = first - TAPS + 1 + tap"), CHUNKS_CONVOLVED, WRONG),
    "a token that does not read itself": (
        SeededError("state_chunks.py", "tl.where(i >= j, reads, 0.0)", "tl.where(i > j, reads, 0.0)"), CHUNKS_SCANNED, WRONG),
    "decays as differences of sums": (
        SeededError("state_chunks.py", "tl.exp(tl.cumsum(tl.where(i > j, logs[:, None], 0.0), 0))",
                    "tl.exp(tl.minimum(tl.cumsum(logs, 0)[:, None] - tl.cumsum(logs, 0)[None, :], 0.0))"),
        CHUNKS_CORRECTED, WRONG),
    "a decay of the token itself": (
        SeededError("state_chunks.py", "(first + place + 1) * decay_row + n", "(first + place) * decay_row + n"),
        CHUNKS_CORRECTED_BY_ROW, WRONG),
    "a correction without its strength": (
        SeededError("state_chunks.py", "rows * strength[None, :]", "rows"), CHUNKS_CORRECTED, WRONG),
    "corrections that do not correct each other": (
        SeededError("state_chunks.py", "for place in range(1, BLOCK_T):", "for place in range(1, 2):"), CHUNKS_CORRECTED, WRONG),
    "a tile with the next sequence's token": (
        SeededError("state_chunks.py", "stop = tl.load(starts + sequence + 1)", "stop = tl.load(starts + sequence + 1) + 1", 2),
        CHUNKS_SCANNED, (OutOfBounds, Race, WRONG)),
    "a state that does not decay from tile to tile": (
        SeededError("state_chunks.py", "update, state * every,", "update, state,"), CHUNKS_SCANNED, WRONG),
    "a token that does not decay to the tile's end": (
        SeededError("state_chunks.py", "tl.trans(k * left)", "tl.trans(k)"), CHUNKS_CORRECTED_BY_ROW, WRONG),
    "a state before a chunk without context": (
        SeededError("state_chunks.py", "mask=here & (before >= 0), other=0.0)", "mask=here, other=0.0)"),
        CHUNKS_SCANNED, (OutOfBounds, WRONG)),
    "a padded chunk that is written": (
        SeededError("state_chunks.py", "state, mask=here & (after >= 0))", "state, mask=here)"),
        CHUNKS_SCANNED, (OutOfBounds, WRONG)),
    "keys taken for values": (
        SeededError("state_chunks.py", "n[:, None] * from_key + v[None, :] * from_value",
                    "n[:, None] * from_value + v[None, :] * from_key"),
        CHUNKS_SCANNED, (OutOfBounds, Race, WRONG)),
}  # fmt: skip
FAST = {"a load without its mask", "rows of a tile's end belong to the next tile", "a slot behind the last token"}
"""The part of `make test`."""


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ERRORS]
)
def test_an_error_is_found(name: str, tmp_path: Path) -> None:
    error, check, expected = ERRORS[name]
    with copied_kernels(tmp_path, error) as copies, pytest.raises(expected):
        check(copies)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_checks_pass_without_an_error(check: Check, tmp_path: Path) -> None:
    with copied_kernels(tmp_path, None) as copies:
        check(copies)


def test_a_text_that_the_kernel_no_longer_has_is_named(tmp_path: Path) -> None:
    error = SeededError(STORE, "no such text", "")
    with (
        pytest.raises(ValueError, match=re.escape("store_kv.py has 0 times 'no such text'")),
        copied_kernels(tmp_path, error),
    ):
        pass
