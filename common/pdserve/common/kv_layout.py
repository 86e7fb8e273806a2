"""`KvLayout`: the shape and format of a KV block, which must be equal at both workers of a transfer."""

from __future__ import annotations

import msgspec

from pdserve.common.errors import LayoutMismatch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Dims of `kv_cache[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`; a block is one run of bytes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens in a block."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    model_fingerprint: str
    """32 hex digits: a hash of everything that determines the content of a KV block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values. Raises: LayoutMismatch for a dtype that is not known."""
        item_bytes = DTYPE_BYTES.get(self.dtype)
        if item_bytes is None:
            raise LayoutMismatch(f"the KV layout's dtype is {self.dtype[:64]!r}, {', '.join(DTYPE_BYTES)} are known")
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * item_bytes

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`[L, 2, Hkv, block_size, D]`."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    def differences(self, other: KvLayout) -> list[str]:
        """One line per field that differs, `name: ours != theirs`; empty if the layouts are equal."""
        return [
            f"{name}: {getattr(self, name)} != {getattr(other, name)}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]
