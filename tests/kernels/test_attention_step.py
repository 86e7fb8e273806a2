"""Paged attention against its formula, written out one query at a time in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.kernels import decode_attention
from pdserve.kernels.attention_batch import AttentionBatch, PrefillChunk
from pdserve.kernels.attention_step import AttentionStep
from pdserve.kernels.kv_pages import KvPages

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass
class Case:
    """A cache of poison in which only the keys and values of known sequences are numbers."""

    batch: AttentionBatch
    qkv: Tensor
    kv_cache: Tensor
    keys: list[Tensor]
    """By sequence, `[length, Hkv, D]` in float64; decodes first."""
    values: list[Tensor]


def make_case(
    *,
    decodes: list[int],
    prefills: list[tuple[int, int]],
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    num_layers: int = 2,
    layer: int = 1,
    seed: int = 0,
) -> Case:
    """decodes: lengths; prefills: (context_len, num_tokens); heads: (Hq, Hkv, D)."""
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(seed)
    lengths = decodes + [context + new for context, new in prefills]
    news = [1] * len(decodes) + [new for _, new in prefills]
    num_tokens = sum(news)
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)

    num_blocks = sum(-(-length // block_size) for length in lengths) + 3
    free = list(range(num_blocks))
    random.Random(seed).shuffle(free)
    kv_cache = torch.empty(num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    kv_cache.view(-1, 2).copy_(torch.tensor([torch.nan, torch.inf]))
    # Rows padded with block 0 would read poison if padding were ever read.
    free.remove(0)
    tables, keys, values, positions, slots = [], [], [], [], []
    row = 0
    for length, new in zip(lengths, news, strict=True):
        table = torch.tensor([free.pop() for _ in range(-(-length // block_size))])
        tables.append(table)
        kv = torch.randn(2, length, num_kv_heads, head_dim, generator=generator).to(dtype)
        kv[:, length - new :] = qkv[row : row + new, num_heads:].view(new, 2, num_kv_heads, head_dim).transpose(0, 1)
        keys.append(kv[0].double())
        values.append(kv[1].double())
        where = torch.arange(length)
        blocks, offsets = table[where // block_size], where % block_size
        old = length - new
        kv_cache[blocks[:old], layer, :, :, offsets[:old]] = kv[:, :old].transpose(0, 1)
        positions.append(where[old:])
        slots.append((blocks * block_size + offsets)[old:])
        row += new
    width = max((len(table) for table in tables[: len(decodes)]), default=0) + 2
    padded = torch.zeros(len(decodes), width, dtype=torch.int64)
    for index in range(len(decodes)):
        padded[index, : len(tables[index])] = tables[index]
    chunks = []
    start = len(decodes)
    for (context, new), table in zip(prefills, tables[len(decodes) :], strict=True):
        chunks.append(PrefillChunk(start, new, context, table))
        start += new
    batch = AttentionBatch(
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        num_decodes=len(decodes),
        block_tables=padded,
        seq_lens=torch.tensor(decodes, dtype=torch.int64),
        max_seq_len=max(decodes, default=0),
        prefills=tuple(chunks),
    )
    return Case(batch, qkv, kv_cache, keys, values)


def reference(case: Case, heads: tuple[int, int, int], window: int | None) -> Tensor:
    """`softmax(q k^T / sqrt(D)) v` over the keys `max(0, p - window + 1) .. p` of a query at position p."""
    num_heads, num_kv_heads, head_dim = heads
    counts = [1] * case.batch.num_decodes + [chunk.num_tokens for chunk in case.batch.prefills]
    out, row = [], 0
    for count, keys, values in zip(counts, case.keys, case.values, strict=True):
        for index in range(count):
            position = len(keys) - count + index
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                query = case.qkv[row + index, head].double()
                scores = keys[first : position + 1, kv_head] @ query * head_dim**-0.5
                out.append(scores.softmax(0) @ values[first : position + 1, kv_head])
        row += count
    return torch.stack(out).view(row, num_heads * head_dim)


def check(case: Case, heads: tuple[int, int, int], window: int | None, layer: int = 1) -> None:
    before = case.kv_cache.clone()
    step = AttentionStep(case.batch, KvPages(case.kv_cache), heads[0], frozenset({window}))
    found = step.attend(layer, case.qkv, window)
    tolerance = TOLERANCES[case.qkv.dtype]
    torch.testing.assert_close(found.double(), reference(case, heads, window), atol=tolerance, rtol=tolerance)

    # The new keys and values stand in their slots, and no other sequence's slot has changed.
    block_size = case.kv_cache.shape[4]
    slots = case.batch.slot_mapping
    written = case.kv_cache[slots // block_size, layer, :, :, slots % block_size]
    assert torch.equal(written.flatten(1, 2), case.qkv[:, heads[0] :])
    before[slots // block_size, layer, :, :, slots % block_size] = written
    untouched = case.kv_cache.isfinite() & (case.kv_cache != 0)
    assert torch.equal(case.kv_cache[untouched], before[untouched])


HEADS = [(4, 2, 16), (7, 1, 10), (3, 3, 6), (14, 2, 64)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 13])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_mixed_step(dtype: torch.dtype, heads: tuple[int, int, int], window: int | None, block_size: int) -> None:
    case = make_case(
        decodes=[1, 37, 16, 5],
        prefills=[(0, 1), (0, 21), (17, 30), (16, 3)],
        heads=heads,
        block_size=block_size,
        dtype=dtype,
    )
    check(case, heads, window)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("window", [None, 40, 200])
@pytest.mark.parametrize(
    "decodes",
    [
        [1],
        [123],
        [48],
        [99, 99, 99],
        [16] * 5,
        [1500, 3, 2, 40, 7],
        [3, 1500, 3, 1500],
        [300, 290, 310, 301, 16, 299, 305, 310],
        list(range(1, 130, 9)),
    ],
    ids=lambda lengths: f"{len(lengths)}x{max(lengths)}",
)
def test_decodes_of_like_and_unlike_lengths(dtype: torch.dtype, window: int | None, decodes: list[int]) -> None:
    """One length needs no mask, ragged ones do, and very ragged ones are cut into groups."""
    heads = (6, 2, 8)
    check(make_case(decodes=decodes, prefills=[], heads=heads, block_size=16, dtype=dtype), heads, window)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 60, 129, 400])
@pytest.mark.parametrize(("context", "new"), [(0, 128), (0, 129), (0, 300), (123, 257), (300, 1), (31, 128)])
def test_prefill_across_tiles(dtype: torch.dtype, window: int | None, context: int, new: int) -> None:
    """Chunks that end before, at and after the edge of a tile of queries."""
    heads = (2, 1, 8)
    check(make_case(decodes=[], prefills=[(context, new)], heads=heads, block_size=16, dtype=dtype), heads, window)


def test_layers_and_windows_are_independent() -> None:
    heads = (4, 2, 8)
    for layer in range(3):
        for window in (None, 6):
            case = make_case(
                decodes=[20, 9],
                prefills=[(10, 9)],
                heads=heads,
                block_size=4,
                dtype=torch.float32,
                num_layers=3,
                layer=layer,
            )
            check(case, heads, window, layer)


def test_large_batches_are_gathered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = (4, 2, 8)
    block_bytes = 2 * 2 * 16 * 8 * 4
    monkeypatch.setattr(decode_attention, "_GATHER_BYTES", 7 * block_bytes)
    for decodes in ([48] * 5, [20, 60, 100, 48, 200, 1]):
        case = make_case(decodes=decodes, prefills=[], heads=heads, block_size=16, dtype=torch.float32)
        check(case, heads, None)
        groups = decode_attention.plan_decode(case.batch, KvPages(case.kv_cache), None)
        assert [group.start for group in groups] == [0, *(group.stop for group in groups[:-1])]
        assert all(group.source.out.nbytes <= 8 * block_bytes or group.stop == group.start + 1 for group in groups)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot_mapping": torch.tensor([1, 2])}, "slot_mapping has 2 entries for 4"),
        ({"prefills": ()}, "cover 1 of 4"),
        ({"prefills": (PrefillChunk(0, 3, 0, torch.tensor([1])),)}, "starts at row 0, not 1"),
        ({"prefills": (PrefillChunk(1, 3, 2, torch.tensor([1])),)}, r"1 blocks for 2 \+ 3"),
        ({"block_tables": torch.tensor([[2]]), "max_seq_len": 5}, "1 columns for 5"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    case = make_case(decodes=[4], prefills=[(0, 3)], heads=(2, 2, 4), block_size=4, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        AttentionStep(replace(case.batch, **changes), KvPages(case.kv_cache), 2, frozenset({None}))


@pytest.mark.parametrize("window", [None, 40])
def test_the_branches_for_accelerators(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, lengths are not read back and tails are cleared by index; the arithmetic runs anywhere."""
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda _: False))
    heads = (6, 2, 8)
    for decodes in ([300, 16, 17, 1], [50], [33, 33]):
        case = make_case(decodes=decodes, prefills=[(20, 41), (0, 9)], heads=heads, block_size=16, dtype=torch.float32)
        check(case, heads, window)
