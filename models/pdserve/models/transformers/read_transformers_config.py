"""`read_transformers_config`: a model folder's `config.json`, read by the configuration class of `transformers`."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.common.json_file import read_model_config
from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import FamilyLayers
from pdserve.models.config.rope_parameters import DEFAULT_THETA, RopeParameters
from pdserve.models.config.served_dtype import served_dtype
from pdserve.models.config.special_tokens import special_tokens
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.json_object import MAX_INTEGER, JsonObject
from pdserve.models.transformers.attention_interface import IMPLEMENTATION
from pdserve.models.transformers.fixed_rope import fix_rope, original_positions
from pdserve.models.transformers.traced_model import NO_INTERFACE, TracedModel, trace
from pdserve.models.transformers.transformers_config import TransformersConfig
from pdserve.models.weights.quantized.quantization_method import read_quantization

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_OF_LAYERS = {"attn_config", "ffn_config"}
"""Fields with a configuration of their own that describe the layers of a text model."""
_MAX_LAYERS = 4096
_MAX_VOCAB = 1 << 24
_MAX_POSITIONS = 1 << 26
_MAX_EXPERTS = 1 << 16
"""Limits that no known model reaches; the modules of larger ones would take minutes to make."""
_DROPPED = words(
    """
    auto_map quantization_config torch_dtype dtype return_dict use_return_dict output_hidden_states output_attentions
    output_router_logits attn_implementation experts_implementation
    """
)
"""Fields of config.json that are not passed on: code of the checkpoint is never run, and the settings say the dtype."""


def read_transformers_config(folder: Path, dtype: str = "auto") -> TransformersConfig:
    """A model's dimensions and options, with what a trace of its code found.

    dtype: as of `read_config`. Raises: ConfigError, UnsupportedModel; both name the file, and the architecture and the reason.
    """
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist")
    config = JsonObject.of_model(folder)
    model_class = _model_class(config)
    served = served_dtype(config, dtype)
    hf, traced = _traced(json.dumps(read_model_config(folder)), config.where, served)
    original = original_positions(hf)
    longest = min(_positions(hf), original or MAX_INTEGER)
    eos_token_ids, bos_token_id = special_tokens(folder, config, traced.vocab_size)
    spec = traced.specs[0]
    return TransformersConfig(
        architecture=model_class.__name__,
        family=FamilyLayers(tuple(spec.window for spec in traced.specs)),
        vocab_size=traced.vocab_size,
        hidden_size=traced.hidden_size,
        num_layers=len(traced.specs),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=_intermediate_size(hf, traced.hidden_size),
        rms_norm_eps=0.0,
        rope=RopeParameters("default", DEFAULT_THETA),
        tie_word_embeddings=bool(getattr(hf, "tie_word_embeddings", False)),
        max_position_embeddings=longest,
        derived_max_model_len=longest,
        dtype=served,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        unknown_fields=(),
        stored_quantization=read_quantization(config, folder),
        traced=traced,
        hf=hf,
    )


def build_on_meta(hf: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    """The model's modules, with tensors that have a shape and no numbers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(hf), dtype=TORCH_DTYPES[dtype])
    # no row is padded, and a look for such tokens would wait for the device; a few classes refuse None as an attribute
    vars(model.config)["pad_token_id"] = None
    found: PreTrainedModel = model.eval()
    return found


def _model_class(config: JsonObject) -> type[PreTrainedModel]:
    """The class of `transformers` that `model_type` and `architectures` name."""
    names = config.items("architectures") or []
    shown = ", ".join(str(name)[:80] for name in names[:8]) or "none named"
    model_type = config.text("model_type", "")
    own_code = ", and the code that its auto_map names is never run" if config.has("auto_map") else ""
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"{config.where}: architecture {shown}, model_type {model_type[:80]!r}: no native family computes it, nor does "
            f"transformers {transformers.__version__} have it{own_code}"
        )
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[model_type], None)
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if model_class is None or names != [model_class.__name__]:
        expected = "none" if model_class is None else model_class.__name__
        raise UnsupportedModel(
            f"{config.where}: architecture {shown} is not the causal language model of model_type {model_type!r} in "
            f"transformers ({expected}){own_code}"
        )
    found: type[PreTrainedModel] = model_class
    return found


