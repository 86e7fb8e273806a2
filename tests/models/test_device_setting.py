"""A device that is not here is refused before any weight is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.runner.loading.loaded_model import load_model


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "device is 'gpu', it must be cpu, cuda or cuda:N"),
        ("cuda:x", "device is 'cuda:x', it must be cpu, cuda or cuda:N"),
        ("cuda:", "device is 'cuda:', it must be cpu, cuda or cuda:N"),
        ("cuda:-1", "device is 'cuda:-1', it must be cpu, cuda or cuda:N"),
        ("cuda:300", "device is 'cuda:300', it must be cpu, cuda or cuda:N"),
        ("CPU", "device is 'CPU', it must be cpu, cuda or cuda:N"),
        ("", "device is '', it must be cpu, cuda or cuda:N"),
        ("meta", "device is 'meta', it must be cpu, cuda or cuda:N"),
    ],
)
def test_another_name_is_refused_without_torch(device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecodeSettings(device=device).verify()


def test_a_device_that_is_not_here_is_refused_by_name(tmp_path: Path) -> None:
    message = rf"device is 'cuda:99', but torch {torch.__version__} sees \d CUDA devices here"
    DecodeSettings(device="cuda:99").verify()
    with pytest.raises(ConfigError, match=message.replace("+", r"\+")):
        load_model(tmp_path, DecodeSettings(device="cuda:99"))


def test_a_processor_alone_says_that_it_has_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="sees 0 CUDA devices"):
        load_model(tmp_path, DecodeSettings(device="cuda"))
