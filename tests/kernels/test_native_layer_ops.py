"""Layer operations in C++, at every level that this CPU has."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.cpu.linear import PlainLinear
from pdserve.kernels.layers.rms_norm import HeadNorm, RmsNorm
from pdserve.kernels.layers.rotary import rotary_phases
from pdserve.kernels.native.native_layer_ops import NativeLayerOps
from pdserve.kernels.native.native_library import NATIVE_DTYPES, NativeLibraryError, load_library
from pdserve.kernels.torch_layer_ops import TorchLayerOps
from tests.kernels.layer_ops_contract import EPS, LayerOpsContract
from tests.support.run.torch_threads import num_threads

try:
    LIBRARY = load_library()
except NativeLibraryError as error:
    pytest.skip(str(error), allow_module_level=True)


class TestNativeLayerOps(LayerOpsContract):
    @pytest.fixture(autouse=True, params=LIBRARY.levels)
    def level(self, request: pytest.FixtureRequest) -> None:
        self._level: str = request.param

    def make_ops(self) -> NativeLayerOps:
        return NativeLayerOps(LIBRARY, self._level)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_whatever_is_beside_it(dtype: torch.dtype, threads: int) -> None:
    ops = NativeLayerOps(LIBRARY)
    spec = AttentionSpec(num_heads=30, num_kv_heads=2, head_dim=128, scale=1.0)
    residual, gate_up = torch.randn(50, 1000, dtype=dtype), torch.randn(50, 6000, dtype=dtype)
    qkv = torch.randn(50, 34, 128, dtype=dtype)
    phases = rotary_phases(torch.arange(50), 10000.0 ** -(torch.arange(0, 128, 2) / 128), torch.tensor(1.0))
    norm, linear = RmsNorm(torch.rand(1000), EPS), PlainLinear(torch.zeros(1000, 1000, dtype=dtype), None)
    head_norm = HeadNorm(torch.rand(32, 128), EPS)

    class Nowhere:
        def store(self, *_: object) -> None:
            """Keep nothing."""

    def compute(rows: slice) -> list[torch.Tensor]:
        normed = ops.add_norm(residual[rows].clone(), residual[rows], linear, norm)[1]
        own = qkv[rows].clone()
        ops.rotate_and_store(own, spec, head_norm, phases[rows], Nowhere(), 0)  # type: ignore[arg-type]
        return [normed, ops.swiglu(gate_up[rows].clone()), own]

    with num_threads(threads):
        together = compute(slice(None))
        for row in (0, 17, 49):
            for one, all_rows in zip(compute(slice(row, row + 1)), together, strict=True):
                assert torch.equal(one[0], all_rows[row])


def test_numbers_that_are_not_finite_stay_so() -> None:
    for number in (torch.nan, torch.inf):
        row = torch.ones(1, 64)
        row[0, 5] = number
        ops = NativeLayerOps(LIBRARY)
        assert not ops.swiglu(row.clone()).isfinite().all()
        assert not ops.add_norm(row, torch.zeros(1, 64), None, RmsNorm(torch.ones(64), EPS))[1].isfinite().all()


def test_gates_of_any_size_are_finite() -> None:
    gate_up = torch.tensor([[-1e30, -500.0, -90.0, -80.0, 80.0, 90.0, 500.0, 1e30] + [1.0] * 8])
    found, expected = NativeLayerOps(LIBRARY).swiglu(gate_up), TorchLayerOps().swiglu(gate_up.clone())
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_a_dtype_that_only_torch_reads_is_left_to_it() -> None:
    gate_up = torch.randn(3, 20, dtype=torch.float16)
    assert torch.equal(NativeLayerOps(LIBRARY).swiglu(gate_up.clone()), TorchLayerOps().swiglu(gate_up.clone()))


def test_a_norm_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a norm of 4 numbers over \(2, 5\)"):
        NativeLayerOps(LIBRARY).add_norm(torch.zeros(2, 5), torch.zeros(2, 5), None, RmsNorm(torch.ones(4), EPS))
