"""Choosing the implementation of layer operations: by device and by name."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve.common.errors import ConfigError
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import PrefillSettings
from pdserve.engine.config import EngineConfig
from pdserve.kernels import make_layer_ops as module
from pdserve.kernels.make_layer_ops import NAMES, LayerOpsError, make_layer_ops
from pdserve.kernels.native.native_layer_ops import NativeLayerOps
from pdserve.kernels.native.native_library import NativeLibraryError
from pdserve.kernels.torch_layer_ops import TorchLayerOps
from tests.support.engine.engine_harness import Harness, harnesses, make_engine  # noqa: F401

CPU = torch.device("cpu")


def test_a_processor_computes_in_cpp_where_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(make_layer_ops("torch", CPU)) is TorchLayerOps

    def missing() -> None:
        raise NativeLibraryError("there is no library")

    monkeypatch.setattr(module, "load_library", missing)
    assert type(make_layer_ops("auto", CPU)) is TorchLayerOps
    with pytest.raises(LayerOpsError, match="kernels is 'native', but there is no library"):
        make_layer_ops("native", CPU)
    monkeypatch.setattr(module, "load_library", lambda: SimpleNamespace(levels=["baseline"]))
    for name in ("auto", "native"):
        assert type(make_layer_ops(name, CPU)) is NativeLayerOps


def test_cpp_needs_a_processor() -> None:
    with pytest.raises(LayerOpsError, match="kernels is 'native', which needs a CPU; the device is 'cuda'"):
        make_layer_ops("native", torch.device("cuda"))


def test_auto_takes_torch_on_a_gpu_where_triton_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, ModuleSpec | None] = {"triton": None}
    monkeypatch.setattr(module, "find_spec", found.get)
    assert isinstance(make_layer_ops("auto", torch.device("cuda")), TorchLayerOps)
    with pytest.raises(LayerOpsError, match="kernels is 'triton', but the package triton is not installed"):
        make_layer_ops("triton", torch.device("cuda"))


@pytest.fixture
def with_triton() -> None:
    pytest.importorskip("triton")


@pytest.mark.usefixtures("with_triton")
def test_other_names_and_devices_are_refused() -> None:
    with pytest.raises(LayerOpsError, match="kernels is 'cuda'; there are auto, torch, native, triton"):
        make_layer_ops("cuda", CPU)
    with pytest.raises(LayerOpsError, match="kernels is 'triton', which needs a GPU; the device is 'cpu'"):
        make_layer_ops("triton", CPU)


@pytest.mark.usefixtures("with_triton")
def test_the_setting_is_checked_by_name(make_engine: Any) -> None:  # noqa: F811
    for name in NAMES:
        assert load_settings(PrefillSettings, flags={"kernels": name}).kernels == name
    with pytest.raises(ConfigError, match="kernels is 'cuda', one of auto, torch, native, triton is needed"):
        load_settings(PrefillSettings, flags={"kernels": "cuda"})
    assert EngineConfig().kernels == "auto"
    with pytest.raises(ConfigError, match="kernels is 'triton', which needs a GPU"):
        make_engine(kernels="triton")
