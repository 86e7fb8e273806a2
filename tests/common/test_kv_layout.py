"""The layout of a block: its dims, and the runs of bytes of its heads."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import msgspec
import pytest
import torch

from pdserve.common.errors import LayoutMismatch
from pdserve.common.kv_layout import FORMAT, KvLayout
from pdserve.common.security import fingerprint
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.kv_cache import make_kv_cache
from tests.support.models.kv_layouts import make_layout, with_head, with_shape, with_windows

LAYOUT = make_layout(num_layers=5, num_kv_heads=4, head_dim=6, block_size=3)


def test_a_block_is_one_run_of_bytes() -> None:
    assert LAYOUT.shapes[0].dims == (4, 5, 2, 3, 6)
    assert LAYOUT.shapes[0].block_bytes == 4 * LAYOUT.shapes[0].head_bytes == 4 * 5 * 2 * 3 * 6 * 4


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_each_range_of_heads_is_one_run_of_bytes(dtype: str) -> None:
    layout = with_shape(LAYOUT, dtype=dtype)
    kv_cache = make_kv_cache(layout.shapes[0], 7)
    kv_cache.view(-1).copy_(torch.arange(kv_cache.numel()) % 199)
    pool = kv_cache.flatten().view(torch.uint8)
    for first, stop in combinations(range(layout.shapes[0].num_kv_heads + 1), 2):
        start = 2 * layout.shapes[0].block_bytes + first * layout.shapes[0].head_bytes
        run = pool[start : start + (stop - first) * layout.shapes[0].head_bytes]
        assert torch.equal(run.view(kv_cache.dtype), kv_cache[2, first:stop].flatten())


def test_latent_rows_take_the_bytes_of_one_head() -> None:
    """DeepSeek V3: 61 layers of 512 + 64 numbers."""
    layout = with_shape(make_layout(num_layers=61, head_dim=576, block_size=16), dtype="bfloat16", rows_per_token=1)
    assert layout.shapes[0].dims == (1, 61, 1, 16, 576)
    assert layout.shapes[0].block_bytes == 16 * 70_272
    keys_and_values = with_shape(layout, rows_per_token=2)
    assert layout.differences(keys_and_values) == ["rows_per_token: 1 != 2"]
    # all ranks have the one row
    ranks = [msgspec.structs.replace(layout, tp_rank=rank, tp_size=4) for rank in range(4)]
    assert ranks[0].shapes[0].ranks_with(0, 4) == range(4)
    assert all(layout.differences(rank) == [] for rank in ranks)
    assert ranks[0].total_place_bytes == layout.shapes[0].block_bytes


def test_differences_name_the_field_and_both_values() -> None:
    other = with_shape(msgspec.structs.replace(LAYOUT, format=FORMAT + 1), head_dim=64)
    assert LAYOUT.differences(LAYOUT) == []
    assert LAYOUT.differences(other) == ["format: 1 != 2", f"head_dim: {LAYOUT.shapes[0].head_dim} != 64"]


def test_a_dtype_of_unknown_size_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="float4"):
        with_shape(LAYOUT, dtype="float4").place_bytes  # noqa: B018


def test_blocks_of_another_format_have_another_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that know no formats compare fingerprints."""
    (tmp_path / "config.json").write_text("{}")
    ours = fingerprint.model_fingerprint(tmp_path, "float32")
    monkeypatch.setattr(fingerprint, "FORMAT", FORMAT + 1)
    assert fingerprint.model_fingerprint(tmp_path, "float32") != ours


def test_workers_with_other_groups_differ_in_them() -> None:
    other = with_windows(with_shape(LAYOUT, num_layers=2), 0, 13, 13)
    groups = ["group_shapes: (0, 0, 0) != (0,)", "group_windows: (0, 13, 13) != (0,)"]
    assert other.differences(LAYOUT) == [*groups, "num_layers: 2 != 5"]
    assert (other.num_groups, LAYOUT.num_groups) == (3, 1)


@pytest.mark.parametrize(
    ("windows", "num_tokens", "num_cached", "num_blocks"),
    [
        ((0,), 10, 0, 4),
        ((0,), 10, 3, 1),
        ((0,), 9, 5, 0),
        ((0, 0), 10, 3, 2),
        ((0, 4), 10, 0, 4 + 2),
        ((0, 4), 10, 3, 1 + 1),
        ((0, 4), 300, 0, 100 + 1),
        ((0, 4, 4), 300, 99, 1 + 1 + 1),
        ((7, 4), 300, 0, 2 + 1),
        ((0, 4), 9, 5, 0),
    ],
)
def test_blocks_that_the_token_after_a_prompt_sees(
    windows: tuple[int, ...], num_tokens: int, num_cached: int, num_blocks: int
) -> None:
    layout = with_windows(LAYOUT, *windows)  # 3 tokens in a block
    assert layout.num_prompt_blocks(num_tokens, num_cached) == num_blocks


WITH_HEADS = {
    "its own shape": with_head(LAYOUT, num_layers=1),
    "the shape of others": with_head(LAYOUT),
    "several groups": with_head(with_windows(LAYOUT, 0, 13), num_layers=1),
}


@pytest.mark.parametrize("layout", WITH_HEADS.values(), ids=WITH_HEADS)
def test_a_transfer_moves_the_blocks_of_a_draft_head_or_all_but_these(layout: KvLayout) -> None:
    plain = layout.without_draft_head()
    assert plain == (with_windows(LAYOUT, 0, 13) if layout.num_groups == 3 else LAYOUT)
    assert plain.without_draft_head() is plain
    assert layout.moved(without_draft_head=True) == plain
    assert layout.moved(without_draft_head=False) is layout
    assert layout.num_prompt_blocks(10, 3) == plain.num_prompt_blocks(10, 3) + 1


@pytest.mark.parametrize("layout", WITH_HEADS.values(), ids=WITH_HEADS)
def test_workers_with_and_without_a_draft_head_can_transfer(layout: KvLayout) -> None:
    plain, other = layout.without_draft_head(), msgspec.structs.replace(layout, draft_head="other")
    assert layout.has_draft_head_of(layout)
    assert plain.has_draft_head_of(plain)
    for ours, theirs in ((layout, plain), (plain, layout), (layout, other)):
        assert not ours.has_draft_head_of(theirs)
        assert ours.differences(theirs) == []
    block_size = with_shape(LAYOUT, block_size=4)
    assert layout.differences(block_size)[-1] == plain.differences(block_size)[-1]
    assert plain.differences(with_windows(LAYOUT, 0, 13, 13)), "other groups, and no head that may be left out"


def test_workers_with_one_draft_head_have_it_in_blocks_of_one_shape() -> None:
    """The same name, and other keys and values: never moved as they are, nor left out."""
    ours = with_head(LAYOUT, num_layers=1)
    assert ours.differences(with_head(LAYOUT, num_layers=1, head_dim=8)) == ["shapes[1].head_dim: 6 != 8"]
    assert "shapes: 2 != 1" in ours.differences(with_head(LAYOUT))


def test_a_layout_whose_only_group_is_a_draft_head_differs_from_every_other() -> None:
    """No worker of ours announces it."""
    odd = msgspec.structs.replace(LAYOUT, draft_head="mtp")
    for layout in (LAYOUT, *WITH_HEADS.values(), msgspec.structs.replace(odd, draft_head="other")):
        if layout.draft_head != "other":
            assert any(line.startswith("group_shapes: ") for line in odd.differences(layout))
        assert odd.without_draft_head().num_groups == 0
        odd.differences(msgspec.structs.replace(odd, group_shapes=(), group_windows=(), shapes=()))
