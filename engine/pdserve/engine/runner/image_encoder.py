"""`image_encoder`: the limits of a model's vision encoder, and the settings with which it is not served."""

from __future__ import annotations

from pathlib import Path

from pdserve.common.errors import ConfigError
from pdserve.common.image_processor_config import ImageProcessorConfig
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.config import EncoderConfig
from pdserve.models.config.model_config import ModelConfig


def verify_image_model(settings: WorkerSettings, config: ModelConfig) -> None:
    """Raises: ConfigError naming a setting with which a model with images is not served."""
    if config.vision is None:
        return
    for name, is_set in (
        ("enable_lora", settings.enable_lora),
        ("speculative_config", settings.speculative_config is not None),
    ):
        if is_set:
            raise ConfigError(f"{name} is set, and {config.architecture}, a model with images, is served without")


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
