"""Whisper: an encoder of sound with a decoder like BART's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.audio_processor_config import FILE
from pdserve.common.errors import UnsupportedModel
from pdserve.kernels.cpu.linear import Linear, make_linear, make_output_head
from pdserve.models.config.family_fields import words
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.encoder_decoder.audio_features import AudioFeatures
from pdserve.models.encoder_decoder.bart import Bart, Defaults, TokenEmbed
from pdserve.models.encoder_decoder.encoder import Encoder
from pdserve.models.encoder_decoder.encoder_decoder import EncoderDecoder
from pdserve.models.encoder_decoder.encoder_decoder_config import EncoderDecoderConfig
from pdserve.models.encoder_decoder.encoder_decoder_family import MakeLoader
from pdserve.models.encoder_decoder.tied_weights import TiedWeights
from pdserve.models.encoder_decoder_step import EncoderTokens
from pdserve.models.json_object import JsonObject
from pdserve.models.weights.weight_loader import WeightLoader
from pdserve.models.weights.weight_source import WeightSource

_KERNEL = 3
"""Places that a convolution reads."""


@dataclass(frozen=True, kw_only=True)
class Whisper(Bart):
    """The norms stand before attention and MLP, one follows the last layer, and keys have no bias."""

    model_type = "whisper"
    own_fields = words(
        """
        d_model encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads encoder_ffn_dim decoder_ffn_dim
        activation_function scale_embedding is_encoder_decoder num_mel_bins max_source_positions max_target_positions
        use_weighted_layer_sum classifier_proj_size apply_spec_augment mask_time_prob mask_time_length mask_time_min_masks
        mask_feature_prob mask_feature_length mask_feature_min_masks median_filter_width forced_decoder_ids
        """
    )
    norms_first = True
    reads_audio = True
    fixed_fields: ClassVar[Mapping[str, object]] = {}
    defaults = Defaults(d_model=384, num_heads=6, num_layers=4, ffn_dim=1536, max_positions=448)
    positions_field = "max_target_positions"
    # `scale_embedding` has no effect in transformers either
    scale_field = None

    @classmethod
    def read_fields(cls, config: JsonObject, common: dict[str, Any]) -> EncoderDecoderConfig:
        audio = common["audio"]
        for name, default, found in (
            ("num_mel_bins", 80, audio.feature_size),
            ("max_source_positions", 1500, audio.num_positions),
        ):
            if config.integer(name, default) != found:
                raise config.error(name, f"{found}, as {FILE} says")
        return super().read_fields(config, common)

    def load(self, config: EncoderDecoderConfig, source: WeightSource, make_loader: MakeLoader) -> EncoderDecoder:
        audio = config.audio
        if audio is None:
            raise UnsupportedModel(f"{source.folder}: {FILE} is needed")
        shape, dtype = (config.vocab_size, config.hidden_size), TORCH_DTYPES[config.dtype]
        tied = TiedWeights.find(
            source, ["model.decoder.embed_tokens.weight"], "proj_out.weight", shape, dtype,
            is_tied=config.tie_word_embeddings,
        )  # fmt: skip
        weights = make_loader(source, tied.ignored)
        embedding, head = tied.load(weights, *shape)
        hidden = config.hidden_size

        def convolution(name: str, channels: int) -> tuple[Tensor, Tensor]:
            prefix = f"model.encoder.{name}"
            return weights.tensor(f"{prefix}.weight", hidden, channels, _KERNEL), weights.tensor(
                f"{prefix}.bias", hidden
            )

        encoder = Encoder(
            _SoundEmbed(
                AudioFeatures(audio),
                *convolution("conv1", audio.feature_size),
                *convolution("conv2", hidden),
                weights.tensor("model.encoder.embed_positions.weight", audio.num_positions, hidden),
            ),
            [self._encoder_layer(weights, index, config) for index in range(config.encoder_layers)],
            self._final_norm(weights, "model.encoder", config),
        )
        positions = weights.tensor("model.decoder.embed_positions.weight", config.derived_max_model_len, hidden)
        layers = [self._decoder_layer(weights, index, config) for index in range(config.num_layers)]
        final_norm = self._final_norm(weights, "model.decoder", config)
        weights.check_all_read()
        return EncoderDecoder(
            config, embedding, encoder, TokenEmbed(embedding, positions), layers, final_norm, make_output_head(head)
        )

    def _projections(self, weights: WeightLoader, name: str, parts: str, hidden: int) -> Linear:
        names = [f"{name}.{part}_proj" for part in parts]
        weight = weights.stack([weights.matrix(each, hidden, hidden) for each in names], names)
        biases = [
            None if part == "k" else weights.tensor(f"{each}.bias", hidden)
            for part, each in zip(parts, names, strict=True)
        ]
        known = next(bias for bias in biases if bias is not None)
        return make_linear(weight, torch.cat([known.new_zeros(hidden) if bias is None else bias for bias in biases]))


@dataclass(frozen=True, slots=True)
class _SoundEmbed:
    """A spectrogram through two convolutions, the second with a stride of 2, and positions."""

    features: AudioFeatures
    weight_1: Tensor
    """`[H, M, 3]`"""
    bias_1: Tensor
    weight_2: Tensor
    """`[H, H, 3]`"""
    bias_2: Tensor
    positions: Tensor
    """`[n, H]`"""

    def __call__(self, token_ids: Tensor, tokens: EncoderTokens) -> Tensor:
        """`[Te, H]`, n for each sound; one at a time, so that its numbers do not depend on the others of the step."""
        return torch.cat([self._embedded(data) for data in tokens.sounds])

    def _embedded(self, data: bytes) -> Tensor:
        mel = self.features(data).to(self.positions).unsqueeze(0)
        x = F.gelu(F.conv1d(mel, self.weight_1, self.bias_1, padding=1))
        x = F.gelu(F.conv1d(x, self.weight_2, self.bias_2, stride=2, padding=1))
        return x[0].t() + self.positions
