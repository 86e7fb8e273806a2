"""A model's dimensions and options, from its folder's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.common.kv_layout import KvLayout
from pdserve.models.config_fields import Dimensions, check_fields
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.json_object import JsonObject
from pdserve.models.rope_parameters import RopeParameters

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ARCHITECTURES = tuple(MODEL_TYPES)
_OWN_FIELDS: dict[str, tuple[str, ...]] = {
    "LlamaForCausalLM": (),
    "MistralForCausalLM": ("sliding_window", "use_sliding_window"),
    "Qwen2ForCausalLM": ("sliding_window", "use_sliding_window", "layer_types"),
    "Qwen3ForCausalLM": ("sliding_window", "use_sliding_window", "layer_types"),
}
_DEFAULT_KV_HEADS = {"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}
"""Where config.json has no `num_key_value_heads`; other families have as many as heads."""
_LAYER_TYPES = ("sliding_attention", "full_attention")
_MAX_VOCAB = 1 << 24
_MAX_WIDTH = 1 << 20
_MAX_LAYERS = 4096
_MAX_HEADS = 1 << 16
_MAX_HEAD_DIM = 1 << 16
"""Above what any model has; what is within them is held against the weights before anything is computed."""


@dataclass(frozen=True)
class ModelConfig:
    """All that the decoder needs to know; every architecture is a point in this space."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeParameters
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Of the attention's output projection."""
    mlp_bias: bool
    qk_norm: bool
    """Queries and keys are normalised, head by head, before they are rotated."""
    sliding_windows: tuple[int | None, ...]
    """By layer: a token sees this many tokens, itself included; None is all."""
    max_position_embeddings: int
    """Longest sequence that is served without `max_model_len`, prompt and answer."""
    derived_max_model_len: int
    """Longest sequence that `max_model_len` may ask for: what the rotary scaling was made for."""
    dtype: str
    """Of weights and KV blocks: `float32`, `bfloat16` or `float16`."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    unknown_fields: tuple[str, ...]
    """Names in config.json that mean nothing here, and of which no list knows that they mean nothing."""

    @classmethod
    def from_folder(cls, folder: Path, dtype: str = "auto") -> ModelConfig:
        """Read `config.json` and, for the ids that end a text, `generation_config.json`; `auto` is the folder's dtype."""
        if not folder.is_dir():
            raise ConfigError(f"model folder {folder} does not exist")
        config = JsonObject.read(folder / "config.json")
        architecture = _architecture(config)
        hidden_size = config.integer("hidden_size", maximum=_MAX_WIDTH)
        intermediate_size = config.integer("intermediate_size", maximum=_MAX_WIDTH)
        num_layers = config.integer("num_hidden_layers", maximum=_MAX_LAYERS)
        num_heads = config.integer("num_attention_heads", maximum=_MAX_HEADS)
        num_kv_heads = _num_kv_heads(config, architecture, num_heads)
        head_dim = _head_dim(config, architecture, hidden_size // num_heads)
        max_positions = config.integer("max_position_embeddings")
        rope = RopeParameters.from_config(config, head_dim, max_positions)
        rms_norm_eps = config.number("rms_norm_eps", 1e-6)
        windows = _sliding_windows(config, architecture, num_layers)
        derived_max_model_len = rope.derived_max_positions(max_positions)
        own = Dimensions(
            hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, rms_norm_eps, rope.theta,
            derived_max_model_len, None not in windows,
        )  # fmt: skip
        unknown_fields = check_fields(config, architecture, _OWN_FIELDS[architecture], own)
        attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and config.boolean(
            "attention_bias", False
        )
        vocab_size = config.integer("vocab_size", maximum=_MAX_VOCAB)
        special_tokens = _special_tokens(folder, config, vocab_size)
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=intermediate_size,
            rms_norm_eps=rms_norm_eps,
            rope=rope,
            tie_word_embeddings=config.boolean("tie_word_embeddings", False),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            output_bias=attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and config.boolean("mlp_bias", False),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_windows=windows,
            max_position_embeddings=rope.max_positions(max_positions),
            derived_max_model_len=derived_max_model_len,
            dtype=_dtype(config, dtype),
            eos_token_ids=special_tokens[0],
            bos_token_id=special_tokens[1],
            unknown_fields=unknown_fields,
        )

    def kv_layout(self, block_size: int, model_fingerprint: str) -> KvLayout:
        return KvLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=self.dtype,
            model_fingerprint=model_fingerprint,
        )


