"""The size of the KV pool, computed from a worker's settings and a model's dimensions before the model is loaded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from operator import mul

from pdserve.common.errors import ConfigError
from pdserve.common.kv_layout import KvLayout
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.runner.drafts.draft_head_folder import draft_head_config
from pdserve.engine.sequence_blocks import BlockCounts, max_sequence_tokens, num_window_blocks
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.encoder_decoder.encoder_decoder_config import EncoderDecoderConfig
from pdserve.models.kv_cache import (
    ChunkedLocalAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    StateSpec,
    shapes_of,
)

_DYNAMIC = (
    ": beyond it the rope type 'dynamic' rotates all keys of a sequence again with each token, and cached keys are not"
)


def with_kv_cache_groups(config: ModelConfig, settings: WorkerSettings) -> ModelConfig:
    """The configuration with one KV cache group per kind of layer, but not with `disable_hybrid_kv_cache_manager` or if the code of
    `transformers` computes the model, and with one for the draft head of `speculative_config`.

    Raises: as `draft_head_config`.
    """
    config = replace(config, draft_head=draft_head_config(settings.speculative_config, config))
    if settings.disable_hybrid_kv_cache_manager or config.implementation:
        return config
    return replace(config, hybrid_kv_cache=True)


def host_slots(settings: WorkerSettings, layout: KvLayout, num_blocks: BlockCounts) -> BlockCounts:
    """Blocks of the host-memory tier, by shape, in the pool's proportions, and at least one of each; empty without `kv_host_mib`.

    A hit needs blocks of every shape, so the tier is divided as the pool is. num_blocks: of the pool. Raises: ConfigError if
    `kv_host_mib` holds less than a block of each shape.
    """
    if not settings.kv_host_mib:
        return ()
    least = layout.pool_bytes([1] * len(num_blocks))
    left = (settings.kv_host_mib << 20) - least
    if left < 0:
        raise ConfigError(f"kv_host_mib is {settings.kv_host_mib}, and one block of each shape takes {least} bytes")
    pool_bytes = layout.pool_bytes(num_blocks)
    return tuple(1 + left * count // pool_bytes for count in num_blocks)


def pool_setting(settings: WorkerSettings) -> str:
    """The setting that determines the pool's size, with its value, as text."""
    if settings.num_blocks is not None:
        return f"num_blocks {settings.num_blocks}"
    return f"kv_cache_mib {settings.pool_mib}" if settings.pool_mib is not None else "what is left of the GPU"


def pool_size(
    settings: WorkerSettings,
    groups: Sequence[KVCacheGroupSpec],
    model: ModelConfig,
    left_bytes: int | None = None,
    more_bytes: int = 0,
) -> tuple[BlockCounts, int]:
    """(blocks of the pool by shape, tokens of the longest sequence that pool, model and settings allow).

    groups: KV cache groups. left_bytes: free bytes of a GPU, if no setting determines the pool's size. more_bytes: of everything
    else that exists once per block. Raises: ConfigError naming the setting, its value and the limit.
    """
    num_bytes = (settings.pool_mib or 0) << 20 if left_bytes is None else left_bytes
    specs, shapes = [group.spec for group in groups], shapes_of(groups)
    block_bytes = [shape.block_bytes + more_bytes for shape in shapes]
    step_tokens = min(settings.limits.long_prefill_token_threshold or settings.step_tokens, settings.step_tokens)
    if settings.num_blocks is not None:
        # the memory of `num_blocks` blocks of all layers
        layers = [sum(len(group.layers) for group in groups if group.shape == shape) for shape in shapes]
        num_blocks = tuple(
            settings.num_blocks * count // shape.num_layers for count, shape in zip(layers, shapes, strict=True)
        )
    elif len(shapes) == 1:
        num_blocks = (num_bytes // block_bytes[0],)
    else:
        num_blocks = _shared(settings, specs, block_bytes, num_bytes, step_tokens)
    if min(num_blocks) < 2:
        shown = " and ".join(
            f"{count} blocks of {size} bytes" for count, size in zip(num_blocks, block_bytes, strict=True)
        )
        raise ConfigError(f"kv_cache_mib {settings.pool_mib} holds {shown}")
    pool_tokens = max_sequence_tokens(specs, num_blocks, settings.block_size, step_tokens)
    if isinstance(model, EncoderDecoderConfig):
        [all_blocks] = num_blocks
        of_encoder = all_blocks - all_blocks // 2  # for each of the two parts of a sequence
        if model.audio is not None:
            of_encoder = -(-model.audio.num_positions // settings.block_size)
            if all_blocks <= of_encoder:
                raise ConfigError(
                    f"kv_cache_mib {settings.pool_mib} holds {all_blocks} blocks of {block_bytes[0]} bytes, and the "
                    f"{model.audio.num_positions} positions of the encoder of {model.architecture} alone need {of_encoder}"
                )
        pool_tokens = (all_blocks - of_encoder) * settings.block_size
    if pool_tokens < settings.block_size:
        raise ConfigError(
            f"kv_cache_mib {settings.pool_mib} holds {' and '.join(map(str, num_blocks))} blocks, and a token needs one in each of "
            f"{len(groups)} KV cache groups"
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


_CACHED_WINDOWS = 2
"""Windows, or chunks, that blocks of their groups are for, per running sequence: its own, and one that the prefix cache keeps."""
_STATES = 4
"""States per running sequence: two that a step reads and writes, and two that the prefix cache keeps."""


def _shared(
    settings: WorkerSettings, specs: Sequence[KVCacheSpec], block_bytes: Sequence[int], num_bytes: int, step_tokens: int
) -> BlockCounts:
    """Blocks by shape in `num_bytes`, for as many tokens as possible: groups with a window need no more than the windows of
    `max_num_seqs` sequences."""

    def counts(num_places: int) -> BlockCounts:
        found = [0] * len(block_bytes)
        for spec in specs:
            limit = num_places
            if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
                of_sequence = num_window_blocks(spec.reach, settings.block_size, step_tokens)
                limit = min(limit, _CACHED_WINDOWS * settings.max_num_seqs * of_sequence)
            elif isinstance(spec, StateSpec):
                limit = min(limit, _STATES * settings.max_num_seqs)
            found[spec.shape] += limit
        return tuple(found)

    def exceeds(num_places: int) -> bool:
        used: int = sum(map(mul, counts(num_places), block_bytes))
        return used > num_bytes

    most = num_bytes // min(block_bytes)
    return counts(bisect_left(range(most + 1), True, key=exceeds) - 1)
