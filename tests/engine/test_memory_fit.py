"""Settings that ask for more memory than there is: one sentence that names the setting and what fits."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.runner.loading.loaded_model import load_model
from pdserve.engine.runner.pool import memory_fit
from pdserve.engine.runner.pool.memory_fit import allocating
from pdserve.kernels.cpu.free_memory import FreeMemory
from pdserve.models.model_folder import model_folder
from tests.support.engine.settings_with import settings_with


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kv_cache_mib": 999_999_999}, "kv_cache_mib 999999999 needs 999,999,"),
        ({"kv_cache_mib": 10**20}, "kv_cache_mib 100000000000000000000 needs "),
        ({"num_blocks": 10**12}, "num_blocks 1000000000000 needs "),
        ({"kv_host_mib": 999_999_999}, "kv_host_mib 999999999 needs 999,999,"),
        ({"enable_lora": True, "max_loras": 10**9}, "max_loras 1000000000 with max_lora_rank 16 needs "),
    ],
)
def test_the_setting_and_what_is_free_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_model(model_folder("demo"), settings_with(DecodeSettings, **given))
    assert refused.value.message.startswith(named)
    assert " MiB, free are " in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    "error",
    [OSError(12, "Cannot allocate memory"), MemoryError(), RuntimeError("DefaultCPUAllocator"), OverflowError()],
)
def test_a_failed_allocation_is_the_settings(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(memory_fit, "memory_limit", lambda: None)
    with pytest.raises(ConfigError, match="x 1 needs 3 MiB, free are "), allocating("x 1", 3 << 20):
        raise error
    with pytest.raises(ConfigError, match="x 1 needs 3 MiB on cuda:0"), allocating("x 1", 3 << 20, "cuda:0"):
        raise error


def test_what_the_machine_can_never_hold_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_fit, "memory_limit", lambda: FreeMemory(2 << 20, "the control group /x"))
    tried = []
    with pytest.raises(ConfigError, match="x 1 needs 3 MiB"), allocating("x 1", 3 << 20):
        tried.append(True)
    assert not tried
    with allocating("x 1", 2 << 20):
        tried.append(True)
    with allocating("x 1", 3 << 20, "cuda"):
        tried.append(True)
    assert len(tried) == 2


@pytest.mark.slow
def test_a_pool_that_shortens_sequences_says_so_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    folder = model_folder("demo")
    loaded = load_model(folder, DecodeSettings(num_blocks=8))
    [line] = caplog.messages
    limit = loaded.decoder.config.max_position_embeddings
    assert line.startswith(
        f"sequences have at most {loaded.max_model_len} tokens, not the model's {limit}: num_blocks 8 holds"
    )
    assert loaded.max_model_len < limit
    caplog.clear()
    load_model(folder, DecodeSettings(num_blocks=8, max_model_len=16))
    load_model(folder, DecodeSettings())
    assert not caplog.messages, "a length that is asked for, and a pool that has room, are no news"
