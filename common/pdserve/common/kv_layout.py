"""`KvLayout`: the shape and format of a KV block, which must be equal at both workers of a transfer."""

from __future__ import annotations

import msgspec

from pdserve.common.errors import LayoutMismatch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FORMAT = 1
"""Order of a block's bytes, raised with each change: blocks of another format would be read as other keys and values.

    0   [L, 2, Hkv, bs, D]    workers whose messages have no format
    1   [Hkv, L, 2, bs, D]    each head is one run of bytes
"""


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Dims of `kv_cache[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]` on one rank.

    A block is one run of bytes, and so is each range of its heads: heads a to b - 1 are its bytes from `a * head_bytes` to
    `b * head_bytes`.
    """

    format: int = FORMAT
    num_layers: int
    num_kv_heads: int
    """Heads of this rank."""
    total_num_kv_heads: int
    """Heads of all ranks."""
    tp_rank: int = 0
    tp_size: int = 1
    """Ranks that share the heads."""
    head_dim: int
    block_size: int
    """Tokens in a block."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    model_fingerprint: str
    """32 hex digits: a hash of everything that determines the content of a KV block."""

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's run in a block, all layers. Raises: LayoutMismatch for a dtype that is not known."""
        item_bytes = DTYPE_BYTES.get(self.dtype)
        if item_bytes is None:
            raise LayoutMismatch(f"the KV layout's dtype is {self.dtype[:64]!r}, {', '.join(DTYPE_BYTES)} are known")
        return self.num_layers * 2 * self.block_size * self.head_dim * item_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block. Raises: LayoutMismatch for a dtype that is not known."""
        return self.num_kv_heads * self.head_bytes

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`[Hkv, L, 2, bs, D]`."""
        return (self.num_kv_heads, self.num_layers, 2, self.block_size, self.head_dim)

    def differences(self, other: KvLayout) -> list[str]:
        """One line per field that differs, `name: ours != theirs`; empty if the layouts are equal."""
        return [
            f"{name}: {getattr(self, name)} != {getattr(other, name)}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]
