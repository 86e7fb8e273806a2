"""`KvLayout`: the shape and format of a KV block, equal at both workers of a transfer; their ranks may differ in number."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MappingProxyType
from typing import Literal

import msgspec

from pdserve.common.errors import LayoutMismatch
from pdserve.common.transfer_order import TransferOrder

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")
"""Dtypes of rounded keys and values. A head's scales, float32, one per token for keys and for values in each layer, follow its
keys and values in its run of bytes."""
SCALE_BYTES = 4
KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_per_token_head", "int8", "int8_per_token_head"]
"""Values of the setting `kv_cache_dtype`. All of one number format are the same: there is always a scale per token and head."""
CACHE_DTYPES = MappingProxyType(
    {
        "auto": None,
        "fp8": "float8_e4m3fn",
        "fp8_e4m3": "float8_e4m3fn",
        "fp8_per_token_head": "float8_e4m3fn",
        "int8": "int8",
        "int8_per_token_head": "int8",
    }
)
"""`KvCacheDtype` -> one of `QUANTIZED_DTYPES`; None: the model's dtype."""
FORMAT = 1
"""Order of a block's bytes, raised with each change: blocks of another format would be read as other keys and values.

    0   [L, 2, Hkv, bs, D]    workers whose messages have no format
    1   [Hkv, L, 2, bs, D]    each head is one run of bytes
"""


_OF_RANKS = ("num_kv_heads", "tp_rank", "tp_size")
"""Fields in which two workers of a transfer may differ."""


