"""`EncoderDecoder`: a model whose encoder reads the prompt, and whose decoder writes the answer over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.cpu.linear import OutputHead
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.encoder_decoder.cross_decoder_layer import CrossDecoderLayer
from pdserve.models.encoder_decoder.encoder import Encoder
from pdserve.models.encoder_decoder.encoder_decoder_config import EncoderDecoderConfig
from pdserve.models.encoder_decoder.residual_norm import Norm
from pdserve.models.encoder_decoder_step import EncoderTokens
from pdserve.models.layers.classification_head import ClassificationHead
from pdserve.models.model_inputs import ModelInputs


class EncoderDecoder:
    """Computes hidden states of the decoder's tokens, and writes keys and values of both parts into the KV cache.

    The caller holds `torch.inference_mode`, and only one thread at a time calls `forward`.
    """

    is_capturable = False
    """A decode step has two batches, and graphs have one."""
    classifier: ClassificationHead | None = None
    """None: the model generates."""
    attention_specs: tuple[tuple[AttentionSpec, ...], ...] = ((),)
    """None: its plans are in `ModelInputs.encoder_decoder`."""

    def __init__(
        self,
        config: EncoderDecoderConfig,
        embedding: Tensor,
        encoder: Encoder,
        embed: Callable[[Tensor, Tensor], Tensor],
        layers: Sequence[CrossDecoderLayer],
        final_norm: Norm | None,
        head: OutputHead,
        distance_bias: Tensor | None = None,
    ) -> None:
        """embedding: `[V, H]`. embed: token ids and positions `[T]` int64 of the decoder -> `[T, H]`. final_norm: None: the last
        layer's output is normalised. head: with float32 logits. distance_bias: of the decoder's self attention."""
        self.config = config
        self._embedding = embedding
        self._encoder = encoder
        self._embed = embed
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._head = head
        self._distance_bias = distance_bias

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of hidden states and queries."""
        return TORCH_DTYPES[self.config.dtype]

    @property
    def hidden_size(self) -> int:
        """Hidden size H."""
        return self.config.hidden_size

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def embed_input_ids(self, token_ids: Tensor) -> Tensor:
        """`[T]` int64 -> `[T, H]`: rows of the embedding."""
        return self._embedding.index_select(0, token_ids)

    def forward(self, inputs: ModelInputs) -> Tensor:
        """Write this step's keys and values, and return the decoder's last hidden states `[N, H]` of `inputs.output_rows`.

        Those of the encoder's tokens are zeros.

        Raises: ValueError when `inputs` lacks token ids, or the step's two parts.
        """
        step, token_ids = inputs.encoder_decoder, inputs.token_ids
        if step is None or token_ids is None:
            raise ValueError("a model with an encoder needs token_ids and encoder_decoder")
        if step.encoded is not None:
            self._encode(token_ids[step.encoded.rows], step.encoded, inputs.before_layer)
        tokens = step.decoded
        if tokens is None:
            return inputs.read_rows(self._embedding.new_zeros(len(token_ids), self.hidden_size))
        x = self._embed(token_ids if tokens.rows is None else token_ids[tokens.rows], tokens.positions)
        for layer in self._layers:
            if inputs.before_layer is not None:
                inputs.before_layer()
            x = layer.forward(x, tokens, self._distance_bias)
        if self._final_norm is not None:
            x = self._final_norm(x)
        if tokens.rows is not None:
            x = x.new_zeros(len(token_ids), self.hidden_size).index_copy_(0, tokens.rows, x)
        return inputs.read_rows(x)

    def _encode(self, token_ids: Tensor, tokens: EncoderTokens, before_layer: Callable[[], None] | None) -> None:
        hidden = self._encoder.forward(token_ids, tokens, before_layer)
        for layer in self._layers:
            layer.store_encoded(hidden, tokens)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[N, H]` -> `[N, V]` float32."""
        return self._head(hidden)
