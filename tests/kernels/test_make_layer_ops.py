"""Choosing the implementation of layer operations: by device and by name."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import KERNELS, PrefillSettings
from pdserve.engine.config import EngineConfig
from pdserve.kernels import make_layer_ops as module
from pdserve.kernels.make_layer_ops import LayerOpsError, make_layer_ops
from pdserve.kernels.torch_layer_ops import TorchLayerOps
from tests.support.engine_harness import Harness, harnesses, make_engine  # noqa: F401

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
SERVE = """
import sys
from pdserve.llm import LLM, SamplingParams
LLM("demo", num_blocks=8).generate(["a"], SamplingParams(max_tokens=2, temperature=1.0), use_tqdm=False)
sys.exit("triton" in sys.modules)
"""


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_processor_computes_in_torch(name: str) -> None:
    assert isinstance(make_layer_ops(name, CPU), TorchLayerOps)


def test_auto_takes_torch_on_a_gpu_where_triton_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, ModuleSpec | None] = {"triton": None}
    monkeypatch.setattr(module, "find_spec", found.get)
    assert isinstance(make_layer_ops("auto", torch.device("cuda")), TorchLayerOps)
    with pytest.raises(LayerOpsError, match="kernels is 'triton', but the package triton is not installed"):
        make_layer_ops("triton", torch.device("cuda"))


def test_other_names_and_devices_are_refused() -> None:
    with pytest.raises(LayerOpsError, match="kernels is 'cuda'; there are auto, torch, triton"):
        make_layer_ops("cuda", CPU)
    with pytest.raises(LayerOpsError, match="kernels is 'triton', which needs a GPU; the device is 'cpu'"):
        make_layer_ops("triton", CPU)


def test_the_setting_is_checked_by_name(make_engine: Any) -> None:  # noqa: F811
    assert KERNELS == module.NAMES
    for name in KERNELS:
        PrefillSettings(kernels=name).verify()
    with pytest.raises(ConfigError, match="kernels is 'cuda', one of auto, torch, triton is needed"):
        PrefillSettings(kernels="cuda").verify()
    assert EngineConfig().kernels == "auto"
    with pytest.raises(ConfigError, match="kernels is 'triton', which needs a GPU"):
        make_engine(kernels="triton")


def test_serving_on_a_processor_imports_no_triton() -> None:
    """Which takes 0.3 s and 30 MB."""
    subprocess.run([sys.executable, "-c", SERVE], cwd=ROOT, check=True, timeout=100)
