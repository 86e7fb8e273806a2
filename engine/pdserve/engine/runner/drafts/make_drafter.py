"""`make_drafter`: the drafter of an engine's settings."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.engine.config import EngineConfig
from pdserve.engine.runner.drafts.model_drafter import DraftModel, ModelDrafter
from pdserve.engine.speculation.drafter import Drafter
from pdserve.engine.speculation.ngram_drafter import NgramDrafter
from pdserve.kernels.attention.make_attention import make_attention
from pdserve.kernels.layer_ops import LayerOps


def make_drafter(
    config: EngineConfig,
    draft_model: DraftModel | None,
    ops: LayerOps,
    before_layer: Callable[[], None] | None,
) -> Drafter | None:
    """None without `speculative_config`, and with the draft head of the model, whose cache is the engine's. draft_model: of its
    `model`; None with another method.

    Raises: AttentionBackendError if there is no such back end.
    """
    setting = config.speculative_config
    if setting is None or setting.has_draft_head:
        return None
    if setting.draft_model is None:
        image_token_id = None if config.encoder is None else config.encoder.image_token_id
        return NgramDrafter(setting.shortest_lookup, setting.longest_lookup, image_token_id)
    if draft_model is None:
        raise ValueError(f"speculative_config.model is {setting.draft_model!r}, and no draft model was loaded")
    return ModelDrafter(
        draft_model,
        [make_attention(config.attention_backend, kv_cache) for kv_cache in draft_model.kv_caches],
        ops,
        num_rows=config.max_num_seqs,
        max_num_tokens=config.max_num_batched_tokens,
        before_layer=before_layer,
    )
