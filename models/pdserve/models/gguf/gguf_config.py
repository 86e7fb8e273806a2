"""`gguf_config`: config.json of a model from a GGUF file's metadata.

Every key of the architecture is read, known to have no effect, or refused, so that no model is computed differently than its
author meant. Source of the keys and what they mean: llama.cpp, where the format's models are defined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.models.gguf.gguf_file import GgufFile

_READ = frozenset(
    {
        "context_length", "embedding_length", "block_count", "feed_forward_length", "expert_count",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scale_linear",
        "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
        "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    }
)  # fmt: skip
_HARMLESS = frozenset(
    {
        "vocab_size",
        "rope.scaling.finetuned",
        "attention.layer_norm_epsilon",  # of norms that these models do not have
        "pooling_type",  # of embeddings, which requests choose
        "tensor_data_layout",
    }
)
_NEUTRAL: Mapping[str, object] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "use_parallel_residual": False,
    "expert_shared_count": 0,
    "expert_weights_scale": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
}
"""Key -> the value with which it changes nothing."""
_DTYPES = {"F32": "float32", "F16": "float16"}
"""Type of most numbers -> dtype in which they are served; bfloat16 for all others."""


class _Model:
    """The metadata of one architecture, by keys without its name."""

    def __init__(self, file: GgufFile, name: str) -> None:
        self.file = file
        self.name = name
        prefix = f"{name}."
        self.keys = [key.removeprefix(prefix) for key in file.metadata.names if key.startswith(prefix)]

    def has(self, key: str) -> bool:
        return self.file.metadata.has(f"{self.name}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """One number, which a file may repeat for every layer. Raises: UnsupportedModel for layers of different sizes."""
        found = self.file.metadata.get(f"{self.name}.{key}")
        if isinstance(found, list):
            if len(set(found)) != 1 or not isinstance(found[0], int):
                raise self.refused(key, "the same for every layer")
            return found[0]
        return self.file.metadata.integer(f"{self.name}.{key}", default, minimum=0)

    def number(self, key: str, default: float | None = None) -> float:
        return self.file.metadata.number(f"{self.name}.{key}", default)

    def text(self, key: str, default: str) -> str:
        return self.file.metadata.text(f"{self.name}.{key}", default)

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    @property
    def head_dim(self) -> int:
        return self.integer(
            "attention.key_length", self.integer("embedding_length") // max(1, self.integer("attention.head_count"))
        )

    def refused(self, key: str, read: str) -> UnsupportedModel:
        name = f"{self.name}.{key}"
        return UnsupportedModel(
            f"{self.file.metadata.where}: {name} is {self.file.metadata.shown(name)}; read is {read}"
        )


@dataclass(frozen=True)
class GgufArchitecture:
    """How the models of one `general.architecture` are written in a model folder."""

    architecture: str
    model_type: str
    keys: frozenset[str] = frozenset()
    """Keys that `fields` reads."""
    fields: Callable[[_Model], dict[str, object]] = field(default=lambda _: {})
    """The family's own fields of config.json."""
    permutes_heads: bool = False
    """True: rows of queries and keys are stored in the order of pairs that are rotated together, 2j and 2j + 1."""
    norm_offset: float = 0.0
    """Was added to the weights of norms."""
    layer_names: Mapping[str, str] = field(default_factory=dict)
    """Names of a layer's parts that differ from those of `gguf_tensors.py`: GGUF's -> the folder's."""
    experts: tuple[str, tuple[str, str, str]] | None = None
    """Name of a layer's mixture of experts, and an expert's gate, up and down."""


def _llama(model: _Model) -> dict[str, object]:
    return {
        "attention_bias": model.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": model.has_tensor("blk.0.ffn_up.bias"),
    }


def _mixtral(model: _Model) -> dict[str, object]:
    return {
        "num_local_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
    }


def _qwen3_moe(model: _Model) -> dict[str, object]:
    return {
        "num_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
        "moe_intermediate_size": model.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _query_scale(model: _Model, layers_of_largest: int) -> float:
    """`query_pre_attn_scalar`, which no key has: the largest model of each generation of Gemma has the mean size of a head."""
    if model.integer("block_count") == layers_of_largest:
        return model.integer("embedding_length") / model.integer("attention.head_count")
    return model.head_dim


def _gemma2(model: _Model) -> dict[str, object]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scale(model, 46),
        "sliding_window": model.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": model.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": model.number("final_logit_softcapping", 30.0),
    }


