"""`read_config`: `config.json` and `generation_config.json` of a model folder, checked field by field."""

from __future__ import annotations

from pathlib import Path

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.models.config.classifier_config import ClassifierConfig
from pdserve.models.config.config_fields import DRAFT_HEAD_FIELDS, Dimensions, check_fields
from pdserve.models.config.missing_capabilities import MISSING
from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.config.rope_parameters import DEFAULT_THETA, RopeParameters
from pdserve.models.config.served_dtype import served_dtype
from pdserve.models.config.special_tokens import special_tokens
from pdserve.models.config.vision_config import VisionConfig, language_config
from pdserve.models.json_object import JsonObject
from pdserve.models.registry import BODIES, CLASSIFIERS, DRAFT_HEADS, FAMILIES
from pdserve.models.weights.quantized.quantization_method import read_quantization

_MAX_VOCAB = 1 << 24
_MAX_WIDTH = 1 << 20
_MAX_HEADS = 1 << 16
_MAX_HEAD_DIM = 1 << 16
"""Upper limit that no known model reaches; smaller values are checked against the shapes of the weights."""
_LONGEST, _SERVED = 1 << 20, 1 << 15
"""Tokens of a sequence without positions: the largest `max_model_len`, and that without the setting."""


def read_config(
    folder: Path, dtype: str = "auto", max_model_len: int | None = None, *, is_draft_head: bool = False
) -> ModelConfig:
    """A model's dimensions and options; `generation_config.json` may override the EOS ids.

    dtype: of weights and KV blocks; `auto` is the folder's. max_model_len: the setting, by which longrope chooses its factors.
    is_draft_head: of an EAGLE-3 head, whose one layer is that of a family here.
    Raises: ConfigError, UnsupportedModel; both name file and field.
    """
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist")
    config = language_config(JsonObject.of_model(folder))
    if is_draft_head:
        named = architecture = _head_architecture(config)
    else:
        named, architecture = _architecture(config)
    family = FAMILIES[architecture]
    config = config.with_names(family.field_names)
    hidden_size = config.integer("hidden_size", maximum=_MAX_WIDTH)
    num_layers = family.read_num_layers(config)
    intermediate_size = num_heads = num_kv_heads = head_dim = rotary_dim = 0
    max_positions, rope = _LONGEST, RopeParameters("default", DEFAULT_THETA)
    if family.has_attention:
        intermediate_size = config.integer(family.intermediate_size_field, maximum=_MAX_WIDTH)
        num_heads = config.integer("num_attention_heads", maximum=_MAX_HEADS)
        num_kv_heads = _num_kv_heads(config, architecture, num_heads)
        head_dim = rotary_dim = _head_dim(config, family.default_head_dim or hidden_size // num_heads)
        if family.default_latent is not None:
            latent = family.default_latent.read(config)
            num_kv_heads, head_dim, rotary_dim = 1, latent.row_dim, latent.rope_dim
        max_positions = config.integer("max_position_embeddings")
        rope = family.read_rope(config, rotary_dim, max_positions)
    rms_norm_eps = config.number(family.norm_eps_field, family.default_rms_norm_eps)
    options: ModelFamily = family.read(config, num_layers)
    derived_max_model_len = rope.derived_max_positions(max_positions)
    own = Dimensions(
        hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, rms_norm_eps, rope.theta,
        derived_max_model_len, None not in options.sliding_windows, options.has_qk_norm or family.norms_projection,
    )  # fmt: skip
    own_fields = family.own_fields | (DRAFT_HEAD_FIELDS if is_draft_head else frozenset())
    unknown_fields = check_fields(config, architecture, own_fields, own)
    vocab_size = config.integer("vocab_size", maximum=_MAX_VOCAB)
    eos_token_ids, bos_token_id = special_tokens(folder, config, vocab_size)
    local_rope = family.read_local_rope(config, rotary_dim, max_positions)
    ropes = [rope] if local_rope is None else [rope, local_rope]
    vision = VisionConfig.read(config, family.model_type, hidden_size, vocab_size) if family.has_images else None
    return ModelConfig(
        architecture=architecture,
        is_body=named in BODIES,
        classifier=ClassifierConfig.read(config) if named in CLASSIFIERS else None,
        family=options,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        rms_norm_eps=rms_norm_eps,
        rope=ropes[0].for_length(max_model_len),
        tie_word_embeddings=config.boolean("tie_word_embeddings", family.default_tie_word_embeddings),
        max_position_embeddings=min(each.max_positions(max_positions) for each in ropes)
        if family.has_attention
        else _SERVED,
        derived_max_model_len=derived_max_model_len,
        dtype=served_dtype(config, dtype),
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        unknown_fields=unknown_fields,
        stored_quantization=read_quantization(config, folder),
        local_rope=ropes[1].for_length(max_model_len) if ropes[1:] else None,
        vision=vision,
    )


def _head_architecture(config: JsonObject) -> str:
    """The architecture whose layer a draft head has. Raises: UnsupportedModel."""
    names = config.items("architectures") or []
    if len(names) != 1 or names[0] not in DRAFT_HEADS:
        found = ", ".join(str(name)[:80] for name in names[:8]) or "none named"
        raise UnsupportedModel(
            f"{config.where}: architectures: {found} is no draft head; supported: {', '.join(DRAFT_HEADS)}"
        )
    return DRAFT_HEADS[str(names[0])]


def _architecture(config: JsonObject) -> tuple[str, str]:
    """The checkpoint's architecture, and the same with a language-model head."""
    names = config.items("architectures") or []
    supported = ", ".join(FAMILIES)
    named = names[0] if len(names) == 1 and isinstance(names[0], str) else ""
    architecture = BODIES.get(named) or CLASSIFIERS.get(named, named)
    if architecture not in FAMILIES:
        found = ", ".join(str(name)[:80] for name in names[:8]) or "none named"
        needs = f" needs {MISSING[named]}, which is not served" if named in MISSING else ""
        raise UnsupportedModel(f"{config.where}: architectures: architecture {found}{needs}; supported: {supported}")
    if named in BODIES and not config.boolean(
        "tie_word_embeddings", FAMILIES[architecture].default_tie_word_embeddings
    ):
        raise UnsupportedModel(
            f"{config.where}: architecture {named} is {architecture} without its language-model head, and "
            "tie_word_embeddings is false; it is served where the embedding is the head"
        )
    expected = FAMILIES[architecture].model_type
    model_type = config.text("model_type", expected)
    if model_type != expected and model_type not in FAMILIES[architecture].other_model_types:
        # transformers chooses by the type, and other families compute differently with tensors of the same names
        raise UnsupportedModel(
            f"{config.where}: model_type {model_type[:80]!r} is not that of {architecture} ({expected})"
        )
    field, activations = FAMILIES[architecture].activation_field, FAMILIES[architecture].activations
    activation = config.text(field, activations[0])
    if activation not in activations:
        other = f", by its other name {activations[1]}" if activations[1:] else ""
        raise UnsupportedModel(
            f"{config.where}: {field} {activation[:80]!r}; supported for {architecture}: {activations[0]}{other}"
        )
    return named, architecture


def _num_kv_heads(config: JsonObject, architecture: str, num_heads: int) -> int:
    """`num_key_value_heads`; an explicit null means `num_attention_heads` in every family."""
    absent_default = FAMILIES[architecture].default_num_kv_heads or num_heads
    default = num_heads if config.is_null("num_key_value_heads") else absent_default
    num_kv_heads = config.integer("num_key_value_heads", default, maximum=_MAX_HEADS)
    if num_heads % num_kv_heads != 0:
        absent = "" if config.has("num_key_value_heads") else f", which {architecture} has where the field is absent"
        raise config.error("num_attention_heads", f"a multiple of num_key_value_heads ({num_kv_heads}{absent})")
    return num_kv_heads


def _head_dim(config: JsonObject, default: int) -> int:
    head_dim = config.integer("head_dim", default, minimum=0, maximum=_MAX_HEAD_DIM)
    if head_dim % 2 != 0 or head_dim == 0:
        raise ConfigError(f"{config.where}: head_dim must be even and at least 2, not {head_dim}")
    return head_dim
