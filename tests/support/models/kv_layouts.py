"""KV layouts for tests: one rank, float32."""

from __future__ import annotations

from pdserve.common.kv_layout import KvLayout


def make_layout(
    *,
    num_layers: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 1,
    block_size: int = 4,
    model_fingerprint: str = "f" * 32,
) -> KvLayout:
    """Layout of a rank that holds all heads."""
    return KvLayout(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        total_num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype="float32",
        model_fingerprint=model_fingerprint,
    )
