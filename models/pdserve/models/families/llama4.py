"""Llama 4: text models, and the language models of those with images."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.kernels.cpu.linear import make_linear
from pdserve.models.config.expert_counts import EXPERT_FIELDS, read_experts
from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.config.query_temperature import QueryTemperature
from pdserve.models.config.unrotated_layers import read_unrotated_layers
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import Attention, FeedForward
from pdserve.models.layers.experts_of_scaled_inputs import ExpertsOfScaledInputs
from pdserve.models.layers.mlp import Mlp
from pdserve.models.layers.routing import SigmoidRouter
from pdserve.models.layers.self_attention import SelfAttention
from pdserve.models.layers.sparse_mlp import SparseMlp
from pdserve.models.layers.stacked_experts import stacked_or_single_experts
from pdserve.models.weights.weight_loader import WeightLoader

_KINDS = ("full_attention", "chunked_attention")


@dataclass(frozen=True, kw_only=True)
class Llama4(ModelFamily):
    """Layers with rotary positions attend within chunks; those without attend to everything, with queries that grow with their
    positions. Some layers have experts, whose inputs are scaled, next to one that every token has."""

    model_type = "llama4_text"
    own_fields = EXPERT_FIELDS | words(
        "attention_chunk_size attn_scale attn_temperature_tuning floor_scale interleave_moe_layer_step intermediate_size_mlp "
        "layer_types moe_layers no_rope_layer_interval no_rope_layers use_qk_norm"
    )
    default_num_kv_heads = 8
    default_head_dim = 128
    default_rms_norm_eps = 1e-5
    default_rope_theta = 500000.0
    rotates_neighbours = True
    takes_adapters = False

    num_experts: int
    top_k: int
    """Experts per token."""
    sparse_layers: tuple[bool, ...]
    """Per layer: True if it has experts."""
    dense_size: int
    """Inner size of the MLP of a layer without experts; `intermediate_size` is that of an expert."""
    norms_heads: bool
    """True: queries and keys of layers with rotary positions are normalised, without weights."""

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Llama4:
        num_experts, top_k = read_experts(config, default_experts=16, default_top_k=1)
        if num_experts == 0:
            raise config.error("num_local_experts", "at least 1")
        has_bias = config.boolean("attention_bias", False)
        unrotated = read_unrotated_layers(config, num_layers)
        is_tuned = config.boolean("attn_temperature_tuning", True)
        temperature = QueryTemperature(config.integer("floor_scale", 8192), config.number("attn_scale", 0.1))
        return cls(
            sliding_windows=(None,) * num_layers,
            attention_chunks=cls._chunks(config, num_layers, unrotated),
            unrotated_layers=unrotated,
            temperature=temperature if is_tuned else None,
            qkv_bias=has_bias,
            output_bias=has_bias,
            num_experts=num_experts,
            top_k=top_k,
            sparse_layers=cls._sparse_layers(config, num_layers),
            dense_size=config.integer("intermediate_size_mlp", 16384),
            norms_heads=config.boolean("use_qk_norm", True),
        )

    @classmethod
    def _chunks(cls, config: JsonObject, num_layers: int, unrotated: frozenset[int]) -> tuple[int | None, ...]:
        kinds = config.items("layer_types")
        if kinds is None:
            kinds = [_KINDS[layer not in unrotated] for layer in range(num_layers)]
        if len(kinds) != num_layers or any(kind not in _KINDS for kind in kinds):
            raise config.error("layer_types", f"{num_layers} times {' or '.join(_KINDS)}")
        if config.is_null("attention_chunk_size") and _KINDS[1] in kinds:
            raise config.error("attention_chunk_size", "a number where layers have chunks")
        size = 1 if config.is_null("attention_chunk_size") else config.integer("attention_chunk_size", 8192)
        return tuple(size if kind == _KINDS[1] else None for kind in kinds)

    @classmethod
    def _sparse_layers(cls, config: JsonObject, num_layers: int) -> tuple[bool, ...]:
        found = config.items("moe_layers")
        if found is None:
            step = config.integer("interleave_moe_layer_step", 1)
            return tuple((layer + 1) % step == 0 for layer in range(num_layers))
        if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in found):
            raise config.error("moe_layers", "a list of layer numbers")
        return tuple(layer in found for layer in range(num_layers))

    def loading_refusal(self, quantization: str | None, load_format: str) -> str | None:
        if quantization is not None:
            return f"quantization is {quantization!r}, which the stacked experts of {self.model_type} do not support"
        return None

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        sizes = super().inner_sizes(intermediate_size) if any(self.sparse_layers) else {}
        return sizes if all(self.sparse_layers) else sizes | {"intermediate_size_mlp": self.dense_size}

    def load_attention(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> Attention:
        is_rotated = index not in self.unrotated_layers
        return SelfAttention.load(
            weights, prefix, config.kv_cache_place(index)[1], config.attention_spec(index), config.hidden_size,
            order=config.head_order(index), qkv_bias=self.qkv_bias, output_bias=self.output_bias,
            # a norm without weights is the same before and after a rotation
            qk_norm_eps=config.rms_norm_eps if self.norms_heads and is_rotated else None, norm_names=None,
            scales_queries=self.temperature is not None and not is_rotated,
        )  # fmt: skip

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        prefix, hidden = prefix.removesuffix(".mlp") + ".feed_forward", config.hidden_size
        if not self.sparse_layers[index]:
            return Mlp.load(weights, prefix, hidden, self.dense_size, bias=False)
        size = config.intermediate_size
        router = SigmoidRouter(
            make_linear(weights.tensor(f"{prefix}.router.weight", self.num_experts, hidden)), self.top_k
        )
        shared = Mlp.load(weights, f"{prefix}.shared_expert", hidden, size, bias=False)
        experts = stacked_or_single_experts(weights, prefix, hidden, size, num_experts=self.num_experts, router=router)
        return SparseMlp(router, ExpertsOfScaledInputs(experts), weights.shard.group, shared)


@dataclass(frozen=True, kw_only=True)
class Llama4WithImages(Llama4):
    """The checkpoint has a vision encoder, too, which is not computed: the model takes only text."""

    model_type = "llama4"
    own_fields = Llama4.own_fields | words("vision_config image_processor_config")
    unserved_parts = ("vision_model.", "multi_modal_projector.")
