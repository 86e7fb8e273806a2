"""States in Triton kernels: the contract, and the choice."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch
from torch import Tensor

from pdserve.kernels.attention.make_attention import AttentionBackendError
from pdserve.kernels.state.make_states import make_states
from pdserve.kernels.triton.launch_configs import TABLE
from pdserve.kernels.triton.triton_states import TritonStateBackend
from tests.kernels import test_tentative_states as tentative
from tests.kernels.state_contract import BLOCK_SIZE, STRONG, StateContract

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class TestTritonStates(StateContract):
    device = DEVICE.type

    def make_backend(self, kv_cache: Tensor) -> TritonStateBackend:
        return TritonStateBackend(kv_cache, BLOCK_SIZE)


class GpuTiles(StateContract):
    """With tiles as a GPU has them, for which the interpreter's own table has smaller ones."""

    device = DEVICE.type

    def make_backend(self, kv_cache: Tensor) -> TritonStateBackend:
        return TritonStateBackend(kv_cache, BLOCK_SIZE, TABLE["sm_90"])


@pytest.mark.parametrize("strength", [1.0, STRONG], ids=["decays", "strong decays"])
def test_a_chunk_in_tiles_of_a_gpu(strength: float) -> None:
    lens = [(1, 3), (37, 41), (2, 18)]
    GpuTiles().test_convolve(lens, torch.bfloat16, 4, 33, 4, [0, 0, 1, 1], has_bias=True, has_silu=True)
    for by_row in (False, True):
        GpuTiles().test_delta_rule(lens, 2, 1, (33, 35), by_row, strength)
    GpuTiles().test_selective_scan(lens, 2, 1, (35, 33), False, strength)


@pytest.mark.parametrize("seed", range(3))
def test_states_are_those_of_the_tokens_that_stand(seed: int) -> None:
    with DEVICE:
        tentative.test_states_are_those_of_the_tokens_that_stand(seed, "triton")


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    pool = torch.zeros(2, 1, 1, 1, 1, 8, device=DEVICE)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    for name in ("triton", "sdpa"):
        assert type(make_states(name, pool, BLOCK_SIZE)) is TritonStateBackend
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    if DEVICE.type == "cpu":
        with pytest.raises(AttentionBackendError, match="attention_backend is 'triton', which needs a GPU"):
            make_states("triton", pool, BLOCK_SIZE)