def _configuration(values: dict[str, Any], config: JsonObject, model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    """Raises: ConfigError for values that the class refuses, UnsupportedModel for kinds of models that are not served."""
    given = {name: value for name, value in values.items() if name not in _DROPPED and not name.startswith("_")}
    try:
        hf: PreTrainedConfig = CONFIG_MAPPING[config.text("model_type")].from_dict(given)
        reason = _refusal(hf, model_class)
    except Exception as error:  # each class has checks of its own
        raise ConfigError(f"{config.where}: transformers refuses it: {' '.join(str(error).split())[:300]}") from error
    if reason is not None:
        raise UnsupportedModel(f"{config.where}: {model_class.__name__} is not served: {reason}")
    hf._attn_implementation = IMPLEMENTATION
    hf._experts_implementation = IMPLEMENTATION
    return hf


def _refusal(hf: PreTrainedConfig, model_class: type[PreTrainedModel]) -> str | None:
    """A clause that says why such a model is not served; None if nothing in its configuration says so."""
    if getattr(hf, "is_encoder_decoder", False):
        return "it has an encoder and a decoder"
    if parts := set(hf.sub_configs) - _OF_LAYERS:
        return f"it has parts other than a text model: {', '.join(sorted(parts))}"
    if model_class._is_stateful:
        return "it keeps another state than keys and values"
    if not model_class._can_set_attn_implementation():
        return NO_INTERFACE
    if getattr(hf, "add_cross_attention", False):
        return "it has cross attention"
    num_layers, vocab_size = hf.num_hidden_layers, hf.vocab_size
    if not 0 < num_layers <= _MAX_LAYERS or not 0 < vocab_size <= _MAX_VOCAB:
        return f"it has {num_layers} layers (1 to {_MAX_LAYERS}) and {vocab_size} tokens (1 to {_MAX_VOCAB})"
    experts = {name: value for name, value in vars(hf).items() if "expert" in name and isinstance(value, int)}
    for name, value in experts.items():
        if value > _MAX_EXPERTS:
            return f"{name} is {value}, at most {_MAX_EXPERTS} are possible"
    other = set(getattr(hf, "layer_types", None) or ()) - _LAYER_TYPES
    if other:
        return f"layer_types has {', '.join(sorted(map(str, other)))}"
    if getattr(hf, "max_position_embeddings", None) is None:
        return "it has no max_position_embeddings, so its length is unknown"
    if not 0 < _positions(hf) <= _MAX_POSITIONS:
        return f"max_position_embeddings is {_positions(hf)}, 1 to {_MAX_POSITIONS} are possible"
    shared = getattr(hf, "num_kv_shared_layers", 0)
    return f"num_kv_shared_layers is {shared}: layers share keys and values" if shared else None


@lru_cache(maxsize=8)
def _traced(text: str, where: str, dtype: str) -> tuple[PreTrainedConfig, TracedModel]:
    """The configuration of `transformers`, and what a trace of its model found; kept, since a worker reads both several times.

    text: config.json. Raises: ConfigError, UnsupportedModel.
    """
    values = json.loads(text)
    config = JsonObject(values, where)
    model_class = _model_class(config)
    hf = _configuration(values, config, model_class)
    refused = f"{where}: {model_class.__name__} is not served"
    try:
        model = build_on_meta(hf, dtype)
    except Exception as error:  # any code of any model
        shown = " ".join(str(error).split())[:160]
        raise UnsupportedModel(f"{refused}: its modules cannot be made ({type(error).__name__}: {shown})") from error
    fix_rope(model)
    try:
        return hf, trace(model, hf.num_hidden_layers, _positions(hf) + 1)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{refused}: {error.message}") from error


def _positions(hf: PreTrainedConfig) -> int:
    """`max_position_embeddings`; 0 without it."""
    positions = getattr(hf, "max_position_embeddings", None)
    return positions if isinstance(positions, int) else 0


def _intermediate_size(hf: PreTrainedConfig, hidden_size: int) -> int:
    """Size of the MLP's inner vectors, for estimates of a step's memory."""
    for name in ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"):
        if isinstance(found := getattr(hf, name, None), int) and found > 0:
            return found
    return 4 * hidden_size
