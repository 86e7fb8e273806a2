"""`image_encoder`: the limits of a model's vision encoder; `encoder_bytes`: its memory."""

from __future__ import annotations

from pathlib import Path

from pdserve.common.image_processor_config import ImageProcessorConfig
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.config import EncoderConfig
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.dtypes import TORCH_DTYPES

_FLOAT_BYTES = 4
_PIXEL_COPIES = 2
"""Normalized pixels are there as an image, and as patches."""


def image_encoder(
    folder: Path, settings: WorkerSettings, config: ModelConfig, max_model_len: int
) -> EncoderConfig | None:
    """None for a model without images. Raises: ConfigError.

    As in vLLM, step and cache have room for as many image tokens as a step has tokens, at least for the largest image.
    """
    if config.vision is None:
        return None
    largest = min(ImageProcessorConfig.read(folder).max_tokens, max_model_len)
    room = max(settings.step_tokens, largest)
    return EncoderConfig(
        image_token_id=config.vision.image_token_id,
        patch_size=config.vision.patch_size,
        merge_size=config.vision.merge_size,
        max_num_encoder_input_tokens=room,
        encoder_cache_size=room,
    )


def encoder_bytes(folder: Path, settings: WorkerSettings, config: ModelConfig) -> int:
    """Bytes that images take without the weights: the encoder's cache, and an estimate of what encoding the largest image needs.

    0 for a model without images. Raises: ConfigError.
    """
    encoder = image_encoder(folder, settings, config, settings.max_model_len or config.max_position_embeddings)
    if encoder is None or config.vision is None:
        return 0
    vision, size = config.vision, TORCH_DTYPES[config.dtype].itemsize
    cached = encoder.encoder_cache_size * (1 + vision.num_deepstack) * config.hidden_size * size
    pixels = 3 * vision.temporal_patch_size * vision.patch_size**2 * _FLOAT_BYTES
    hidden, inner = (int(vision.values[name]) for name in ("hidden_size", "intermediate_size"))
    # in addition to the residual and its norm: queries, keys and values with their rotation in float32, or the MLP's products
    attention, mlp = 3 * hidden * size + 4 * hidden * _FLOAT_BYTES, 3 * inner * size
    of_patch = _PIXEL_COPIES * pixels + 2 * hidden * size + max(attention, mlp)
    return cached + encoder.max_image_tokens * vision.merge_size**2 * of_patch
