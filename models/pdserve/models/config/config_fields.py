"""Fields of `config.json` that the decoder does not read: harmless fields pass, fields that change the computation are refused.

A checkpoint of another family under a supported name would load and give wrong answers, since only such a field shows that its
computation differs (a multiplier, layers without rotation, a soft cap). Each field is one of:

    read         by `ModelConfig` or `RopeParameters`
    harmless     does not change a logit (bookkeeping, training, sampling, token ids), or the tensors show the same (biases)
    neutral      names another computation, with the value that switches it off, such as a multiplier of 1
    refused      any other value of a field that a family of transformers has (`family_fields.py`), or whose name names a
                 computation, such as `scaling`
    unknown      none of these: one warning
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from pdserve.common.errors import UnsupportedModel
from pdserve.models.config.family_fields import FAMILY_FIELDS, words
from pdserve.models.json_object import JsonObject

READ = words(
    """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act max_position_embeddings rms_norm_eps tie_word_embeddings rope_parameters
    rope_scaling rope_theta partial_rotary_factor original_max_position_embeddings dtype torch_dtype eos_token_id
    bos_token_id quantization_config id2label num_labels problem_type sentence_transformers
    sbert_ce_default_activation_function
    """
)
DRAFT_HEAD_FIELDS = words(
    """
    draft_vocab_size target_hidden_size eagle_config eagle_aux_hidden_state_layer_ids norm_before_residual norm_before_fc
    """
)
"""Of EAGLE-3 heads."""
HARMLESS = words(
    """
    label2id finetuning_task task_specific_params prefix torchscript return_dict
    use_return_dict output_hidden_states output_attentions output_scores return_dict_in_generate use_cache use_bfloat16
    tf_legacy_loss chunk_size_feed_forward is_decoder tie_encoder_decoder tie_last_hidden_states auto_map
    transformers_version adapter_transformers_version tokenizer_class processor_class name_or_path pretraining_tp
    attn_implementation experts_implementation use_flash_attn use_flash_attention use_flash_attention_2
    gradient_checkpointing use_reentrant fp16 bf16 fp32 use_parallel_embedding max_length min_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    encoder_repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences begin_suppress_tokens suppress_tokens exponential_decay_length_penalty epsilon_cutoff eta_cutoff
    remove_invalid_values forced_bos_token_id forced_eos_token_id assistant_confidence_threshold assistant_lookbehind
    num_assistant_tokens num_assistant_tokens_schedule target_lookbehind output_router_logits
    n_ctx n_positions seq_length max_seq_len max_seq_length max_sequence_length model_max_length context_length
    seed languages residual_in_fp32 scale_attention_softmax_in_fp32 attention_softmax_in_fp32 reorder_and_upcast_attn
    type_vocab_size summary_type summary_use_proj summary_activation summary_proj_to_labels classifier_activation
    classifier_bias init_std init_device initializer_factor initializer_cutoff_factor rescale_prenorm_residual
    num_logits_to_keep z_loss_coefficient max_window_layers ep_size
    attention_bias mlp_bias attention_out_bias use_bias bias qkv_bias use_qkv_bias add_bias_linear add_qkv_bias no_bias
    enable_bias lm_head_bias
    """
)
HARMLESS_NAMES = re.compile(
    r"_.*|unsloth.*|.*_token_id|.*_token_ids|.*_token_index|.*dropout(_prob|_p)?|.*_pdrop|.*layerdrop|.*jitter_noise"
    r"|(.*_)?initializer_range|.*_loss_coef(ficient)?|.*_loss_weight"
)
"""Full match. `FAMILY_FIELDS` takes precedence for names that begin with an underscore."""
_MATHEMATICS = re.compile(
    r"multiplier|soft_?cap|scaling|rope|rotary|alibi|expert|(^|_)moe(_|$)|sliding_window|compression"
)
"""Refuses a field that is in no list, by a part of its name."""

_ONE = words(
    """
    embedding_multiplier residual_multiplier logits_scaling logit_scale attention_in_multiplier attention_out_multiplier
    key_multiplier lm_head_multiplier scale_emb embedding_scale logits_mup_width_multiplier rotary_pct rotary_percent
    rope_ratio routed_scaling_factor embedding_fraction residual_scale
    """
)
_ZERO = words(
    """
    num_experts num_local_experts n_routed_experts n_shared_experts num_shared_experts num_experts_per_tok
    num_nextn_predict_layers num_mtp_layers num_kv_shared_layers shared_intermediate_size sliding_window
    shared_expert_intermediate_size moe_shared_expert_intermediate_size
    """
)
_TRUE = words(
    "use_rope use_rotary use_rotary_embedding rotary causal is_causal use_causal_mask use_rms_norm scale_attn_weights "
    "layer_norm_elementwise_affine do_layer_norm_before gated_mlp use_swiglu"
)
"""Fields whose value false changes the computation."""
_QK_NORM = words("use_qk_norm qk_norm qk_layernorm")
"""Fields that say what the family's class does in any case; false is left to the weights, which have norms or not."""
_SILU = words("hidden_activation activation_function activation mlp_hidden_act")


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Values from config.json that other families write under other names."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    """Tokens of the longest sequence that can be served."""
    has_windows: bool
    """Each layer has a sliding window."""
    has_qk_norm: bool = False
    """Queries and keys are normed."""


_SAME: Mapping[str, Callable[[Dimensions], float]] = {
    **dict.fromkeys(("attention_multiplier", "softmax_scale", "attn_scale"), lambda own: own.head_dim**-0.5),
    **dict.fromkeys(
        ("query_pre_attn_scalar", "rotary_dim", "attention_head_dim", "attention_head_size", "kv_channels", "dim_head",
         "qk_head_dim", "v_head_dim", "d_head", "d_kv"),
        lambda own: own.head_dim,
    ),
    **dict.fromkeys(("num_kv_heads", "n_head_kv", "multi_query_group_num"), lambda own: own.num_kv_heads),
    **dict.fromkeys(("n_embd", "n_embed", "d_model"), lambda own: own.hidden_size),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), lambda own: own.num_layers),
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), lambda own: own.num_heads),
    **dict.fromkeys(("ffn_hidden_size", "ffn_dim", "n_inner", "dim_ff"), lambda own: own.intermediate_size),
    **dict.fromkeys(
        ("layer_norm_eps", "norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon"),
        lambda own: own.rms_norm_eps,
    ),
    **dict.fromkeys(("rotary_base", "rotary_emb_base", "rope_base"), lambda own: own.rope_theta),
}  # fmt: skip
"""Field -> the value with which it is neutral."""


def check_fields(config: JsonObject, architecture: str, read: Collection[str], own: Dimensions) -> tuple[str, ...]:
    """Refuse fields for computations that the decoder does not have.

    architecture: for messages. read: fields of this architecture, without those of all. Returns the names that are in no list.
    Raises: UnsupportedModel naming the field and its value.
    """
    unknown = []
    for name in config.names:
        if name in READ or name in read or name in HARMLESS or _is_neutral(config, name, own):
            continue
        listed = name in FAMILY_FIELDS or name in _SPECIAL or name in _SAME or name in _ONE | _ZERO | _TRUE | _SILU
        if not listed and HARMLESS_NAMES.fullmatch(name):
            continue
        if listed or _MATHEMATICS.search(name):
            raise UnsupportedModel(
                f"{config.where}: {name[:80]} is {config.shown(name)}, which {architecture} does not compute; "
                f"{_expected(name, own)}"
            )
        unknown.append(name)
    return tuple(unknown)


def _is_neutral(config: JsonObject, name: str, own: Dimensions) -> bool:
    value = config.get(name)
    if name in _SPECIAL:
        return _SPECIAL[name](config, own)
    if value is None:
        return True
    if name in _SAME:
        return isinstance(value, int | float) and math.isclose(value, _SAME[name](own), rel_tol=1e-6)
    if name in _TRUE:
        return value is True
    if name in _QK_NORM and value is True:
        return own.has_qk_norm
    if name in _SILU:
        return value in ("silu", "swish")
    if name in _ONE and _is_number(value):
        return value == 1
    if name in _ZERO and _is_number(value):
        return value == 0
    return value is False or value in ([], {})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _expected(name: str, own: Dimensions) -> str:
    if name in _SAME:
        return f"it must be {_SAME[name](own):.6g} or absent"
    if name in _ONE | _ZERO | _TRUE:
        return f"it must be {'1' if name in _ONE else '0' if name in _ZERO else 'true'} or absent"
    return "it must be absent, null or false"


def _no_rope_layers(config: JsonObject, own: Dimensions) -> bool:
    """True if all layers rotate: the list has 1 for each layer with rotation; null means every fourth layer without."""
    layers = config.get("no_rope_layers")
    return isinstance(layers, list) and len(layers) >= own.num_layers and all(layer == 1 for layer in layers)


def _no_rope_layer_interval(config: JsonObject, own: Dimensions) -> bool:
    """True if the field has no effect: without a `no_rope_layers` list, every layer of this interval has no rotation."""
    return config.get("no_rope_layer_interval") is None or isinstance(config.get("no_rope_layers"), list)


def _sliding_window(config: JsonObject, own: Dimensions) -> bool:
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return True
    return isinstance(window, int) and not isinstance(window, bool) and window >= own.max_positions


def _use_sliding_window(config: JsonObject, own: Dimensions) -> bool:
    return config.get("use_sliding_window") in (None, False) or config.get("sliding_window") is None


def _layer_types(config: JsonObject, own: Dimensions) -> bool:
    kinds = config.get("layer_types")
    kind = "sliding_attention" if own.has_windows else "full_attention"
    return kinds is None or (isinstance(kinds, list) and all(each == kind for each in kinds))


def _position_embedding_type(config: JsonObject, own: Dimensions) -> bool:
    return config.get("position_embedding_type") in (None, "rope", "rotary")


_SPECIAL: Mapping[str, Callable[[JsonObject, Dimensions], bool]] = {
    "no_rope_layers": _no_rope_layers,
    "no_rope_layer_interval": _no_rope_layer_interval,
    "sliding_window": _sliding_window,
    "use_sliding_window": _use_sliding_window,
    "layer_types": _layer_types,
    "position_embedding_type": _position_embedding_type,
}
"""Field -> whether it is neutral, for fields with a rule of their own."""
