"""`encoder_decoder_prompts`: how prompts of a model with an encoder are laid out, and the settings with which it is not served."""

from __future__ import annotations

from pdserve.common.errors import ConfigError
from pdserve.common.request.encoder_prompt import EncoderDecoderPrompts
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.encoder_decoder.encoder_decoder_config import EncoderDecoderConfig

_MIN_AUDIO_LEN = 8
"""Tokens: those with which a transcript begins, and some of its own."""


def verify_encoder_decoder(settings: WorkerSettings, config: ModelConfig) -> None:
    """Raises: ConfigError naming a setting with which a model with an encoder is not served."""
    if not isinstance(config, EncoderDecoderConfig):
        return
    takes_rest = settings.num_blocks is None and settings.pool_mib is None
    for name, is_set, reason in (
        ("speculative_config", settings.speculative_config is not None, "its tokens are not drafted"),
        ("enable_prompt_embeds", settings.enable_prompt_embeds, "its encoder reads token ids"),
        (
            "long_prefill_token_threshold",
            settings.limits.long_prefill_token_threshold > 0,
            "its prompts are encoded in one step",
        ),
        ("kv_cache_mib", takes_rest, "its largest step is not measured: the setting is needed"),
    ):
        if is_set:
            state = "is not set" if name == "kv_cache_mib" else "is set"
            raise ConfigError(f"{name} {state}, and {config.architecture} has an encoder: {reason}")


def encoder_decoder_prompts(config: ModelConfig, max_model_len: int) -> EncoderDecoderPrompts | None:
    """None for a model without an encoder. Raises: ConfigError for a length without room for a token."""
    if not isinstance(config, EncoderDecoderConfig):
        return None
    if config.audio is not None and max_model_len < _MIN_AUDIO_LEN:
        raise ConfigError(f"max_model_len is {max_model_len}, at least {_MIN_AUDIO_LEN} tokens are needed")
    num_first = len(config.decoder_prompt_token_ids)
    if max_model_len <= num_first:
        raise ConfigError(
            f"max_model_len is {max_model_len}, and the decoder of {config.architecture} begins with {num_first} tokens"
        )
    return EncoderDecoderPrompts(
        config.decoder_prompt_token_ids,
        config.pad_token_id,
        max_model_len,
        config.audio,
        config.suppressed_token_ids,
        config.begin_suppressed_token_ids,
    )
