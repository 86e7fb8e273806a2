"""Machine code of the attention kernels, for GPUs that are not there: it fits, keeps its sums in registers, and loads 16 bytes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch

from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.triton.attention.attention_configs import attention_configs
from pdserve.kernels.triton.attention.decode_attention import decode_attention
from pdserve.kernels.triton.attention.prefill_attention import add_context, prefill_attention
from pdserve.kernels.triton.attention.store_kv import store_kv
from pdserve.kernels.triton.launch_configs import TABLE
from tests.support.kernels.compiled_kernels import SHARED_BYTES, TARGETS, Launch, compile_launch, recorded_launches

JOINING = "attend_tiles after the chunk"
KERNELS = ("attend_pieces", "join_pieces", "attend_tiles", JOINING, "store_heads")
BF16 = torch.bfloat16
CASES: dict[str, tuple[tuple[int, int, int], torch.dtype, int, dict[str, Any]]] = {
    "8b": ((32, 8, 128), BF16, 16, {}),
    "8b in blocks of 64": ((32, 8, 128), BF16, 64, {}),
    "8b with a window": ((32, 8, 128), BF16, 16, {"window": 4096}),
    "half a billion": ((14, 2, 64), BF16, 16, {}),
    "8b with chunks": ((40, 8, 128), BF16, 16, {"chunk": 8192}),
    "heads of 512": ((16, 2, 512), BF16, 16, {}),
    "wide heads, capped": ((16, 8, 256), BF16, 16, {"window": 4096, "softcap": 50.0}),
    "heads of 80": ((10, 2, 80), torch.float16, 32, {}),
    "one KV head": ((71, 1, 64), BF16, 16, {}),
    "float32": ((32, 8, 128), torch.float32, 16, {}),
    "20b with sinks": ((64, 8, 64), BF16, 16, {"window": 128, "sinks": True}),
    "an encoder": ((12, 12, 64), torch.float16, 16, {"causal": False}),
    "a distance bias": ((12, 12, 64), BF16, 16, {"distance_bias": True}),
    "latent rows": ((128, 1, 576), BF16, 16, {"value_dim": 512}),
    "latent rows, few heads": ((16, 1, 576), BF16, 64, {"value_dim": 512}),
}
"""(Hq, Hkv, D), dtype, bs, and options of the spec."""
FAST = {
    ("sm_90", "8b", "attend_pieces"),
    ("sm_90", "8b", "attend_tiles"),
    ("sm_90", "8b", "join_pieces"),
    ("sm_90", "latent rows", "attend_pieces"),
}
"""The part of `make test`."""
SELECTED = {
    "sm_80": ("half a billion", "one KV head", "8b", "half a billion", "8b in blocks of 64"),
    "sm_90": ("8b", "8b", "8b", "8b with a window", "wide heads, capped"),
    "sm_100": ("8b in blocks of 64", "float32", "wide heads, capped", "8b", "half a billion"),
    "sm_120": ("wide heads, capped", "half a billion", "8b", "one KV head", "float32"),
    "gfx942": ("heads of 80", "8b", "an encoder", "8b", "one KV head"),
}
"""The part of `make compiled`: a case for each of `KERNELS`; products only in half precision, whose operation is asserted."""
FLOAT32 = {("sm_90", "float32", "attend_pieces"), ("sm_90", "float32", "attend_tiles")}
"""Also of `make compiled`: sums of as many registers as there are."""
SINKS = {(architecture, "20b with sinks", "attend_tiles") for architecture in ("sm_90", "sm_100")} | {
    ("sm_90", "20b with sinks", "join_pieces")
}
"""Likewise: the kernels that compute sinks; on sm_100 windows over heads of 64 are the first to spill."""
BIASES = {
    (architecture, "a distance bias", name)
    for architecture in ("sm_90", "gfx942")
    for name in ("attend_pieces", "attend_tiles")
}
"""Likewise: the kernels that add it."""
LATENT = {
    *(("sm_90", "latent rows", name) for name in ("attend_pieces", "attend_tiles", "join_pieces", "store_heads")),
    *((architecture, "latent rows", "attend_pieces") for architecture in ("sm_80", "gfx942")),
    *((architecture, "latent rows", "attend_tiles") for architecture in ("sm_100", "sm_120", "gfx942")),
    ("sm_90", "latent rows, few heads", "attend_pieces"),
}
"""Likewise: sums of 512 numbers per row."""
WIDER = {("sm_90", "heads of 512", name) for name in ("attend_pieces", "attend_tiles")} | {
    ("gfx942", "heads of 512", "attend_tiles")
}
"""Likewise: heads with a table of their own."""
CHUNKED = {("sm_90", "8b with chunks", name) for name in ("attend_pieces", "attend_tiles")}
"""Likewise: keys that begin at a chunk."""
COMPILED = (
    FLOAT32
    | WIDER
    | CHUNKED
    | SINKS
    | BIASES
    | LATENT
    | {
        (architecture, case, name)
        for architecture, cases in SELECTED.items()
        for case, name in zip(cases, KERNELS, strict=True)
    }
)


def launch_of(name: str, architecture: str, case: str) -> Launch:
    (num_heads, num_kv_heads, head_dim), dtype, block_size, options = CASES[case]
    is_latent = "value_dim" in options
    configs = attention_configs(architecture, head_dim, latent=is_latent)
    spec = AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5, **options
    )

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    # above 2^31 numbers
    kv_cache = made(1 << 16, num_kv_heads, 32, 1 if is_latent else 2, block_size, head_dim, dtype=dtype)
    qkv = made(64, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    q, k, v = qkv.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 1)
    out, part, lse = (
        made(64, num_heads, spec.output_dim, dtype=dtype),
        made(1, dtype=torch.float32),
        made(1, dtype=torch.float32),
    )
    sinks = made(num_heads, dtype=dtype) if spec.sinks else None
    bias, seq_lens = (made(num_heads, 129, dtype=dtype), made(64)) if spec.distance_bias else (None, None)
    with recorded_launches() as launches:
        decode_attention(
            q, kv_cache, 3, made(64, 1024), made(4096), made(1), made(65), part, lse, spec, out, configs, sinks, bias, seq_lens
        )  # fmt: skip
        prefill_attention(q, kv_cache, 3, made(64, 1024), made(16, 5), spec, out, configs, sinks, bias)
        if not is_latent:
            # as the fused kernels of CUDA lay it out
            lse = made(num_heads, 64, dtype=torch.float32).t()
            add_context(q, kv_cache, 3, made(64, 1024), made(16, 5), spec, out, lse, configs)
        store_kv(k, v, kv_cache, 3, made(64, dtype=torch.int64))
    [launch] = [launch for launch in launches if name_of(launch) == name]
    return launch


def name_of(launch: Launch) -> str:
    """One of `KERNELS`."""
    return JOINING if launch.arguments.get("JOIN") else str(launch.kernel.__name__)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("architecture", "case", "name"),
    [
        pytest.param(*key, marks=[*[pytest.mark.compiled] * (key in COMPILED), *[pytest.mark.slow] * (key not in FAST)])
        for key in product(TARGETS, CASES, KERNELS)
        # no fused kernel of torch reads latent rows
        if not (key[1].startswith("latent rows") and key[2] == JOINING)
    ],
)
def test_the_code_of_a_kernel(architecture: str, case: str, name: str) -> None:
    code = compile_launch(launch_of(name, architecture, case), architecture)
    assert not code.spilled, code
    assert code.shared_bytes <= SHARED_BYTES[architecture]
    if name == "store_heads":  # a few numbers per thread
        return
    assert code.has(r"LDG\.E.*128|LDGSTS.*128|UTMALDG|(global|buffer)_load_dwordx4"), code
    if name != "join_pieces" and CASES[case][1] is not torch.float32:
        # decode of few heads has too few rows for it
        # for heads of 512 no tile of 64 rows, which HGMMA takes, has its sums in registers
        is_wide = (name.startswith("attend_tiles") and case != "heads of 512") or case == "latent rows"
        products = r"HGMMA" if (architecture, is_wide) == ("sm_90", True) else r"H?G?MMA|HMMA|UTCHMMA|v_mfma"
        assert code.has(products), code


def test_the_selection_has_every_kernel_of_every_architecture_and_every_case() -> None:
    # the tables of sm_86 are those of sm_120 but for one number, and so is its shared memory
    selected = {(architecture, name) for architecture in set(TARGETS) - {"sm_86"} for name in KERNELS}
    assert {(architecture, name) for architecture, _, name in COMPILED} == selected
    assert {case for _, case, _ in COMPILED} == set(CASES)
    assert FAST <= COMPILED


def test_every_architecture_has_tables_and_limits() -> None:
    assert set(TABLE) - {"interpreter"} == set(TARGETS) == set(SHARED_BYTES)
    for architecture in TABLE:
        assert (
            attention_configs(architecture, 128).decode_programs == attention_configs(architecture, 256).decode_programs
        )