def _architecture(config: JsonObject) -> str:
    names = config.items("architectures") or []
    supported = ", ".join(ARCHITECTURES)
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        found = ", ".join(str(name)[:80] for name in names[:8]) or "none named"
        kind = str(names[0]).removesuffix("Model") + "ForCausalLM" if len(names) == 1 else ""
        if kind in ARCHITECTURES:
            found += f", which is {kind} without its language-model head"
        raise UnsupportedModel(f"{config.where}: architecture {found}; supported: {supported}")
    architecture = str(names[0])
    model_type = config.text("model_type", MODEL_TYPES[architecture])
    if model_type != MODEL_TYPES[architecture]:
        # transformers goes by the type, and other families have the same tensors for other mathematics
        raise UnsupportedModel(
            f"{config.where}: model_type {model_type[:80]!r} is not that of {architecture} ({MODEL_TYPES[architecture]})"
        )
    _refuse_quantized(config)
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(
            f"{config.where}: hidden_act {activation[:80]!r}; supported: silu, by its other name swish"
        )
    return architecture


def _refuse_quantized(config: JsonObject) -> None:
    quantization = config.child("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method")
        named = f"by {method[:80]}" if isinstance(method, str) else "by a method that it does not name (quant_method)"
        raise UnsupportedModel(
            f"{config.where}: weights are quantized {named} (quantization_config); no quantization method is supported, "
            f"only weights in {', '.join(TORCH_DTYPES)}"
        )


def _num_kv_heads(config: JsonObject, architecture: str, num_heads: int) -> int:
    """An explicit null means as many as heads, in every family."""
    default = num_heads if config.is_null("num_key_value_heads") else _DEFAULT_KV_HEADS.get(architecture, num_heads)
    num_kv_heads = config.integer("num_key_value_heads", default, maximum=_MAX_HEADS)
    if num_heads % num_kv_heads != 0:
        absent = "" if config.has("num_key_value_heads") else f", which {architecture} has where the field is absent"
        raise config.error("num_attention_heads", f"a multiple of num_key_value_heads ({num_kv_heads}{absent})")
    return num_kv_heads


def _head_dim(config: JsonObject, architecture: str, default: int) -> int:
    if architecture == "Qwen3ForCausalLM":
        default = 128
    head_dim = config.integer("head_dim", default, minimum=0, maximum=_MAX_HEAD_DIM)
    if head_dim % 2 != 0 or head_dim == 0:
        raise ConfigError(f"{config.where}: head_dim must be even and at least 2, not {head_dim}")
    return head_dim


def _dtype(config: JsonObject, wanted: str) -> str:
    if wanted == "auto":
        name = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
        if name not in TORCH_DTYPES:
            raise UnsupportedModel(f"{config.where}: dtype {name!r:.80}; supported: {', '.join(TORCH_DTYPES)}")
        return name
    if wanted not in TORCH_DTYPES:
        raise ConfigError(f"dtype must be auto, {', '.join(TORCH_DTYPES)}, not {wanted!r}")
    return wanted


def _sliding_windows(config: JsonObject, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Each family says in its own way which layers have a window."""
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        # Absent means 4096 to this family; an explicit null means none.
        window = None if config.is_null("sliding_window") else config.integer("sliding_window", 4096)
        return (window,) * num_layers
    layer_types = config.items("layer_types")
    if not config.boolean("use_sliding_window", False) or config.is_null("sliding_window"):
        if "sliding_attention" in (layer_types or ()):
            # transformers fails on it: the layer has a window of no width
            raise UnsupportedModel(
                f"{config.where}: layer_types has sliding_attention, but no sliding window is in use"
            )
        return (None,) * num_layers
    window = config.integer("sliding_window", 4096)
    if layer_types is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(layer_types) != num_layers or any(kind not in _LAYER_TYPES for kind in layer_types):
        raise config.error("layer_types", f"{num_layers} times sliding_attention or full_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _special_tokens(folder: Path, config: JsonObject, vocab_size: int) -> tuple[tuple[int, ...], int | None]:
    """Ids that end a text, and the id that begins one; `generation_config.json` knows better than `config.json`.

    Ids outside the vocabulary are left out: no text ends by them, since none is ever sampled.
    """
    sources = [config]
    if (folder / "generation_config.json").exists():
        sources.insert(0, JsonObject.read(folder / "generation_config.json"))
    ends = next((ids for source in sources if (ids := source.token_ids("eos_token_id"))), ())
    begins = next((ids for source in sources if (ids := source.token_ids("bos_token_id"))), ())
    known = tuple(token_id for token_id in ends if token_id < vocab_size)
    return known, begins[0] if begins and begins[0] < vocab_size else None
