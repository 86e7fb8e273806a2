"""Gemma 4: text models, and the language models of those with images and sound."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pdserve.kernels.cpu.linear import make_linear
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.models.config.expert_shape import MAX_EXPERT_SIZE, MAX_EXPERTS
from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.config.rope_of_layer_type import rope_of_layer_type
from pdserve.models.config.rope_parameters import RopeParameters
from pdserve.models.config.sliding_windows import windows_of_types
from pdserve.models.families.gemma2 import Gemma2
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import Attention, DecoderLayer, FeedForward
from pdserve.models.layers.embedding import make_embedding
from pdserve.models.layers.mlp import Mlp
from pdserve.models.layers.mlp_next_to_experts import MlpNextToExperts
from pdserve.models.layers.routing import NormedRouter
from pdserve.models.layers.self_attention import SelfAttention, SharedKeys
from pdserve.models.layers.side_mixer import SideMixer
from pdserve.models.layers.sparse_mlp import SparseMlp
from pdserve.models.layers.stacked_experts import stacked_or_single_experts
from pdserve.models.layers.token_inputs import TokenInput, TokenInputs
from pdserve.models.weights.weight_loader import WeightLoader

_FULL = "full_attention"
_MAX_WIDTH = 1 << 16
_KEY_WEIGHT = re.compile(r"model\.layers\.(\d{1,9})\.self_attn\.[kv]_(?:proj|norm)\.")
_ROPES: Mapping[str, Mapping[str, object]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""Where `rope_parameters` is absent."""


