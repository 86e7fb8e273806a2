"""BART and mBART."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from pdserve.common.errors import UnsupportedModel
from pdserve.kernels.cpu.linear import Linear, make_output_head
from pdserve.kernels.layers.layer_norm import LayerNorm
from pdserve.models.config.family_fields import words
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.encoder_decoder.cross_decoder_layer import CrossDecoderLayer
from pdserve.models.encoder_decoder.encoder import Encoder, EncoderLayer, PromptEmbed
from pdserve.models.encoder_decoder.encoder_decoder import EncoderDecoder
from pdserve.models.encoder_decoder.encoder_decoder_config import EncoderDecoderConfig
from pdserve.models.encoder_decoder.encoder_decoder_family import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    EncoderDecoderFamily,
    MakeLoader,
    read_activation,
)
from pdserve.models.encoder_decoder.inner_mlp import ACTIVATIONS, InnerMlp
from pdserve.models.encoder_decoder.residual_norm import ResidualNorm
from pdserve.models.encoder_decoder.tied_weights import TiedWeights
from pdserve.models.json_object import JsonObject
from pdserve.models.weights.weight_loader import WeightLoader
from pdserve.models.weights.weight_source import WeightSource

_NORM_EPS = 1e-5
_FIRST_POSITION = 2
"""Row of position 0 in the tables of positions."""
_LOGITS_BIAS = "final_logits_bias"


class Defaults(NamedTuple):
    """Values of fields that a configuration lacks."""

    d_model: int = 1024
    num_heads: int = 16
    num_layers: int = 12
    ffn_dim: int = 4096
    max_positions: int = 1024


@dataclass(frozen=True, kw_only=True)
class Bart(EncoderDecoderFamily):
    """Learned positions, norms after each addition, biases everywhere."""

    model_type = "bart"
    own_fields = words(
        """
        d_model encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads encoder_ffn_dim decoder_ffn_dim
        activation_function scale_embedding is_encoder_decoder normalize_before add_final_layer_norm normalize_embedding
        static_position_embeddings add_bias_logits extra_pos_embeddings
        """
    )
    norms_first: ClassVar[bool] = False
    """True: the input of attention and MLP is normalised, and a norm follows the last layer."""
    fixed_fields: ClassVar[Mapping[str, object]] = {
        "normalize_before": False, "add_final_layer_norm": False, "normalize_embedding": True,
        "static_position_embeddings": False, "add_bias_logits": False, "extra_pos_embeddings": _FIRST_POSITION,
    }  # fmt: skip
    """Fields that older configurations have -> the value that this computation has."""
    defaults: ClassVar[Defaults] = Defaults()
    positions_field: ClassVar[str] = "max_position_embeddings"
    """The field with the number of the decoder's positions."""
    scale_field: ClassVar[str | None] = "scale_embedding"
    """True in a configuration: embeddings of tokens are multiplied by the square root of the hidden size. None: never."""

    activation: str
    embedding_scale_factor: float

    @classmethod
    def read_fields(cls, config: JsonObject, common: dict[str, Any]) -> EncoderDecoderConfig:
        for name, value in cls.fixed_fields.items():
            if config.has(name) and config.get(name) != value:
                raise UnsupportedModel(
                    f"{config.where}: {name} is {config.shown(name)}, and {common['architecture']} is computed with {value!r}"
                )
        defaults = cls.defaults
        hidden_size = config.integer("d_model", defaults.d_model, maximum=MAX_WIDTH)
        heads = {
            name: config.integer(name, defaults.num_heads, maximum=MAX_HEADS)
            for name in ("decoder_attention_heads", "encoder_attention_heads")
        }
        for name, number in heads.items():
            if hidden_size % number:
                raise config.error(name, f"a divisor of d_model ({hidden_size})")
        num_layers = config.integer("decoder_layers", defaults.num_layers, maximum=MAX_LAYERS)
        num_heads = heads["decoder_attention_heads"]
        positions = config.integer(cls.positions_field, defaults.max_positions)
        is_scaled = cls.scale_field is not None and config.boolean(cls.scale_field, False)
        return EncoderDecoderConfig(
            family=cls(
                (None,) * num_layers,
                activation=read_activation(config, "activation_function", "gelu"),
                embedding_scale_factor=math.sqrt(hidden_size) if is_scaled else 1.0,
            ),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            intermediate_size=config.integer("decoder_ffn_dim", defaults.ffn_dim, maximum=MAX_WIDTH),
            rms_norm_eps=_NORM_EPS,
            tie_word_embeddings=config.boolean("tie_word_embeddings", True),
            max_position_embeddings=positions,
            derived_max_model_len=positions,
            encoder_layers=config.integer("encoder_layers", defaults.num_layers, maximum=MAX_LAYERS),
            encoder_heads=heads["encoder_attention_heads"],
            encoder_intermediate_size=config.integer("encoder_ffn_dim", defaults.ffn_dim, maximum=MAX_WIDTH),
            attention_scale=(hidden_size // num_heads) ** -0.5,
            has_distance_bias=False,
            **common,
        )

    def load(self, config: EncoderDecoderConfig, source: WeightSource, make_loader: MakeLoader) -> EncoderDecoder:
        tied = TiedWeights.find(
            source,
            [f"model.{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")],
            "lm_head.weight",
            (config.vocab_size, config.hidden_size),
            TORCH_DTYPES[config.dtype],
            is_tied=config.tie_word_embeddings,
        )
        weights = make_loader(source, tied.ignored)
        embedding, head = tied.load(weights, config.vocab_size, config.hidden_size)
        bias = None
        if _LOGITS_BIAS in source.names:
            bias = weights.tensor(_LOGITS_BIAS, 1, config.vocab_size)[0]
        encoder = Encoder(
            PromptEmbed(self._embed(weights, "model.encoder", embedding, config)),
            [self._encoder_layer(weights, index, config) for index in range(config.encoder_layers)],
            self._final_norm(weights, "model.encoder", config),
        )
        embed = self._embed(weights, "model.decoder", embedding, config)
        layers = [self._decoder_layer(weights, index, config) for index in range(config.num_layers)]
        final_norm = self._final_norm(weights, "model.decoder", config)
        weights.check_all_read()
        return EncoderDecoder(config, embedding, encoder, embed, layers, final_norm, make_output_head(head, bias))

    def _embed(self, weights: WeightLoader, part: str, embedding: Tensor, config: EncoderDecoderConfig) -> TokenEmbed:
        rows = config.derived_max_model_len + _FIRST_POSITION
        positions = weights.tensor(f"{part}.embed_positions.weight", rows, config.hidden_size)
        norm = self._norm(weights, f"{part}.layernorm_embedding", config)
        return TokenEmbed(embedding, positions[_FIRST_POSITION:], self.embedding_scale_factor, norm)

    def _final_norm(self, weights: WeightLoader, part: str, config: EncoderDecoderConfig) -> LayerNorm | None:
        return self._norm(weights, f"{part}.layer_norm", config) if self.norms_first else None

    def _norm(self, weights: WeightLoader, name: str, config: EncoderDecoderConfig) -> LayerNorm:
        weight, bias = (weights.tensor(f"{name}.{part}", config.hidden_size) for part in ("weight", "bias"))
        return LayerNorm(weight, bias, _NORM_EPS)

    def _residual_norm(self, weights: WeightLoader, name: str, config: EncoderDecoderConfig) -> ResidualNorm:
        return ResidualNorm(self._norm(weights, name, config), self.norms_first)

    def _mlp(self, weights: WeightLoader, prefix: str, hidden_size: int, inner_size: int) -> InnerMlp:
        first = weights.column_parallel([f"{prefix}.fc1"], inner_size, hidden_size, bias=True)
        second = weights.row_parallel(f"{prefix}.fc2", hidden_size, inner_size, bias=True)
        return InnerMlp(first, second, ACTIVATIONS[self.activation])

    def _projections(self, weights: WeightLoader, name: str, parts: str, hidden: int) -> Linear:
        """Projections of an attention, side by side. parts: letters of `q`, `k` and `v`."""
        return weights.column_parallel([f"{name}.{part}_proj" for part in parts], hidden, hidden, bias=True)

    def _encoder_layer(self, weights: WeightLoader, index: int, config: EncoderDecoderConfig) -> EncoderLayer:
        prefix, hidden = f"model.encoder.layers.{index}", config.hidden_size
        head_dim = hidden // config.encoder_heads
        return EncoderLayer(
            qkv=self._projections(weights, f"{prefix}.self_attn", "qkv", hidden),
            output=weights.row_parallel(f"{prefix}.self_attn.out_proj", hidden, hidden, bias=True),
            attention_norm=self._residual_norm(weights, f"{prefix}.self_attn_layer_norm", config),
            mlp=self._mlp(weights, prefix, hidden, config.encoder_intermediate_size),
            mlp_norm=self._residual_norm(weights, f"{prefix}.final_layer_norm", config),
            num_heads=config.encoder_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
        )

    def _decoder_layer(self, weights: WeightLoader, index: int, config: EncoderDecoderConfig) -> CrossDecoderLayer:
        prefix, hidden = f"model.decoder.layers.{index}", config.hidden_size
        own, cross = f"{prefix}.self_attn", f"{prefix}.encoder_attn"
        return CrossDecoderLayer(
            index=index,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            qkv=self._projections(weights, own, "qkv", hidden),
            self_output=weights.row_parallel(f"{own}.out_proj", hidden, hidden, bias=True),
            self_norm=self._residual_norm(weights, f"{prefix}.self_attn_layer_norm", config),
            cross_q=self._projections(weights, cross, "q", hidden),
            cross_kv=self._projections(weights, cross, "kv", hidden),
            cross_output=weights.row_parallel(f"{cross}.out_proj", hidden, hidden, bias=True),
            cross_norm=self._residual_norm(weights, f"{prefix}.encoder_attn_layer_norm", config),
            mlp=self._mlp(weights, prefix, hidden, config.intermediate_size),
            mlp_norm=self._residual_norm(weights, f"{prefix}.final_layer_norm", config),
        )


@dataclass(frozen=True, kw_only=True)
class MBart(Bart):
    """As BART, with the norms before attention and MLP, and one after the last layer."""

    model_type = "mbart"
    norms_first = True
    fixed_fields = Bart.fixed_fields | {"normalize_before": True, "add_final_layer_norm": True}  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class TokenEmbed:
    """Embeddings of tokens and of their positions, added and, with a norm, normalised."""

    embedding: Tensor
    """`[V, H]`"""
    positions: Tensor
    """`[n, H]`"""
    scale: float = 1.0
    norm: LayerNorm | None = None

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """`[T]` int64 each -> `[T, H]`."""
        x = self.embedding.index_select(0, token_ids)
        if self.scale != 1.0:
            x = x * self.scale
        x = x + self.positions.index_select(0, positions)
        return x if self.norm is None else self.norm(x)
