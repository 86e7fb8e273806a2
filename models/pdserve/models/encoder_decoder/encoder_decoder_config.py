"""`EncoderDecoderConfig`: dimensions and options of a model with an encoder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdserve.common.audio_processor_config import AudioProcessorConfig
from pdserve.common.errors import UnsupportedModel
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.models.config.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """Fields of `ModelConfig` are the decoder's; `rope` is not used. `max_position_embeddings` is the length of the encoder's
    prompt, and that of the decoder's tokens."""

    encoder_layers: int
    encoder_heads: int
    encoder_intermediate_size: int
    decoder_prompt_token_ids: tuple[int, ...]
    """Tokens with which the decoder begins: `decoder_start_token_id`, then `forced_bos_token_id` where there is one."""
    pad_token_id: int
    """Stands in the slots of a block that the prompt does not fill; it is not computed."""
    attention_scale: float
    """Factor of `q k^T`."""
    has_distance_bias: bool
    """True: positions are a bias of the self attention."""
    audio: AudioProcessorConfig | None = None
    """How sound becomes the encoder's input; `max_position_embeddings` is then only the decoder's. None: the encoder reads
    tokens."""
    suppressed_token_ids: tuple[int, ...] = ()
    """Tokens that are never sampled."""
    begin_suppressed_token_ids: tuple[int, ...] = ()
    """Tokens that are not sampled first."""

    def attention_spec(self, layer: int) -> AttentionSpec:
        """The decoder's attention to its own tokens, equal in all layers."""
        return self.self_attention_spec

    @property
    def self_attention_spec(self) -> AttentionSpec:
        """The decoder's attention to its own tokens."""
        return self._spec(causal=True, distance_bias=self.has_distance_bias)

    @property
    def cross_attention_spec(self) -> AttentionSpec:
        """The decoder's attention to the encoder's output."""
        return self._spec(causal=False, distance_bias=False)

    def _spec(self, *, causal: bool, distance_bias: bool) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.attention_scale,
            causal=causal,
            distance_bias=distance_bias,
        )

    def verify_sharding(self, size: int, folder: Path) -> None:
        if size > 1:
            raise UnsupportedModel(
                f"tensor_parallel_size is {size}, and {self.architecture} has an encoder; such a model is not split"
            )

    def verify_options(self, quantization: str | None, enable_lora: bool) -> None:
        """Check settings that models with an encoder do not have. Raises: UnsupportedModel naming the setting."""
        if enable_lora:
            raise UnsupportedModel(f"enable_lora is true, and {self.architecture} has an encoder; it takes no adapters")
