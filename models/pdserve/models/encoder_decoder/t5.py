"""T5, T5 1.1 and Flan-T5."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from pdserve.common.errors import UnsupportedModel
from pdserve.kernels.cpu.linear import make_output_head
from pdserve.models.config.family_fields import words
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.encoder_decoder.cross_decoder_layer import CrossDecoderLayer
from pdserve.models.encoder_decoder.distance_buckets import DistanceBuckets
from pdserve.models.encoder_decoder.encoder import Encoder, EncoderLayer, PromptEmbed
from pdserve.models.encoder_decoder.encoder_decoder import EncoderDecoder
from pdserve.models.encoder_decoder.encoder_decoder_config import EncoderDecoderConfig
from pdserve.models.encoder_decoder.encoder_decoder_family import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    EncoderDecoderFamily,
    MakeLoader,
)
from pdserve.models.encoder_decoder.inner_mlp import ACTIVATIONS, InnerMlp
from pdserve.models.encoder_decoder.residual_norm import ResidualNorm
from pdserve.models.encoder_decoder.tied_weights import TiedWeights
from pdserve.models.json_object import JsonObject
from pdserve.models.weights.weight_loader import WeightLoader
from pdserve.models.weights.weight_source import WeightSource

_MAX_LEN = 1 << 15
"""Relative positions have no end; the bias of an encoder's prompt takes the square of its length."""
_BIAS = "relative_attention_bias.weight"
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
"""In older checkpoints; the cross attention has no positions."""


@dataclass(frozen=True, kw_only=True)
class T5(EncoderDecoderFamily):
    """Positions are biases of the scores, by buckets of distances; RMS norms before attention and MLP; no biases of projections and
    no scale of scores."""

    model_type = "t5"
    own_fields = words(
        """
        d_model d_kv d_ff num_layers num_decoder_layers num_heads relative_attention_num_buckets relative_attention_max_distance
        dropout_rate layer_norm_epsilon feed_forward_proj is_encoder_decoder dense_act_fn is_gated_act scale_decoder_outputs
        """
    )

    activation: str
    is_gated: bool
    buckets: DistanceBuckets
    scales_output: bool
    """True: the head's input is multiplied by `d_model ** -0.5`, as where the embedding is the head."""

    @classmethod
    def read_fields(cls, config: JsonObject, common: dict[str, Any]) -> EncoderDecoderConfig:
        if common["dtype"] == "float16":
            raise UnsupportedModel(
                f"{config.where}: dtype is float16, whose range the hidden states of {common['architecture']} leave; serve it in "
                "bfloat16 or float32 (setting dtype)"
            )
        hidden_size = config.integer("d_model", 512, maximum=MAX_WIDTH)
        encoder_layers = config.integer("num_layers", 6, maximum=MAX_LAYERS)
        num_layers = config.integer("num_decoder_layers", encoder_layers, maximum=MAX_LAYERS)
        num_heads = config.integer("num_heads", 8, maximum=MAX_HEADS)
        inner_size = config.integer("d_ff", 2048, maximum=MAX_WIDTH)
        activation, is_gated = _activation(config)
        is_tied = config.boolean("tie_word_embeddings", True)
        return EncoderDecoderConfig(
            family=cls(
                (None,) * num_layers,
                activation=activation,
                is_gated=is_gated,
                buckets=_buckets(config),
                scales_output=config.boolean("scale_decoder_outputs", is_tied),
            ),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=config.integer("d_kv", 64, maximum=MAX_WIDTH),
            intermediate_size=inner_size,
            rms_norm_eps=config.number("layer_norm_epsilon", 1e-6),
            # transformers always ties, and uses a head of its own where the checkpoint has one
            tie_word_embeddings=True,
            max_position_embeddings=config.integer("n_positions", 512, maximum=_MAX_LEN),
            derived_max_model_len=_MAX_LEN,
            encoder_layers=encoder_layers,
            encoder_heads=num_heads,
            encoder_intermediate_size=inner_size,
            attention_scale=1.0,
            has_distance_bias=True,
            **common,
        )

    def load(self, config: EncoderDecoderConfig, source: WeightSource, make_loader: MakeLoader) -> EncoderDecoder:
        tied = TiedWeights.find(
            source,
            ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"],
            "lm_head.weight",
            (config.vocab_size, config.hidden_size),
            TORCH_DTYPES[config.dtype],
            is_tied=True,
        )
        weights = make_loader(source, tied.ignored | {_UNUSED})
        embedding, head = tied.load(weights, config.vocab_size, config.hidden_size)
        shape = (self.buckets.num_buckets, config.num_heads)
        of_encoder, of_decoder = (
            weights.tensor(f"{part}.block.0.layer.0.SelfAttention.{_BIAS}", *shape) for part in ("encoder", "decoder")
        )
        embed = _Embed(embedding)
        encoder = Encoder(
            PromptEmbed(embed),
            [self._encoder_layer(weights, f"encoder.block.{index}", config) for index in range(config.encoder_layers)],
            weights.norm("encoder.final_layer_norm.weight", config.hidden_size, config.rms_norm_eps),
            partial(self.buckets.table, of_encoder),
        )
        layers = [
            self._decoder_layer(weights, f"decoder.block.{index}", index, config) for index in range(config.num_layers)
        ]
        final_norm = weights.norm("decoder.final_layer_norm.weight", config.hidden_size, config.rms_norm_eps)
        weights.check_all_read()
        project, factor = make_output_head(head), config.hidden_size**-0.5 if self.scales_output else 1.0
        return EncoderDecoder(
            config, embedding, encoder, embed, layers, final_norm,
            lambda hidden: project(hidden * factor if factor != 1.0 else hidden), self.buckets.causal_table(of_decoder),
        )  # fmt: skip

    def _norm(self, weights: WeightLoader, prefix: str, config: EncoderDecoderConfig) -> ResidualNorm:
        norm = weights.norm(f"{prefix}.layer_norm.weight", config.hidden_size, config.rms_norm_eps)
        return ResidualNorm(norm, is_first=True)

    def _mlp(self, weights: WeightLoader, prefix: str, config: EncoderDecoderConfig) -> InnerMlp:
        hidden, inner, name = config.hidden_size, config.intermediate_size, f"{prefix}.DenseReluDense"
        names = [f"{name}.wi_0", f"{name}.wi_1"] if self.is_gated else [f"{name}.wi"]
        first = weights.column_parallel(names, inner, hidden, bias=False)
        second = weights.row_parallel(f"{name}.wo", hidden, inner, bias=False)
        return InnerMlp(first, second, ACTIVATIONS[self.activation], self.is_gated)

    def _encoder_layer(self, weights: WeightLoader, prefix: str, config: EncoderDecoderConfig) -> EncoderLayer:
        hidden, width, name = config.hidden_size, config.num_heads * config.head_dim, f"{prefix}.layer.0.SelfAttention"
        return EncoderLayer(
            qkv=weights.column_parallel([f"{name}.{part}" for part in "qkv"], width, hidden, bias=False),
            output=weights.row_parallel(f"{name}.o", hidden, width, bias=False),
            attention_norm=self._norm(weights, f"{prefix}.layer.0", config),
            mlp=self._mlp(weights, f"{prefix}.layer.1", config),
            mlp_norm=self._norm(weights, f"{prefix}.layer.1", config),
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
        )

    def _decoder_layer(
        self, weights: WeightLoader, prefix: str, index: int, config: EncoderDecoderConfig
    ) -> CrossDecoderLayer:
        hidden, width = config.hidden_size, config.num_heads * config.head_dim
        own, cross = f"{prefix}.layer.0.SelfAttention", f"{prefix}.layer.1.EncDecAttention"
        return CrossDecoderLayer(
            index=index,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            qkv=weights.column_parallel([f"{own}.{part}" for part in "qkv"], width, hidden, bias=False),
            self_output=weights.row_parallel(f"{own}.o", hidden, width, bias=False),
            self_norm=self._norm(weights, f"{prefix}.layer.0", config),
            cross_q=weights.column_parallel([f"{cross}.q"], width, hidden, bias=False),
            cross_kv=weights.column_parallel([f"{cross}.{part}" for part in "kv"], width, hidden, bias=False),
            cross_output=weights.row_parallel(f"{cross}.o", hidden, width, bias=False),
            cross_norm=self._norm(weights, f"{prefix}.layer.1", config),
            mlp=self._mlp(weights, f"{prefix}.layer.2", config),
            mlp_norm=self._norm(weights, f"{prefix}.layer.2", config),
        )


