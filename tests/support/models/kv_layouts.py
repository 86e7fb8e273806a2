"""KV layouts for tests: one rank, float32."""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.common.kv_layout import BlockShape, KvLayout


def make_layout(
    *,
    num_layers: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 1,
    block_size: int = 4,
    model_fingerprint: str = "f" * 32,
) -> KvLayout:
    """Layout of a rank that holds all heads, with one KV cache group."""
    shape = BlockShape(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        total_num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype="float32",
    )
    return KvLayout(model_fingerprint=model_fingerprint, block_size=block_size, shapes=(shape,))


def with_shape(layout: KvLayout, **fields: Any) -> KvLayout:
    """The layout with other values in its only shape."""
    [shape] = layout.shapes
    changed = msgspec.structs.replace(shape, **fields)
    return msgspec.structs.replace(layout, shapes=(changed,), block_size=changed.block_size)


def with_windows(layout: KvLayout, *windows: int) -> KvLayout:
    """The layout with groups of its only shape that have these windows."""
    return msgspec.structs.replace(layout, group_shapes=(0,) * len(windows), group_windows=windows)


def with_head(layout: KvLayout, name: str = "mtp", **fields: Any) -> KvLayout:
    """The layout with the group of a draft head. fields: in which the shape of its blocks differs from the first."""
    shape = msgspec.structs.replace(layout.shapes[0], **fields)
    shapes = tuple(dict.fromkeys((*layout.shapes, shape)))
    return msgspec.structs.replace(
        layout,
        shapes=shapes,
        group_shapes=(*layout.group_shapes, shapes.index(shape)),
        group_windows=(*layout.group_windows, 0),
        draft_head=name,
    )