def _gemma3(model: _Model) -> dict[str, object]:
    rope = {
        "full_attention": _rope(model),
        "sliding_attention": {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", 10000.0)},
    }
    fields: dict[str, object] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scale(model, 62),
        "sliding_window": model.integer("attention.sliding_window"),
        "rope_parameters": rope,
    }
    if model.has("final_logit_softcapping"):
        fields["final_logit_softcapping"] = model.number("final_logit_softcapping")
    return fields


def _phi3(model: _Model) -> dict[str, object]:
    window = model.integer("attention.sliding_window", 0)
    return {
        "partial_rotary_factor": model.integer("rope.dimension_count", model.head_dim) / model.head_dim,
        "sliding_window": window or None,
        "original_max_position_embeddings": model.integer(
            "rope.scaling.original_context_length", model.integer("context_length")
        ),
    }


def _granite(model: _Model) -> dict[str, object]:
    return _llama(model) | {
        "attention_multiplier": model.number("attention.scale", model.head_dim**-0.5),
        "embedding_multiplier": model.number("embedding_scale", 1.0),
        "residual_multiplier": model.number("residual_scale", 1.0),
        "logits_scaling": model.number("logit_scale", 1.0),
    }


def _smollm3(model: _Model) -> dict[str, object]:
    # no key has it
    return _llama(model) | {"no_rope_layer_interval": 4}


_GEMMA_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", fields=_llama, permutes_heads=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": GgufArchitecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", frozenset({"expert_used_count", "expert_feed_forward_length"}), _qwen3_moe,
        experts=("mlp", ("gate_proj", "up_proj", "down_proj")),
    ),
    "gemma2": GgufArchitecture(
        "Gemma2ForCausalLM", "gemma2",
        frozenset({"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}), _gemma2,
        norm_offset=1.0, layer_names=_GEMMA_NAMES,
    ),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM", "gemma3_text",
        frozenset({"attention.sliding_window", "rope.freq_base_swa", "final_logit_softcapping"}), _gemma3,
        norm_offset=1.0, layer_names=_GEMMA_NAMES,
    ),
    "phi3": GgufArchitecture(
        "Phi3ForCausalLM", "phi3", frozenset({"attention.sliding_window"}), _phi3,
        layer_names={"ffn_up": "mlp.gate_up_proj"},
    ),
    "granite": GgufArchitecture(
        "GraniteForCausalLM", "granite",
        frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}), _granite,
        permutes_heads=True,
    ),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", "smollm3", fields=_smollm3, permutes_heads=True),
}  # fmt: skip
"""`general.architecture` -> how it is written in a model folder."""
_MIXTRAL = GgufArchitecture(
    "MixtralForCausalLM", "mixtral", frozenset({"expert_used_count"}), _mixtral, permutes_heads=True,
    experts=("block_sparse_moe", ("w1", "w3", "w2")),
)  # fmt: skip
"""Written as `llama`, with experts."""


def gguf_architecture(file: GgufFile) -> GgufArchitecture:
    """Raises: ConfigError for a file that is no model; UnsupportedModel naming its architecture."""
    metadata = file.metadata
    name = metadata.text("general.architecture")
    kind = metadata.text("general.type", "model")
    if name == "clip" or kind == "mmproj":
        raise UnsupportedModel(
            f"{metadata.where} is a multimodal projector (general.type {kind!r}, general.architecture {name!r}); its images are "
            "not read from GGUF: give the language model's file, which is served for text, or the model's safetensors"
        )
    if kind != "model":
        raise ConfigError(f"{metadata.where} is no model: general.type is {kind[:80]!r}")
    if name not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{metadata.where}: general.architecture is {name[:80]!r}; read from GGUF are {', '.join(_ARCHITECTURES)}"
        )
    has_experts = name == "llama" and metadata.integer("llama.expert_count", 0, minimum=0) > 0
    return _MIXTRAL if has_experts else _ARCHITECTURES[name]


