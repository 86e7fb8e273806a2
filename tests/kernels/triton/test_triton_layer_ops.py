"""Layer operations in Triton kernels: the contract, and what is their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch

from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.cpu.linear import PlainLinear
from pdserve.kernels.layers.rms_norm import HeadNorm, RmsNorm
from pdserve.kernels.triton.launch_configs import TABLE, architecture, launch_configs
from pdserve.kernels.triton.layer_ops import TritonLayerOps
from tests.kernels.layer_ops_contract import EPS, LayerOpsContract, Slots, close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class TestTritonLayerOps(LayerOpsContract):
    device = DEVICE

    def make_ops(self) -> TritonLayerOps:
        return TritonLayerOps(torch.device(DEVICE))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_a_kernel_that_adds_agrees_with_a_product_that_does(self, dtype: torch.dtype) -> None:
        x, weight, residual = (torch.randn(shape).to(DEVICE, dtype) for shape in ((5, 33), (70, 33), (5, 70)))
        norm = RmsNorm(torch.ones(70, dtype=dtype, device=DEVICE), EPS)
        expected = residual.double() + x.double() @ weight.double().t()
        for add_in_product in (False, True):
            configs = replace(launch_configs(torch.device(DEVICE)), add_in_product=add_in_product)
            ops = TritonLayerOps(torch.device(DEVICE), configs)
            found, normed = ops.add_norm(residual.clone(), x, PlainLinear(weight, None), norm)
            torch.testing.assert_close(
                found.double(), expected, atol=2e-1 if dtype is torch.bfloat16 else 1e-5, rtol=1e-2
            )
            close(normed, norm(found).double())

    def test_a_padded_row_without_a_slot_writes_nothing(self) -> None:
        spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0)
        cache = torch.full((2, 1, 1, 2, 4, 8), torch.nan, device=DEVICE)
        slots = torch.tensor([-1, 6, -1], device=DEVICE)
        qkv = torch.randn(3, 4, 8, device=DEVICE)
        phases = torch.ones(3, 1, 4, dtype=torch.complex64, device=DEVICE)
        _, k, v = self.make_ops().rotate_and_store(qkv, spec, None, phases, Slots(cache, slots), 0)
        assert torch.equal(cache[1, 0, 0, :, 2], torch.stack((k[1, 0], v[1, 0])))
        assert cache.isnan().sum() == cache.numel() - 16

    def test_arguments_that_do_not_fit_are_refused(self) -> None:
        ops, norm = self.make_ops(), RmsNorm(torch.ones(8, device=DEVICE), EPS)
        with pytest.raises(ValueError, match="residual"):
            ops.add_norm(torch.zeros(2, 8, device=DEVICE), torch.zeros(3, 8, device=DEVICE), None, norm)
        with pytest.raises(ValueError, match="gate_up"):
            ops.swiglu(torch.zeros(2, 7, device=DEVICE))
        spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0)
        good: dict[str, Any] = {
            "qkv": torch.zeros(3, 4, 8, device=DEVICE),
            "phases": torch.ones(3, 1, 4, dtype=torch.complex64, device=DEVICE),
            "cache": torch.zeros(2, 1, 1, 2, 4, 8, device=DEVICE),
            "slots": torch.arange(3, device=DEVICE),
            "qk_norm": None,
        }
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"qkv": torch.zeros(3, 5, 8, device=DEVICE)}, "qkv"),
            ({"qkv": torch.zeros(3, 8, 4, device=DEVICE).transpose(1, 2)}, "qkv"),
            ({"phases": good["phases"][:2]}, "phases"),
            ({"slots": good["slots"][:2]}, "slots"),
            ({"cache": torch.zeros(2, 2, 1, 2, 4, 8, device=DEVICE)}, "kv_cache"),
            ({"qk_norm": HeadNorm(torch.ones(2, 8, device=DEVICE), EPS)}, "weights of the norm"),
        ]
        for changed, message in wrong:
            given = good | changed
            with pytest.raises(ValueError, match=message):
                ops.rotate_and_store(
                    given["qkv"], spec, given["qk_norm"], given["phases"], Slots(given["cache"], given["slots"]), 0
                )


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 5), "sm_80"),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_86"),
        ((9, 0), "sm_90"),
        ((10, 3), "sm_100"),
        ((12, 0), "sm_120"),
    ],
)
def test_an_architecture_without_a_table_takes_the_next_older_one(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert architecture(torch.device("cuda", 0)) == name
    assert launch_configs(torch.device("cuda", 0)) is TABLE[name]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert architecture(torch.device("cuda", 0)) == "gfx942"