def _activation(config: JsonObject) -> tuple[str, bool]:
    """(name in `ACTIVATIONS`, True with a gate) of `feed_forward_proj`."""
    given = config.text("feed_forward_proj", "relu")
    name = given.removeprefix("gated-")
    is_gated = name != given
    if is_gated and name == "gelu":
        name = "gelu_new"  # as in transformers, for checkpoints of T5 1.1
    if name not in ACTIVATIONS:
        raise UnsupportedModel(
            f"{config.where}: feed_forward_proj is {given[:80]!r}; supported: {', '.join(ACTIVATIONS)}, and the same after 'gated-'"
        )
    for field, value in (("dense_act_fn", name), ("is_gated_act", is_gated)):
        if config.has(field) and config.get(field) != value:
            raise config.error(field, f"{value!r}, as feed_forward_proj says")
    return name, is_gated


def _buckets(config: JsonObject) -> DistanceBuckets:
    num_buckets = config.integer("relative_attention_num_buckets", 32, minimum=4, maximum=1 << 16)
    max_distance = config.integer("relative_attention_max_distance", 128, maximum=1 << 20)
    if num_buckets % 2:
        raise config.error("relative_attention_num_buckets", "even: half of them are for later tokens")
    if max_distance <= num_buckets // 2:
        raise config.error("relative_attention_max_distance", f"above {num_buckets // 2}, half of the buckets")
    return DistanceBuckets(num_buckets, max_distance)


@dataclass(frozen=True, slots=True)
class _Embed:
    """Embeddings of tokens; positions are biases of the scores."""

    embedding: Tensor
    """`[V, H]`"""

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """`[T]` int64 each -> `[T, H]`."""
        return self.embedding.index_select(0, token_ids)
