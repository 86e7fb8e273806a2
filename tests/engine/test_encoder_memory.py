"""The memory of a vision encoder, which a worker's needs and its pool on a GPU count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.profiler import ProfilerActivity, profile

from pdserve.common.errors import ConfigError
from pdserve.common.image_processor_config import ImageProcessorConfig
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.runner.encoders.image_encoder import encoder_bytes, image_encoder
from pdserve.engine.runner.pool.memory_needs import memory_needs
from pdserve.engine.runner.pool.pool_budget import PoolBudget
from pdserve.models.loading import load_decoder
from pdserve.models.read_config import read_config
from tests.support.models.image_checkpoints import FAMILIES, PREPROCESSOR, make_image_checkpoint

MIB = 1 << 20
SETTINGS = DecodeSettings(dtype="float32", num_blocks=64, max_model_len=512)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp("images") / request.param, request.param)


@pytest.mark.slow
@pytest.mark.few(1)
def test_needs_count_weights_outputs_and_the_largest_image(folder: Path) -> None:
    needs = memory_needs(folder, SETTINGS)
    stored = 0
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        assert any("visual" in name for name in names)
        stored = sum(weights.get_tensor(name).nbytes for name in names)
    assert needs.weights >= stored
    config = read_config(folder, "float32")
    assert needs.images == encoder_bytes(folder, SETTINGS, config) > 0
    assert needs.host == needs.process + needs.weights + needs.pool + needs.step + needs.images
    encoder = image_encoder(folder, SETTINGS, config, 512)
    assert encoder is not None
    tower = load_decoder(folder, dtype="float32").vision_tower
    assert tower is not None
    # a square of as many pixels as an image may have
    side = int(PREPROCESSOR["max_pixels"] ** 0.5) // 4
    assert ImageProcessorConfig.read(folder).max_pixels == (4 * side) ** 2
    data = bytes(3 * (4 * side) ** 2)
    with torch.inference_mode():
        output = tower.encode(data, (1, side, side))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            tower.encode(data, (1, side, side))
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    used = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        used += event.nbytes()
        peak = max(peak, used)
    num_tokens = side**2 // 4
    cached = encoder.encoder_cache_size * output[0].nbytes
    of_image = (needs.images - cached) * num_tokens / encoder.max_image_tokens
    assert 0.8 * peak < of_image < 2 * peak


def test_a_pool_leaves_room_for_images() -> None:
    budget = PoolBudget(1000 * MIB, 300 * MIB, 90 * MIB, 60 * MIB, 32 * MIB)
    settings = DecodeSettings(device="cuda")
    assert budget.pool_bytes(settings, MIB) - budget.pool_bytes(settings, MIB, 100 * MIB) == 100 * MIB
    with pytest.raises(ConfigError, match="graphs 60 MiB, images 500 MiB and kv_ring_mib 32 MiB; 0 MiB are left"):
        budget.pool_bytes(settings, MIB, 500 * MIB)
