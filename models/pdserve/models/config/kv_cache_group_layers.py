"""`kv_cache_group_layers`: which layers are a KV cache group together, in a model with windows in some layers.

A block has the layers of one group, and all groups share one pool of equal blocks, so groups of fewer layers are padded. A model
with 10 layers that attend to everything and 52 with a window has a group of 10 and six of 8 or 9: a long sequence needs 10 layers
per token instead of 62, a short one 70.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

MAX_GROUPS = 8
"""Each group has a block table per sequence, which every step reads."""
_MAX_LONG_SHARE = 0.75
_MAX_SHORT_SHARE = 1.25
"""Layers per token with groups, over the model's: at most so many in a long sequence, and in a short one, for groups to be made."""


def kv_cache_group_layers(sliding_windows: Sequence[int | None]) -> tuple[tuple[int, ...], ...]:
    """The layers of each group: those without a window first, then by width, the widest first.

    sliding_windows: per layer, None for none. One group with all layers where windows are equal, and where groups would save less
    than a quarter of a long sequence's memory, or cost more than a quarter of a short one's.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(sliding_windows):
        kinds.setdefault(window, []).append(layer)
    whole = (tuple(range(len(sliding_windows))),)
    if len(kinds) == 1:
        return whole
    num_full, num_layers = len(kinds.get(None, ())), len(sliding_windows)

    def padded(num_kind: int, size: int) -> int:
        return -(-num_kind // size) * size

    sizes: list[tuple[int, int, int]] = []
    """(layers of a long sequence, layers of a short one, layers of a block), padding included."""
    for size in range(1, num_layers):
        of_short = sum(padded(len(layers), size) for layers in kinds.values())
        if of_short <= MAX_GROUPS * size:
            sizes.append((padded(num_full, size), of_short, size))
    if not sizes:
        return whole
    of_long, of_short, size = min(sizes, key=lambda each: (*each[:2], -each[2]))
    if of_long > _MAX_LONG_SHARE * num_layers or of_short > _MAX_SHORT_SHARE * num_layers:
        return whole
    groups: list[tuple[int, ...]] = []
    for _, layers in sorted(kinds.items(), key=lambda kind: (kind[0] is not None, -(kind[0] or 0))):
        count = -(-len(layers) // size)
        bounds = [len(layers) * number // count for number in range(count + 1)]
        groups += [tuple(layers[start:stop]) for start, stop in pairwise(bounds)]
    return tuple(groups)
