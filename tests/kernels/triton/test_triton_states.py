"""States in Triton kernels: the contract, and the choice."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch
from torch import Tensor

from pdserve.kernels.attention.make_attention import AttentionBackendError
from pdserve.kernels.state.make_states import make_states
from pdserve.kernels.triton.triton_states import TritonStateBackend
from tests.kernels.state_contract import BLOCK_SIZE, StateContract

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class TestTritonStates(StateContract):
    device = DEVICE.type

    def make_backend(self, kv_cache: Tensor) -> TritonStateBackend:
        return TritonStateBackend(kv_cache, BLOCK_SIZE)


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
