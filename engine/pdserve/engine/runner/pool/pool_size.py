"""The size of the KV pool, computed from a worker's settings and a model's dimensions before the model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.sequence_blocks import max_sequence_tokens
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.encoder_decoder.encoder_decoder_config import EncoderDecoderConfig
from pdserve.models.kv_cache import KVCacheGroupSpec

_DYNAMIC = (
    ": beyond it the rope type 'dynamic' rotates all keys of a sequence again with each token, and cached keys are not"
)


def with_kv_cache_groups(config: ModelConfig, settings: WorkerSettings) -> ModelConfig:
    """The configuration with one KV cache group per kind of layer; unchanged with `disable_hybrid_kv_cache_manager` or if the code
    of `transformers` computes the model."""
    if settings.disable_hybrid_kv_cache_manager or config.implementation:
        return config
    return replace(config, hybrid_kv_cache=True)


def host_slots(settings: WorkerSettings, block_bytes: int) -> int:
    """Number of blocks in the host-memory tier. block_bytes: bytes of one block. Raises: ConfigError if it holds none."""
    num_slots = (settings.kv_host_mib << 20) // block_bytes
    if num_slots < 1:
        raise ConfigError(f"kv_host_mib is {settings.kv_host_mib}, one block has {block_bytes} bytes")
    return num_slots


def pool_setting(settings: WorkerSettings) -> str:
    """The setting that determines the pool's size, with its value, as text."""
    if settings.num_blocks is not None:
        return f"num_blocks {settings.num_blocks}"
    return f"kv_cache_mib {settings.pool_mib}" if settings.pool_mib is not None else "what is left of the GPU"


def pool_size(
    settings: WorkerSettings,
    groups: Sequence[KVCacheGroupSpec],
    block_bytes: int,
    model: ModelConfig,
    left_bytes: int | None = None,
) -> tuple[int, int]:
    """(blocks of the pool, tokens of the longest sequence that pool, model and settings allow).

    groups: KV cache groups. block_bytes: bytes of one block and of everything else that exists once per block. left_bytes: free
    bytes of a GPU, if no setting determines the pool's size. Raises: ConfigError naming the setting, its value and the limit.
    """
    num_bytes = (settings.pool_mib or 0) << 20 if left_bytes is None else left_bytes
    num_blocks = num_bytes // block_bytes
    if settings.num_blocks is not None:
        # the memory of `num_blocks` blocks of all layers
        num_blocks = settings.num_blocks * model.num_layers // groups[0].layout.num_layers
    if num_blocks < 2:
        raise ConfigError(f"kv_cache_mib {settings.pool_mib} holds {num_blocks} blocks of {block_bytes} bytes")
    step_tokens = min(settings.limits.long_prefill_token_threshold or settings.step_tokens, settings.step_tokens)
    specs = [group.spec for group in groups]
    pool_tokens = max_sequence_tokens(specs, num_blocks, settings.block_size, step_tokens)
    if isinstance(model, EncoderDecoderConfig):
        of_encoder = num_blocks - num_blocks // 2  # for each of the two parts of a sequence
        if model.audio is not None:
            of_encoder = -(-model.audio.num_positions // settings.block_size)
            if num_blocks <= of_encoder:
                raise ConfigError(
                    f"kv_cache_mib {settings.pool_mib} holds {num_blocks} blocks of {block_bytes} bytes, and the "
                    f"{model.audio.num_positions} positions of the encoder of {model.architecture} alone need {of_encoder}"
                )
        pool_tokens = (num_blocks - of_encoder) * settings.block_size
    if pool_tokens < settings.block_size:
        raise ConfigError(
            f"kv_cache_mib {settings.pool_mib} holds {num_blocks} blocks of {block_bytes} bytes, and a token needs one in each "
            f"of {len(groups)} KV cache groups"
        )
    limit = model.max_position_embeddings
    if settings.max_model_len is not None:
        if settings.max_model_len > model.derived_max_model_len:
            reason = "" if model.rope.rope_type != "dynamic" else _DYNAMIC
            raise ConfigError(
                f"max_model_len is {settings.max_model_len}, the model supports at most {model.derived_max_model_len}{reason}"
            )
        if settings.max_model_len > pool_tokens:
            raise ConfigError(f"max_model_len is {settings.max_model_len}, the pool holds {pool_tokens} tokens")
        limit = settings.max_model_len
    return num_blocks, min(limit, pool_tokens)
