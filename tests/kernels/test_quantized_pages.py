"""`QuantizedPages`: the bytes of a block, what attention sees of them, and how far that is from keys that are not rounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.common.kv_layout import BlockShape
from pdserve.kernels.attention.make_attention import AttentionBackendError, make_attention
from pdserve.kernels.attention.quantized_pages import QuantizedPages, num_layers_of
from pdserve.kernels.attention.torch_attention import TorchAttentionBackend
from pdserve.models.kv_cache import make_kv_cache
from tests.support.kernels.attention_cases import Case, dense_attention, make_case, make_spec

HEADS = (4, 2, 16)
STORED = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


def shape_of(dtype: str, *, num_layers: int = 3, heads: int = 2, head_dim: int = 16, block_size: int = 5) -> BlockShape:
    return BlockShape(
        num_layers=num_layers,
        num_kv_heads=heads,
        total_num_kv_heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )


def rounded(x: Tensor, dtype: str) -> Tensor:
    """The formula by itself, for `[..., D]`: `stored * scale` in float32."""
    largest = {"int8": 127.0, "float8_e4m3fn": 448.0}[dtype]
    scale = x.float().abs().amax(-1, keepdim=True) / largest
    numbers = x.float() / scale
    return (numbers.round() if dtype == "int8" else numbers.to(torch.float8_e4m3fn).float()) * scale


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize(("num_layers", "head_dim"), [(3, 16), (1, 4), (24, 64), (9, 8)])
def test_scales_end_each_heads_run(dtype: str, num_layers: int, head_dim: int) -> None:
    """The bytes of a block, read without the code under test."""
    heads, block_size, layer = 3, 5, num_layers - 1
    shape = shape_of(dtype, num_layers=num_layers, heads=heads, head_dim=head_dim, block_size=block_size)
    cache = make_kv_cache(shape, 4)
    assert cache[0].numel() == shape.block_bytes == heads * shape.head_bytes
    pages = QuantizedPages(cache, torch.float32)
    assert pages.num_layers == num_layers
    k, v = torch.randn(2, 7, heads, head_dim)
    given = torch.stack((k, v))
    slots = torch.tensor([3, 5, 6, 9, 17, 18, 19])
    pages.store(layer, pages.write_rows(slots), k, v)
    expected = rounded(given, dtype)
    torch.testing.assert_close(torch.stack((k, v)), expected, rtol=0, atol=0)
    blocks: NDArray[np.uint8] = cache.view(torch.uint8).numpy().reshape(4, heads, shape.head_bytes)
    num_numbers = num_layers * 2 * block_size * head_dim
    numbers = torch.from_numpy(blocks[:, :, :num_numbers].copy()).view(STORED[dtype]).float()
    numbers = numbers.view(4, heads, num_layers, 2, block_size, head_dim)
    ends = num_numbers + num_layers * 2 * block_size * 4
    scales = torch.from_numpy(blocks[:, :, num_numbers:ends].copy()).view(torch.float32)
    scales = scales.view(4, heads, num_layers, 2, block_size)
    held = numbers * scales.unsqueeze(-1)
    for place, slot in enumerate(slots.tolist()):
        found = held[slot // block_size, :, layer, :, slot % block_size]
        torch.testing.assert_close(found, expected[:, place].transpose(0, 1), rtol=0, atol=0)
    assert int((scales != 0).sum()) == 7 * heads * 2, "a scale beyond these tokens' was written"
    assert not blocks[:, :, ends:].any()


def quantized(case: Case, dtype: str) -> tuple[Case, Case]:
    """(the case over a quantised cache whose other bytes are poison, the same with rounded keys and values)."""
    num_blocks, heads, num_layers, _, block_size, head_dim = case.kv_cache.shape
    shape = shape_of(dtype, num_layers=num_layers, heads=heads, head_dim=head_dim, block_size=block_size)
    cache = make_kv_cache(shape, num_blocks)
    cache.view(torch.uint8).fill_(0xFF)  # scales that are NaN
    pages = QuantizedPages(cache, case.q.dtype)
    known = case.kv_cache[:, 0, case.layer, 0].isfinite().all(-1).flatten().nonzero().flatten()
    blocks, offsets = known // block_size, known % block_size
    k, v = case.kv_cache[blocks, :, case.layer, :, offsets].unbind(2)
    pages.store(case.layer, pages.write_rows(known), k.contiguous(), v.contiguous())
    keys, values = (
        [rounded(each, dtype).to(case.q.dtype).double() for each in kept] for kept in (case.keys, case.values)
    )
    return replace(case, kv_cache=cache), replace(case, keys=keys, values=values)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("block_size", [1, 16])
def test_attention_sees_the_rounded_keys_and_is_near_the_exact_ones(
    dtype: str, window: int | None, block_size: int
) -> None:
    case = make_case(
        decodes=[1, 37, 16, 5],
        prefills=[(0, 1), (0, 21), (17, 30), (16, 3)],
        heads=HEADS,
        block_size=block_size,
        dtype=torch.float32,
    )
    spec = make_spec(HEADS, window=window)
    exact = dense_attention(case, spec)
    stored, reference = quantized(case, dtype)
    plan = TorchAttentionBackend(stored.kv_cache, torch.float32).plan(stored.batch, spec)
    k, v = stored.k.clone(), stored.v.clone()
    plan.store(stored.layer, k, v)
    out = plan.attend(stored.layer, stored.q, k, v).double()
    torch.testing.assert_close(out, dense_attention(reference, spec).view_as(out), rtol=0, atol=1e-5)
    # keys of up to 4: a step of int8 is 1/127 of the largest, one of float8 up to 1/16 of the number itself
    largest = float((out - exact.view_as(out)).abs().max())
    assert largest < {"int8": 0.03, "float8_e4m3fn": 0.2}[dtype]
    assert largest > 1e-4, "nothing was rounded"


@pytest.mark.parametrize("dtype", STORED)
def test_zeros_and_values_that_are_not_finite(dtype: str) -> None:
    cache = make_kv_cache(shape_of(dtype), 2)
    pages = QuantizedPages(cache, torch.float32)
    k, v = torch.zeros(2, 3, 2, 16)
    k[1, 0, 3], k[2, 1, 5] = torch.nan, torch.inf
    pages.store(0, pages.write_rows(torch.tensor([0, 1, 2])), k, v)
    assert (k[0] == 0).all()
    assert (v == 0).all()
    assert k[1, 0].isnan().any(), "the request must fail, not be served"
    assert not k[2, 1].isfinite().all()
    assert (k[1, 1] == 0).all()
    assert (k[2, 0] == 0).all()


def test_layers_are_those_of_the_layout() -> None:
    for head_dim in (4, 8, 64, 80, 128, 256):
        for num_layers in range(1, 130):
            shape = shape_of("int8", num_layers=num_layers, head_dim=head_dim)
            assert num_layers_of(shape.dims[1], head_dim) == num_layers


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(2, 2, 7, 4, 6, dtype=torch.int8), "D a multiple of 4"),
        (lambda: torch.zeros(2, 2, 7, 4, dtype=torch.int8), "must be contiguous"),
        (lambda: torch.zeros(2, 2, 1, 4, 8, dtype=torch.int8), "holds no layers"),
        (lambda: torch.zeros(2, 2, 3, 4, 8, dtype=torch.int8, device="meta"), "a CPU"),
    ],
)
def test_other_shapes_are_refused(make: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(AttentionBackendError, match=message):
        make_attention("auto", make(), torch.float32)


@pytest.mark.parametrize("name", ["triton", "sdpa", "mine"])
def test_other_back_ends_are_refused_by_name(name: str) -> None:
    with pytest.raises(AttentionBackendError, match=f"attention_backend is '{name}', only torch reads"):
        make_attention(name, make_kv_cache(shape_of("int8"), 2), torch.float32)