@dataclass(frozen=True, kw_only=True)
class Gemma4(Gemma2):
    """Windows in five of six layers. The others have heads of another size, of which the first pairs are rotated, and perhaps fewer
    KV heads whose keys are values, too. Values are normalised; the stream has a factor after each layer; some models have experts
    next to the MLP."""

    model_type = "gemma4_text"
    own_fields = words(
        "attention_k_eq_v enable_moe_block expert_intermediate_size final_logit_softcapping global_head_dim hidden_activation "
        "hidden_size_per_layer_input layer_types moe_intermediate_size num_experts num_global_key_value_heads num_kv_shared_layers "
        "per_layer_config sliding_window top_k_experts use_bidirectional_attention use_double_wide_mlp vocab_size_per_layer_input"
    )
    norm_offset = 0.0
    qk_norm = True
    takes_adapters = False

    values_are_keys: bool
    """True: in layers without a window."""
    num_experts: int
    """0: layers have only an MLP."""
    top_k: int
    """Experts per token."""
    expert_size: int
    """Inner size I of an expert."""
    token_size: int
    """Numbers P of a token's id that each layer reads; 0: none."""
    token_vocab_size: int
    """How many ids have such numbers."""
    widens_readers: bool
    """True: the MLP of a layer that has no keys is twice as wide."""

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Gemma4:
        if config.get("use_bidirectional_attention") not in (None, False, "vision"):
            raise config.error("use_bidirectional_attention", 'null or "vision", which texts do not notice')
        kinds = ["sliding_attention" if (layer + 1) % 6 else _FULL for layer in range(num_layers - 1)] + [_FULL]
        windows = windows_of_types(config, kinds, default_window=512)
        if windows[-1] is not None:
            raise config.error("layer_types", f"{_FULL} in the last layer")
        full_heads, full_dim = cls._full_heads(config)
        num_kv_heads = config.integer("num_key_value_heads", cls.default_num_kv_heads)
        head_dim = config.integer("head_dim", cls.default_head_dim)
        if config.integer("num_attention_heads") % full_heads:
            raise config.error(
                "num_attention_heads", f"a multiple of the KV heads of layers without a window ({full_heads})"
            )
        has_experts = config.boolean("enable_moe_block", False)
        num_experts = config.integer("num_experts", maximum=MAX_EXPERTS) if has_experts else 0
        bias = config.boolean("attention_bias", False)
        token_size = config.integer("hidden_size_per_layer_input", 256, minimum=0, maximum=_MAX_WIDTH)
        return cls(
            sliding_windows=windows,
            qkv_bias=bias,
            output_bias=bias,
            attention_scale=1.0,
            embedding_multiplier=math.sqrt(config.integer("hidden_size")),
            logits_softcap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else None,
            layer_kv_heads=tuple(full_heads if window is None else num_kv_heads for window in windows),
            layer_head_dims=tuple(full_dim if window is None else head_dim for window in windows),
            values_are_keys=config.boolean("attention_k_eq_v", False),
            num_experts=num_experts,
            top_k=config.integer("top_k_experts", maximum=num_experts) if has_experts else 0,
            expert_size=config.integer("moe_intermediate_size", maximum=MAX_EXPERT_SIZE) if has_experts else 0,
            key_layers=cls._key_layers(config, windows),
            widens_readers=config.boolean("use_double_wide_mlp", False),
            token_size=token_size,
            token_vocab_size=cls._token_vocab_size(config) if token_size else 0,
        )

    @classmethod
    def _key_layers(cls, config: JsonObject, windows: Sequence[int | None]) -> tuple[int, ...]:
        """The last layers use the keys and values of the last one of their kind that has some."""
        num_layers = len(windows)
        first = num_layers - config.integer("num_kv_shared_layers", 0, minimum=0, maximum=num_layers - 1)
        own = {windows[layer] is None: layer for layer in range(first)}
        if any((window is None) not in own for window in windows):
            raise config.error("num_kv_shared_layers", "fewer, so that a layer of each kind has keys of its own")
        return tuple(layer if layer < first else own[windows[layer] is None] for layer in range(num_layers))

    @classmethod
    def _token_vocab_size(cls, config: JsonObject) -> int:
        size, vocab_size = config.integer("vocab_size_per_layer_input", 262144), config.integer("vocab_size")
        if size < vocab_size:
            raise config.error("vocab_size_per_layer_input", f"at least vocab_size ({vocab_size})")
        return size

    @classmethod
    def _full_heads(cls, config: JsonObject) -> tuple[int, int]:
        """KV heads and numbers of a head in layers without a window. Raises: ConfigError."""
        num_kv_heads = config.integer("num_key_value_heads", cls.default_num_kv_heads)
        given = config.child("per_layer_config")
        if given is None:
            if config.boolean("attention_k_eq_v", False) and config.has("num_global_key_value_heads"):
                num_kv_heads = config.integer("num_global_key_value_heads", maximum=_MAX_WIDTH)
            return num_kv_heads, cls._even(config, "global_head_dim", 512)
        # as transformers writes it: layer -> its own values of fields
        num_layers = config.integer("num_hidden_layers")
        kinds = config.items("layer_types") or []
        full = [str(layer) for layer in range(num_layers) if layer < len(kinds) and kinds[layer] == _FULL]
        heads = set()
        for name in given.names:
            of_layer = given.child(name)
            if name not in full or of_layer is None or set(of_layer.names) - {"head_dim", "num_key_value_heads"}:
                raise config.error("per_layer_config", f"head_dim and num_key_value_heads of layers with {_FULL}")
            found = of_layer.integer("num_key_value_heads", num_kv_heads, maximum=_MAX_WIDTH)
            heads.add((found, cls._even(of_layer, "head_dim", config.integer("head_dim", cls.default_head_dim))))
        if set(given.names) != set(full) or len(heads) != 1:
            raise config.error("per_layer_config", f"the same for each layer with {_FULL}")
        return heads.pop()

    @classmethod
    def _even(cls, config: JsonObject, name: str, default: int) -> int:
        size = config.integer(name, default, minimum=2, maximum=_MAX_WIDTH)
        if size % 2:
            raise config.error(name, "even")
        return size

    @classmethod
    def read_rope(cls, config: JsonObject, head_dim: int, max_positions: int) -> RopeParameters:
        return cls._rope(config, _FULL, cls._full_heads(config)[1], max_positions)

    @classmethod
    def read_local_rope(cls, config: JsonObject, head_dim: int, max_positions: int) -> RopeParameters:
        return cls._rope(config, "sliding_attention", head_dim, max_positions)

    @classmethod
    def _rope(cls, config: JsonObject, kind: str, head_dim: int, max_positions: int) -> RopeParameters:
        if not config.has("rope_parameters"):
            config = JsonObject({"rope_parameters": dict(_ROPES)}, config.where)
        return rope_of_layer_type(config, kind, head_dim, max_positions, cls.default_rope_theta)

    @property
    def reads_token_ids(self) -> bool:
        return self.token_size > 0

    def loading_refusal(self, quantization: str | None, load_format: str) -> str | None:
        if quantization is not None and self.num_experts:
            return f"quantization is {quantization!r}, which the stacked experts of {self.model_type} do not support"
        return None

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        sizes = super().inner_sizes(intermediate_size)
        if self.token_size:
            sizes["vocab_size_per_layer_input"] = self.token_vocab_size
        return sizes | ({"moe_intermediate_size": self.expert_size} if self.num_experts else {})

    def load_layer(
        self, weights: WeightLoader, config: ModelConfig, index: int, prefix: str | None = None
    ) -> DecoderLayer:
        layer = super().load_layer(weights, config, index, prefix)
        assert isinstance(layer, DecoderLayer)
        if self.num_experts:
            layer = replace(layer, mlp_norm=None)
        prefix, hidden, size = prefix or f"model.layers.{index}", config.hidden_size, self.token_size
        token_input = None
        if size:
            token_input = TokenInput(
                make_linear(weights.matrix(f"{prefix}.per_layer_input_gate", size, hidden)),
                make_linear(weights.matrix(f"{prefix}.per_layer_projection", hidden, size)),
                self.load_norm(weights, f"{prefix}.post_per_layer_input_norm.weight", config),
            )
        return replace(layer, scale=weights.tensor(f"{prefix}.layer_scalar", 1), token_input=token_input)

    def linked(self, layers: list[DecoderLayer | SideMixer]) -> list[DecoderLayer | SideMixer]:
        """Each kept layer has a place for its keys of a step, which its readers read."""
        shared = {layer: SharedKeys() for layer, owner in enumerate(self.key_layers) if owner != layer}
        shared = {self.key_layers[layer]: keys for layer, keys in shared.items()}
        found: list[DecoderLayer | SideMixer] = []
        for layer, owner in zip(layers, self.key_layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            assert isinstance(layer.attention, SelfAttention)
            found.append(replace(layer, attention=replace(layer.attention, shared=shared.get(owner))))
        return found

    def load_token_inputs(self, weights: WeightLoader, config: ModelConfig) -> TokenInputs | None:
        if not self.token_size:
            return None
        hidden, width = config.hidden_size, config.num_layers * self.token_size
        rows = weights.shard.part(0, self.token_vocab_size)
        table = weights.tensor("model.embed_tokens_per_layer.weight", self.token_vocab_size, width, part=rows)
        scale = float(torch.tensor(self.token_size**0.5, dtype=table.dtype))
        norm = weights.norm("model.per_layer_projection_norm.weight", self.token_size, config.rms_norm_eps)
        return TokenInputs(
            table=make_embedding(table, scale, weights.shard.group),
            projection=make_linear(weights.matrix("model.per_layer_model_projection", width, hidden)),
            projection_scale=hidden**-0.5,
            norm=norm,
            num_layers=config.num_layers,
            factor=2**-0.5,
        )

    def ignores(self, weight: str, num_layers: int) -> bool:
        """Checkpoints may have keys of layers that use those of others."""
        found = _KEY_WEIGHT.match(weight)
        if found is not None and self.key_layers[layer := int(found[1])] != layer:
            return True
        return super().ignores(weight, num_layers)

    def load_attention(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> Attention:
        return SelfAttention.load(
            weights, prefix, config.kv_cache_place(index)[1], config.attention_spec(index), config.hidden_size,
            order=config.head_order(index), qkv_bias=self.qkv_bias, output_bias=self.output_bias,
            qk_norm_eps=config.rms_norm_eps, norms_values=True,
            values_are_keys=self.values_are_keys and self.sliding_windows[index] is None,
            has_keys=self.key_layers[index] == index,
        )  # fmt: skip

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        is_wide = self.widens_readers and self.key_layers[index] != index
        mlp = Mlp.load(
            weights, prefix, config.hidden_size, config.intermediate_size * (1 + is_wide),
            bias=False, activation=self.activations[0],
        )  # fmt: skip
        if not self.num_experts:
            return mlp
        layer, hidden, size = prefix.removesuffix(".mlp"), config.hidden_size, self.expert_size

        def norm(name: str) -> RmsNorm:
            return self.load_norm(weights, f"{layer}.{name}.weight", config)

        scale = weights.tensor(f"{layer}.router.scale", hidden, dtype=torch.float32)
        router = NormedRouter(
            RmsNorm(scale * hidden**-0.5, config.rms_norm_eps),
            make_linear(weights.tensor(f"{layer}.router.proj.weight", self.num_experts, hidden)),
            self.top_k,
            weights.tensor(f"{layer}.router.per_expert_scale", self.num_experts, dtype=torch.float32),
        )
        experts = stacked_or_single_experts(
            weights, layer, hidden, size, num_experts=self.num_experts, router=router, activation=self.activations[0],
            outputs_first=True,
        )  # fmt: skip
        return MlpNextToExperts(
            mlp_norm=norm("pre_feedforward_layernorm"),
            mlp=mlp,
            mlp_post_norm=norm("post_feedforward_layernorm_1"),
            experts=SparseMlp(router, experts, weights.shard.group, input_norm=norm("pre_feedforward_layernorm_2")),
            experts_post_norm=norm("post_feedforward_layernorm_2"),
        )


@dataclass(frozen=True, kw_only=True)
class Gemma4WithOtherParts(Gemma4):
    """The checkpoint has encoders of images and perhaps of sound, too, which are not computed: the model takes only text."""

    model_type = "gemma4"
    own_fields = Gemma4.own_fields | words("vision_config audio_config vision_soft_tokens_per_image")
    unserved_parts = ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.")
