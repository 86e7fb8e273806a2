"""The doctor says what multiplies matrices here: the layer that a worker would make, whatever the CPU."""

from __future__ import annotations

import pytest
import torch

from pdserve.cli.doctor.native_check import check_native
from pdserve.common.settings.worker_settings import PrefillSettings
from pdserve.kernels.cpu import linear
from pdserve.kernels.cpu.linear import products_by
from pdserve.kernels.native.native_library import built_library


def products(settings: PrefillSettings) -> list[str]:
    return [finding.what for finding in check_native(settings) if finding.what.startswith("products of ")]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (PrefillSettings(), "bfloat16"),
        (PrefillSettings(dtype="float16"), "float16"),
        (PrefillSettings(dtype="float32"), "float32"),
    ],
)
def test_one_row_names_what_multiplies_the_served_dtype(settings: PrefillSettings, named: str) -> None:
    [row] = products(settings)
    assert row == f"products of {named}: {products_by(getattr(torch, named))}"


def test_a_gpu_multiplies_by_itself() -> None:
    assert not products(PrefillSettings(device="cuda"))


def test_the_row_follows_the_layer_that_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    bfloat16 = torch.bfloat16
    monkeypatch.setattr(linear, "onednn_multiplies", lambda dtype: False)
    if (library := built_library()) is not None:
        limit = 256 if library.levels[0] == "avx512" else 24
        assert products_by(bfloat16) == f"C++ ({library.levels[0]}) up to {limit} rows, then float32 parts"
    monkeypatch.setattr(linear, "built_library", lambda: None)
    assert products_by(bfloat16) == "torch below 4 rows, then float32 parts"
    assert products_by(torch.float32) == "oneDNN"
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert products_by(bfloat16) == products_by(torch.float32) == "torch"
