"""The contract of every implementation of `LayerOps`. A test class binds it: `class TestMine(LayerOpsContract)` with `make_ops`."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.attention.kv_pages import KvPages
from pdserve.kernels.cpu.linear import PlainLinear
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layers.rms_norm import HeadNorm, RmsNorm
from pdserve.kernels.layers.rotary import rotary_phases

TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 4e-2, torch.float16: 4e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
EPS = 1e-5
BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 5, 4, 3


@dataclass
class Slots:
    """A plan that only stores, as torch's back end does."""

    kv_cache: Tensor
    slot_mapping: Tensor

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        pages = KvPages(self.kv_cache)
        rows = torch.cat((k, v), 1).view(-1, pages.head_dim)
        pages.token_rows[layer].index_copy_(0, pages.write_rows(self.slot_mapping), rows)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        distance_bias: Tensor | None = None,
    ) -> Tensor:
        pytest.fail("an operation beside attention has called it")


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[found.dtype]
    torch.testing.assert_close(found.cpu().double(), expected.cpu(), atol=tolerance, rtol=tolerance)


def unit_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


class LayerOpsContract(abc.ABC):
    """Compares with the formulas in float64. What lies between the rows of an input is NaN."""

    device = "cpu"

    @abc.abstractmethod
    def make_ops(self) -> LayerOps:
        """Make the implementation under test."""

    def rows(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Random numbers `[shape]`, whose first dimension has a larger stride than it needs."""
        inner = torch.Size(shape[1:]).numel()
        held = torch.full((shape[0], inner + 24), torch.nan, dtype=dtype)
        held[:, :inner] = torch.randn(shape[0], inner) * scale
        return held.to(self.device)[:, :inner].unflatten(1, shape[1:])

    @pytest.mark.diagonal(2)
    @DTYPES
    @pytest.mark.parametrize("kind", ["plain", "bias", "none"])
    @pytest.mark.parametrize(("num_tokens", "size"), [(0, 8), (1, 7), (5, 123), (2, 1000)])
    def test_add_norm(self, dtype: torch.dtype, kind: str, num_tokens: int, size: int) -> None:
        width = size if kind == "none" else 33
        residual, x = self.rows(num_tokens, size, dtype=dtype), self.rows(num_tokens, width, dtype=dtype)
        weight = (torch.randn(size, 33) / 6).to(self.device, dtype)
        bias = torch.randn(size).to(self.device, dtype) if kind == "bias" else None
        factors = (torch.rand(size) + 0.5).to(self.device, dtype)
        added = x.double()
        if kind != "none":
            added = F.linear(added, weight.double(), None if bias is None else bias.double())
        expected = residual.double() + added
        linear = None if kind == "none" else PlainLinear(weight, bias)
        found, normed = self.make_ops().add_norm(residual, x, linear, RmsNorm(factors, EPS))
        close(found, expected)
        # of the rounded stream, so that a later layer normalises what it adds to
        close(normed, unit_norm(found.double()) * factors.double())

    @pytest.mark.diagonal(2)
    @DTYPES
    @pytest.mark.parametrize("has_norm", [False, True])
    @pytest.mark.parametrize("heads", [(14, 2, 64), (7, 1, 80), (3, 3, 96), (5, 1, 6), (1, 1, 256)], ids=str)
    @pytest.mark.parametrize("num_tokens", [0, 1, 7])
    def test_rotate_and_store(
        self, dtype: torch.dtype, has_norm: bool, heads: tuple[int, int, int], num_tokens: int
    ) -> None:
        num_heads, num_kv_heads, size = heads
        spec = AttentionSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=size, scale=1.0)
        qkv = self.rows(num_tokens, num_heads + 2 * num_kv_heads, size, dtype=dtype)
        weights = (torch.rand(num_heads + num_kv_heads, size) + 0.5).to(self.device, dtype)
        qk_norm = HeadNorm(weights, EPS) if has_norm else None
        positions = torch.randint(0, 1000, (num_tokens,))
        phases = rotary_phases(positions, 10000.0 ** -(torch.arange(0, size, 2) / size), torch.tensor(1.25))
        cache = torch.full((NUM_BLOCKS, num_kv_heads, NUM_LAYERS, 2, BLOCK_SIZE, size), torch.nan, dtype=dtype)
        slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens]
        layer = NUM_LAYERS - 1

        v = qkv[:, num_heads + num_kv_heads :].clone()
        expected = qkv[:, : num_heads + num_kv_heads].cpu().double()
        if has_norm:
            expected = unit_norm(expected) * weights.cpu().double()
        turned = torch.view_as_complex(expected.unflatten(-1, (size // 2, 2))) * phases
        expected = torch.view_as_real(turned).flatten(-2)

        there = Slots(cache.clone().to(self.device), slots.to(self.device))
        found = self.make_ops().rotate_and_store(qkv, spec, qk_norm, phases.to(self.device), there, layer)
        close(torch.cat(found[:2], 1), expected)
        assert torch.equal(found[2], v)
        assert [part.data_ptr() for part in found] == [
            part.data_ptr() for part in qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
        ]
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, BLOCK_SIZE)
            cache[block, :, layer, 0, offset], cache[block, :, layer, 1, offset] = (
                found[i][token].cpu() for i in (1, 2)
            )
        torch.testing.assert_close(there.kv_cache.cpu(), cache, atol=0, rtol=0, equal_nan=True)

    @pytest.mark.diagonal(2)
    @DTYPES
    @pytest.mark.parametrize(("num_tokens", "size"), [(0, 4), (1, 1), (3, 64), (5, 123), (2, 200)])
    def test_swiglu(self, dtype: torch.dtype, num_tokens: int, size: int) -> None:
        gate_up = self.rows(num_tokens, 2 * size, dtype=dtype, scale=3.0)
        gate, up = gate_up.double().chunk(2, -1)
        close(self.make_ops().swiglu(gate_up), F.silu(gate) * up)

    @pytest.mark.parametrize(
        ("dtype", "shape"),
        [(torch.float32, (3, 2, 5)), (torch.bfloat16, (1, 3)), (torch.bfloat16, (2, 80)), (torch.uint8, (3,))],
        ids=str,
    )
    def test_blocks_are_moved_whole(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """All are read before any is written, within a pool; and from a ring into a pool."""
        pool = torch.randint(0, 200, (7, *shape)).to(self.device, dtype)
        before, ops = pool.clone(), self.make_ops()
        pairs = [(1, 4), (1, 0), (4, 6), (5, 1)]
        ops.move_blocks(pool, pool, pairs)
        for source, target in (*pairs, (2, 2), (3, 3), (5, 5)):
            assert torch.equal(pool[target], before[source])
        ring = torch.randint(0, 200, (3, *shape)).to(self.device, dtype)
        ops.move_blocks(ring, pool, [(2, 0), (0, 5)])
        assert torch.equal(pool[0], ring[2])
        assert torch.equal(pool[5], ring[0])
        ops.move_blocks(pool, pool, [])

    def test_pairs_that_do_not_fit_are_refused(self) -> None:
        pool, ops = torch.zeros(4, 2, device=self.device), self.make_ops()
        with pytest.raises(ValueError, match="copied to twice"):
            ops.move_blocks(pool, pool, [(0, 1), (2, 1)])
        for pair in ((0, 4), (4, 0), (-1, 0), (0, -1)):
            with pytest.raises(ValueError, match="of a pool of 4"):
                ops.move_blocks(pool, pool, [pair])
        for other in (torch.zeros(4, 3), torch.zeros(4, 2, dtype=torch.float64)):
            with pytest.raises(ValueError, match="do not fit"):
                ops.move_blocks(other.to(self.device), pool, [(0, 1)])
        with pytest.raises(ValueError, match="contiguous"):
            ops.move_blocks(torch.zeros(2, 4, device=self.device).t(), pool, [(0, 1)])

    @pytest.mark.parametrize("size", [248, 256, 1016, 1024, 1032, 1088, 2056, 3072, 4160, 16384])
    def test_digests_are_those_of_a_processor(self, size: int) -> None:
        pool = torch.randint(0, 256, (5, size // 8, 8), dtype=torch.uint8)
        found = self.make_ops().digests(pool.to(self.device), [3, 0, 4, 3])
        assert found.dtype is torch.int64
        expected = [xxhash.xxh3_64_intdigest(pool[block].numpy().tobytes()) for block in (3, 0, 4, 3)]
        assert [number % 2**64 for number in found.tolist()] == expected

    def test_digests_of_no_block_and_of_none_that_is_there(self) -> None:
        pool, ops = torch.zeros(3, 256, dtype=torch.uint8, device=self.device), self.make_ops()
        assert ops.digests(pool, []).tolist() == []
        for block in (-1, 3):
            with pytest.raises(ValueError, match="of a pool of 3"):
                ops.digests(pool, [block])
        for size in (240, 252):
            with pytest.raises(ValueError, match=f"not {size}"):
                ops.digests(torch.zeros(3, size, dtype=torch.uint8, device=self.device), [0])
