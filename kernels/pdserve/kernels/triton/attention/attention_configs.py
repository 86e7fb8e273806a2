"""Tile sizes of attention by GPU architecture. Those of sm_90 were measured on an H200 (docs/gpu.md), no other; all compile without
spills."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from pdserve.kernels.triton.launch_configs import INTERPRETER

Prefill = Literal["triton", "sdpa"]
"""`triton`: one launch for all chunks; `sdpa`: full chunks attend to themselves in torch's fused attention, and to earlier keys in
our kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfigs:
    """One architecture's table, for heads of one width or for latent rows. Sizes are powers of two; `head_tile` says where others
    are used."""

    decode_programs: int
    """Programs that divide the pieces of a decode step among them: two per multiprocessor."""
    decode_keys: int = 64
    """Keys of a decode tile."""
    decode_warps: int = 4
    decode_stages: int = 3
    join_warps: int = 4
    prefill_rows: int = 64
    """Rows of a prefill tile: tokens times the query heads of a KV head."""
    prefill_keys: int = 64
    """Keys of a prefill tile."""
    prefill_warps: int = 8
    prefill_stages: int = 2
    prefill: Prefill = "triton"
    """The meaning of `attention_backend` `auto`."""
    full_chunk: int = 256
    """A chunk is full if its number of tokens is a multiple of this: cuDNN makes a plan per number of tokens, which takes time."""
    latent_heads: int = 16
    """Query heads of a decode tile over latent rows, where a KV head has more than 16."""
    max_registers: int | None = 255
    """See `register_limit`; for decode, and for prefill in float32."""
    prefill_registers: int | None = None
    """The same limit for prefill in half precision. It is set where a multiprocessor has shared memory for only one program over
    heads of 128, so that fewer registers per thread would admit no second one; on sm_100 also because windows over heads of 64
    would spill."""
    fused: tuple[str, ...] = ("flash",)
    """Kernels of `fused_attention`, the preferred one first."""


_WIDE = 128
"""Heads with more numbers need smaller tiles, or a program's sums would not fit its registers."""
_AMPERE = AttentionConfigs(decode_programs=2 * 108)
_BLACKWELL = replace(
    _AMPERE,
    decode_programs=2 * 148,
    prefill_rows=128,
    prefill_stages=3,
    prefill_registers=255,
    fused=("cudnn", "flash"),
)
_HOPPER = replace(
    _AMPERE, decode_programs=2 * 132, decode_keys=128, prefill_rows=128, prefill_keys=128, prefill_stages=3, prefill="sdpa",
    full_chunk=2048, fused=("cudnn", "flash"),
)  # fmt: skip
_TABLE = {
    "sm_80": _AMPERE,
    "sm_86": replace(_AMPERE, decode_programs=2 * 142, prefill_registers=255),
    "sm_90": _HOPPER,
    "sm_100": _BLACKWELL,
    "sm_120": replace(_AMPERE, decode_programs=2 * 170, prefill_registers=255),
    "gfx942": replace(_AMPERE, decode_programs=2 * 304, decode_stages=2, prefill_keys=32, max_registers=None),
    # a few programs, and tiles so small that short tests have several
    INTERPRETER: AttentionConfigs(decode_programs=3, full_chunk=3, max_registers=None),
}
_SMALL: dict[str, Any] = {
    "decode_keys": 32,
    "decode_stages": 2,
    "prefill_rows": 32,
    "prefill_keys": 32,
    "prefill_warps": 4,
}
_WIDE_TABLE = {name: replace(configs, **_SMALL) for name, configs in _TABLE.items()} | {
    "sm_90": replace(_HOPPER, decode_keys=32, prefill_rows=64, prefill_keys=32),
}


_WIDER = 256
"""Heads with more numbers need smaller tiles still."""
_SMALLER: dict[str, Any] = {
    "decode_keys": 16,
    "decode_warps": 8,
    "decode_stages": 2,
    "prefill_rows": 16,
    "prefill_keys": 32,
    "prefill_warps": 8,
    "prefill_stages": 2,
    "prefill": "triton",
    "prefill_registers": 255,
}
_WIDER_TABLE = {name: replace(configs, **_SMALLER) for name, configs in _TABLE.items()} | {
    "gfx942": replace(
        _TABLE["gfx942"], **_SMALLER | {"prefill_keys": 16, "prefill_warps": 4, "prefill_registers": None}
    ),
}

_ROWS: dict[str, Any] = {
    "decode_keys": 64,
    "decode_warps": 8,
    "decode_stages": 2,
    "prefill_rows": 16,
    "prefill_keys": 64,
    "prefill_stages": 2,
    "prefill": "triton",
    "prefill_registers": 255,
}
"""For rows of 512 and 64 numbers. Instructions of older architectures take queries from registers, each warp all numbers of 16."""
_NARROW: dict[str, Any] = {"decode_keys": 32, "prefill_keys": 32, "prefill_registers": None}
_LATENT_TABLE = {name: replace(configs, **_ROWS) for name, configs in _TABLE.items()} | {
    "sm_90": replace(
        _HOPPER,
        **_ROWS | {"latent_heads": 64, "decode_stages": 3, "prefill_rows": 64, "prefill_keys": 32, "prefill_stages": 3},
    ),
    "sm_100": replace(_BLACKWELL, **_ROWS | {"prefill_rows": 64, "prefill_keys": 32}),
    "gfx942": replace(_TABLE["gfx942"], **_ROWS | _NARROW | {"decode_warps": 4, "prefill_warps": 4}),
    INTERPRETER: replace(_TABLE[INTERPRETER], **_ROWS | _NARROW),
}


def attention_configs(architecture: str, head_dim: int, *, latent: bool = False) -> AttentionConfigs:
    """architecture: of `launch_configs.architecture`; latent: for a cache with latent rows."""
    if latent:
        return _LATENT_TABLE[architecture]
    if head_dim > _WIDER:
        return _WIDER_TABLE[architecture]
    return (_WIDE_TABLE if head_dim > _WIDE else _TABLE)[architecture]