def gguf_config(file: GgufFile, architecture: GgufArchitecture) -> dict[str, object]:
    """The fields of config.json. Raises: ConfigError; UnsupportedModel naming the key that says what is not computed."""
    model = _Model(file, file.metadata.text("general.architecture"))
    _check_keys(model, architecture)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.metadata.where}: it has no matrix token_embd.weight")
    num_heads = model.integer("attention.head_count")
    fields: dict[str, object] = {
        "architectures": [architecture.architecture],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": model.integer("embedding_length"),
        "intermediate_size": model.integer("feed_forward_length"),
        "num_hidden_layers": model.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": model.integer("attention.head_count_kv", num_heads),
        "head_dim": model.head_dim,
        "max_position_embeddings": model.integer("context_length"),
        "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(model),
        "tie_word_embeddings": not model.has_tensor("output.weight"),
        "dtype": _dtype(file),
    }
    return fields | architecture.fields(model)


def _check_keys(model: _Model, architecture: GgufArchitecture) -> None:
    for key in model.keys:
        if key in _READ or key in _HARMLESS or key in architecture.keys:
            continue
        if key not in _NEUTRAL:
            raise UnsupportedModel(
                f"{model.file.metadata.where}: {model.name}.{key[:80]} is {model.file.metadata.shown(f'{model.name}.{key}')}, "
                f"which is not read for {architecture.architecture}"
            )
        if model.file.metadata.get(f"{model.name}.{key}") != _NEUTRAL[key]:
            raise model.refused(key, str(_NEUTRAL[key]))
    if model.integer("attention.value_length", model.head_dim) != model.head_dim:
        raise model.refused("attention.value_length", f"{model.head_dim}, as of keys")
    if architecture.model_type != "phi3" and model.integer("rope.dimension_count", model.head_dim) != model.head_dim:
        raise model.refused("rope.dimension_count", f"{model.head_dim}, the size of a head")


def _rope(model: _Model) -> dict[str, object]:
    """Rotary parameters as config.json has them."""
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": model.number("rope.freq_base", 10000.0)}
    positions = model.integer("context_length")
    original = model.integer("rope.scaling.original_context_length", positions)
    kind = model.text("rope.scaling.type", "linear" if model.has("rope.scale_linear") else "none")
    factor = model.number("rope.scaling.factor", model.number("rope.scale_linear", 1.0))
    # factors of each pair, of which llama.cpp asks no type
    factors = model.file.numbers("rope_freqs.weight")
    short, long = (model.file.numbers(f"rope_factors_{name}.weight") for name in ("short", "long"))
    if short is not None and long is not None:
        stretched = math.sqrt(1 + math.log(positions / original) / math.log(original)) if positions > original else 1.0
        attention = model.number("rope.scaling.attn_factor", stretched)
        return rope | {
            "rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention,
            "original_max_position_embeddings": original,
        }  # fmt: skip
    if factors is not None:
        if kind not in ("none", "linear") or factor != 1.0:
            raise model.refused("rope.scaling.type", "none, next to the tensor rope_freqs.weight")
        return rope | {
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0,
            "original_max_position_embeddings": positions,
        }  # fmt: skip
    if kind == "yarn":
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if model.has(f"rope.scaling.{key}"):
                yarn[name] = model.number(f"rope.scaling.{key}")
        if model.has("rope.scaling.attn_factor"):
            yarn["attention_factor"] = model.number("rope.scaling.attn_factor") * (1 + 0.1 * math.log(max(factor, 1.0)))
        return rope | yarn
    if kind not in ("none", "linear"):
        raise model.refused("rope.scaling.type", "none, linear or yarn, and longrope with the tensors of its factors")
    return rope if factor == 1.0 else rope | {"rope_type": "linear", "factor": factor}


def _dtype(file: GgufFile) -> str:
    """The dtype of the most numbers."""
    numbers: dict[str, int] = {}
    for tensor in file.tensors.values():
        numbers[tensor.type] = numbers.get(tensor.type, 0) + math.prod(tensor.shape)
    most = max(numbers, key=lambda kind: numbers[kind])
    return _DTYPES.get(most, "bfloat16")
