"""`make_model_runner`: a `ModelRunner` with the back ends of its device, and the sampler of its rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.engine.config import EngineConfig
from pdserve.engine.lora.lora_runner import LoraRunner
from pdserve.engine.runner.decoder_model import DecoderModel
from pdserve.engine.runner.drafts.head_drafter import HeadDrafter
from pdserve.engine.runner.drafts.make_drafter import make_drafter
from pdserve.engine.runner.drafts.model_drafter import DraftModel
from pdserve.engine.runner.model_runner import ModelRunner
from pdserve.engine.sampling.logits_processors import LogitsProcessors
from pdserve.engine.sampling.rank_samplers import ReceivingSampler, SharingSampler
from pdserve.engine.sampling.sampler import Sampler, TokenSampler
from pdserve.engine.sampling.token_texts import TokenTexts
from pdserve.kernels.attention.make_attention import AttentionBackendError, make_attention
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layer_plans import LayerBackend
from pdserve.kernels.make_layer_ops import LayerOpsError, make_layer_ops
from pdserve.kernels.rank_group import RankGroup
from pdserve.kernels.state.make_states import make_states
from pdserve.models.decoder import Decoder
from pdserve.models.kv_cache import StateSpec


def make_model_runner(
    config: EngineConfig,
    model: DecoderModel,
    kv_caches: Sequence[Tensor],
    vocab_size: int,
    before_layer: Callable[[], None] | None = None,
    logits_processors: LogitsProcessors | None = None,
    attention: Sequence[LayerBackend] | None = None,
    *,
    lora: LoraRunner | None = None,
    group: RankGroup | None = None,
    draft_model: DraftModel | None = None,
    token_texts: TokenTexts | None = None,
) -> ModelRunner:
    """A runner with an empty batch.

    attention: default: `config.attention_backend` over each of `kv_caches`. lora: None without adapters. group: the ranks that
    share the model; None for one. draft_model: that of `config.speculative_config`, if it names one. token_texts: None
    without a tokenizer, and on ranks above 0, which do not sample.
    Raises: ConfigError if there is no such back end, or no such `config.kernels`.
    """
    try:
        if attention is None:
            attention = [
                make_states(config.attention_backend, kv_cache, config.block_size)
                if isinstance(spec, StateSpec)
                else make_attention(config.attention_backend, kv_cache, model.dtype)
                for spec, kv_cache in zip(config.kv_cache_specs, kv_caches, strict=True)
            ]
        ops = make_layer_ops(config.kernels, kv_caches[0].device)
        # ranks above 0 compute the drafts of rank 0
        is_first = group is None or group.rank == 0
        drafter = make_drafter(config, draft_model, ops, before_layer) if is_first else None
        draft_head = None
        if isinstance(model, Decoder) and model.draft_head is not None:
            draft_head = HeadDrafter(
                model, attention[-1], model.attention_specs[-1], ops, _sampler(ops, group),
                drafts=config.speculative_config is not None, before_layer=before_layer,
            )  # fmt: skip
            drafter = draft_head
    except (AttentionBackendError, LayerOpsError) as error:
        raise ConfigError(str(error)) from error
    return ModelRunner(
        config,
        model,
        attention,
        ops,
        kv_caches,
        vocab_size,
        before_layer,
        logits_processors,
        lora=lora,
        sampler=_sampler(ops, group),
        drafter=drafter,
        draft_head=draft_head,
        group=group,
        token_texts=token_texts,
    )


def _sampler(ops: LayerOps, group: RankGroup | None) -> TokenSampler:
    sampler: TokenSampler = Sampler(ops.sample)
    if group is None:
        return sampler
    return SharingSampler(sampler, group) if group.rank == 0 else ReceivingSampler(group)
