"""A model's dimensions and options, from its folder's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.common.kv_layout import KvLayout
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.json_object import JsonObject
from pdserve.models.rope_parameters import RopeParameters

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


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
    """Longest sequence that can be served, prompt and answer."""
    dtype: str
    """Of weights and KV blocks: `float32`, `bfloat16` or `float16`."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @classmethod
    def from_folder(cls, folder: Path, dtype: str = "auto") -> ModelConfig:
        """Read `config.json` and, for the ids that end a text, `generation_config.json`; `auto` is the folder's dtype."""
        if not folder.is_dir():
            raise ConfigError(f"model folder {folder} does not exist")
        config = JsonObject.read(folder / "config.json")
        architecture = _architecture(config)
        hidden_size = config.integer("hidden_size")
        num_heads = config.integer("num_attention_heads")
        num_kv_heads = config.integer("num_key_value_heads", 8 if architecture == "MistralForCausalLM" else num_heads)
        if num_heads % num_kv_heads != 0:
            raise config.error("num_attention_heads", f"a multiple of num_key_value_heads ({num_kv_heads})")
        head_dim = config.integer("head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads)
        if head_dim % 2 != 0:
            raise config.error("head_dim", "even")
        num_layers = config.integer("num_hidden_layers")
        max_positions = config.integer("max_position_embeddings")
        rope = RopeParameters.from_config(config, head_dim, max_positions)
        attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and config.boolean(
            "attention_bias", False
        )
        special_tokens = _special_tokens(folder, config)
        return cls(
            architecture=architecture,
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=config.integer("intermediate_size"),
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            rope=rope,
            tie_word_embeddings=config.boolean("tie_word_embeddings", False),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            output_bias=attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and config.boolean("mlp_bias", False),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_windows=_sliding_windows(config, architecture, num_layers),
            max_position_embeddings=rope.max_positions(max_positions),
            dtype=_dtype(config, dtype),
            eos_token_ids=special_tokens[0],
            bos_token_id=special_tokens[1],
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
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        found = ", ".join(map(str, names)) or "none named"
        raise UnsupportedModel(f"{config.where}: architecture {found}; supported: {', '.join(ARCHITECTURES)}")
    if config.has("quantization_config"):
        raise UnsupportedModel(f"{config.where}: quantized weights (quantization_config)")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"{config.where}: hidden_act {activation!r}; supported: silu")
    return str(names[0])


def _dtype(config: JsonObject, wanted: str) -> str:
    if wanted == "auto":
        name = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
        if name not in TORCH_DTYPES:
            raise UnsupportedModel(f"{config.where}: dtype {name!r}; supported: {', '.join(TORCH_DTYPES)}")
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
    if not config.boolean("use_sliding_window", False) or config.is_null("sliding_window"):
        return (None,) * num_layers
    window = config.integer("sliding_window", 4096)
    layer_types = config.items("layer_types")
    if layer_types is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(layer_types) != num_layers or not set(layer_types) <= {"sliding_attention", "full_attention"}:
        raise config.error("layer_types", f"{num_layers} times sliding_attention or full_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _special_tokens(folder: Path, config: JsonObject) -> tuple[tuple[int, ...], int | None]:
    """Ids that end a text, and the id that begins one; `generation_config.json` knows better than `config.json`."""
    sources = [config]
    if (folder / "generation_config.json").exists():
        sources.insert(0, JsonObject.read(folder / "generation_config.json"))
    ends = next((ids for source in sources if (ids := source.token_ids("eos_token_id"))), ())
    begins = next((ids for source in sources if (ids := source.token_ids("bos_token_id"))), ())
    return ends, begins[0] if begins else None
