"""States in torch operations."""

from __future__ import annotations

from torch import Tensor

from pdserve.kernels.state.state_backend import StateBackend
from tests.kernels.state_contract import BLOCK_SIZE, StateContract


class TestTorchStates(StateContract):
    def make_backend(self, kv_cache: Tensor) -> StateBackend:
        return StateBackend(kv_cache, BLOCK_SIZE)