class BlockShape(msgspec.Struct, frozen=True, kw_only=True):
    """Dims of a block `[num_kv_heads, num_layers, rows_per_token, block_size, head_dim]` on one rank.

    A block is one run of bytes, and so is each range of its heads: heads a to b - 1 are its bytes from `a * head_bytes` to
    `b * head_bytes`.
    """

    num_layers: int
    num_kv_heads: int
    """Heads of this rank."""
    total_num_kv_heads: int
    """Heads of all ranks."""
    head_dim: int
    block_size: int
    """Tokens in a block."""
    dtype: str
    """`float32`, `bfloat16`, `float16`, or one of `QUANTIZED_DTYPES`."""
    rows_per_token: int = 2
    """Of a head in a layer: 2, a key and a value; 1, one row that has both (`AttentionSpec.value_dim`)."""

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's run in a block, all layers. Raises: LayoutMismatch for a dtype that is not known."""
        item_bytes = DTYPE_BYTES.get(self.dtype)
        if item_bytes is None:
            raise LayoutMismatch(f"the KV layout's dtype is {self.dtype[:64]!r}, {', '.join(DTYPE_BYTES)} are known")
        return (
            (self.num_layers * self.rows_per_token + self.num_scale_rows) * self.block_size * self.head_dim * item_bytes
        )

    @property
    def num_scale_rows(self) -> int:
        """Rows `[bs, D]` of bytes after a head's keys and values, with their scales: `[L, 2, bs]` float32, then zeros."""
        if self.dtype not in QUANTIZED_DTYPES:
            return 0
        return -(-self.num_layers * 2 * SCALE_BYTES // self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block. Raises: LayoutMismatch for a dtype that is not known."""
        return self.num_kv_heads * self.head_bytes

    @property
    def dims(self) -> tuple[int, ...]:
        """`[Hkv, L, rows_per_token, bs, D]`; `[Hkv, L * 2 + num_scale_rows, bs, D]` with a quantised dtype."""
        if self.dtype in QUANTIZED_DTYPES:
            return (self.num_kv_heads, self.num_layers * 2 + self.num_scale_rows, self.block_size, self.head_dim)
        return (self.num_kv_heads, self.num_layers, self.rows_per_token, self.block_size, self.head_dim)

    @property
    def total_block_bytes(self) -> int:
        """Bytes of one block in all ranks, each head once. Raises: LayoutMismatch for a dtype that is not known."""
        return self.total_num_kv_heads * self.head_bytes

    def ranks_with(self, head: int, tp_size: int) -> range:
        """Ranks that have a head, 0 to `total_num_kv_heads` - 1: one, or several where there are fewer heads than ranks."""
        if self.total_num_kv_heads < tp_size:
            copies = tp_size // self.total_num_kv_heads
            return range(head * copies, (head + 1) * copies)
        rank = head // self.num_kv_heads
        return range(rank, rank + 1)

    def is_even(self, tp_size: int) -> bool:
        """True if the ranks have equal parts of the heads, or each head is on equally many ranks."""
        total = self.total_num_kv_heads
        if min(total, tp_size) < 1 or (total % tp_size and tp_size % total):
            return False
        return self.num_kv_heads == max(1, total // tp_size)


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of a model's KV cache groups on one rank."""

    format: int = FORMAT
    model_fingerprint: str
    """32 hex digits: a hash of everything that determines the content of a KV block."""
    block_size: int
    """Tokens in a block."""
    tp_rank: int = 0
    tp_size: int = 1
    """Ranks that share the heads."""
    shapes: tuple[BlockShape, ...]
    """Different ones of the groups, in the order of the first group of each. Groups of one shape have blocks from one pool, with
    the layers of one group each, and padding."""
    group_shapes: tuple[int, ...] = (0,)
    """Per KV cache group, the index of its shape."""
    group_windows: tuple[int, ...] = (0,)
    """Per group, tokens of its window, 0 for none; 2 for states. Which layers are a group follows from the model; a change of that
    rule raises `FORMAT`."""
    group_chunks: tuple[int, ...] = ()
    """Per group, positions of its chunks, 0 for none; empty: no group has chunks. A group with chunks has no window."""
    draft_head: str = ""
    """Names the draft head whose keys and values are the last group; empty: there is none. Workers leave this
    group out of a transfer if their heads differ or one of them has none."""

    def transfer_order(self, num_tokens: int) -> TransferOrder:
        """The numbers of a prompt's blocks in a transfer. num_tokens: with the output of earlier attempts."""
        return TransferOrder.of(self.group_windows, num_tokens, self.block_size, self.group_chunks)

    @property
    def _lasts(self) -> list[bool]:
        """Per group, True if a sequence keeps the blocks of all its places."""
        chunks = self.group_chunks or (0,) * self.num_groups
        return [not (window or chunk) for window, chunk in zip(self.group_windows, chunks, strict=True)]

    @property
    def place_bytes(self) -> int:
        """Bytes of a block in each group. Raises: LayoutMismatch for a dtype that is not known."""
        return sum(self.shapes[shape].block_bytes for shape in self.group_shapes)

    @property
    def total_place_bytes(self) -> int:
        """As `place_bytes`, in all ranks, each head once. Raises: LayoutMismatch."""
        return sum(self.shapes[shape].total_block_bytes for shape in self.group_shapes)

    @property
    def mean_block_bytes(self) -> int:
        """Bytes of a block in all ranks, in the mean of the groups. Raises: LayoutMismatch."""
        return self.total_place_bytes // self.num_groups

    def num_places(self, num_blocks: Sequence[int]) -> int:
        """Places of sequences for which there are blocks of each shape. Groups with a window or chunks do not count: they need
        blocks for few places of each sequence. num_blocks: by shape."""
        groups = list(zip(self.group_shapes, self._lasts, strict=True))
        lasting = [shape for shape, lasts in groups if lasts] or [shape for shape, _ in groups]
        return min(count // lasting.count(shape) for shape, count in enumerate(num_blocks) if shape in lasting)

    def pool_bytes(self, num_blocks: Sequence[int]) -> int:
        """Bytes of as many blocks of each shape. Raises: LayoutMismatch."""
        return sum(count * shape.block_bytes for count, shape in zip(num_blocks, self.shapes, strict=True))

    @property
    def hits_need_last_block(self) -> bool:
        """True if a hit of the prefix cache needs no block of the first group other than its last: workers keep only some
        of the group's states, and one that has the last state of a prefix has the prefix, whatever it has before it."""
        return 0 < self.group_windows[0] <= 2

    @property
    def num_groups(self) -> int:
        """KV cache groups. A token's keys and values lie in a block of each."""
        return len(self.group_shapes)

    @property
    def block_shapes(self) -> tuple[BlockShape, ...]:
        """Per KV cache group."""
        return tuple(self.shapes[shape] for shape in self.group_shapes)

    def num_prompt_blocks(self, num_tokens: int, num_cached: int = 0) -> int:
        """Blocks of a prompt, of all KV cache groups together, that the first token after it sees.

        num_cached: places from the first, whose blocks are not counted.
        """
        if all(self._lasts):
            return max(0, -(-num_tokens // self.block_size) - num_cached) * self.num_groups
        order = self.transfer_order(num_tokens)
        return max(0, len(order) - order.number(num_cached))

    def without_draft_head(self) -> KvLayout:
        """The layout without the draft head's group."""
        if not self.draft_head:
            return self
        group_shapes = self.group_shapes[:-1]
        return msgspec.structs.replace(
            self,
            shapes=self.shapes[: max(group_shapes, default=0) + 1],
            group_shapes=group_shapes,
            group_windows=self.group_windows[:-1],
            group_chunks=self.group_chunks[:-1],
            draft_head="",
        )

    def moved(self, *, without_draft_head: bool) -> KvLayout:
        """The groups that a transfer moves."""
        return self.without_draft_head() if without_draft_head else self

    def has_draft_head_of(self, other: KvLayout) -> bool:
        """True if both workers have the same draft head, or none: a transfer between them moves all groups."""
        return self.draft_head == other.draft_head

    def differences(self, other: KvLayout) -> list[str]:
        """Reasons why blocks cannot be transferred between the two, one line each: `name: ours != theirs` for a field; empty if
        they can. Ranks may differ in number if each side's ranks have equal parts of the heads. Draft heads may differ.
        """
        return list(_differences(self, other))

    def _differences(self, other: KvLayout) -> list[str]:
        if not self.has_draft_head_of(other):
            return self.without_draft_head()._differences(other.without_draft_head())
        found = _differing(self, other, ("shapes", *_OF_RANKS))
        if len(self.shapes) != len(other.shapes):
            found.append(f"shapes: {len(self.shapes)} != {len(other.shapes)}")
        pairs = list(zip(self.shapes, other.shapes, strict=False))
        for number, (ours, theirs) in enumerate(pairs):
            of_shape = f"shapes[{number}]." if len(self.shapes) > 1 else ""
            found += [of_shape + line for line in _differing(ours, theirs, _OF_RANKS)]
        if found:
            return found
        return [
            f"tp_size: {self.tp_size} and {other.tp_size} ranks with {ours.num_kv_heads} and {theirs.num_kv_heads} of "
            f"{ours.total_num_kv_heads} KV heads each, which are no equal parts"
            for ours, theirs in pairs
            if not (self._has_even(ours) and other._has_even(theirs))
        ]

    def _has_even(self, shape: BlockShape) -> bool:
        return 0 <= self.tp_rank < self.tp_size and shape.is_even(self.tp_size)


@functools.lru_cache(1024)
def _differences(ours: KvLayout, theirs: KvLayout) -> tuple[str, ...]:
    """A router asks for each pair of workers of each request, and few layouts are different."""
    return tuple(ours._differences(theirs))


def _differing(ours: msgspec.Struct, theirs: msgspec.Struct, allowed: tuple[str, ...]) -> list[str]:
    return [
        f"{name}: {getattr(ours, name)} != {getattr(theirs, name)}"
        for name in ours.__struct_fields__
        if name not in allowed and getattr(ours, name) != getattr(theirs, name)
    ]
