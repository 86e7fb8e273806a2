"""Layer operations in torch."""

from __future__ import annotations

from pdserve.kernels.torch_layer_ops import TorchLayerOps
from tests.kernels.layer_ops_contract import LayerOpsContract


class TestTorchLayerOps(LayerOpsContract):
    def make_ops(self) -> TorchLayerOps:
        return TorchLayerOps()
