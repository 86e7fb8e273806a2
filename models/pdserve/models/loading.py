"""Building a `Decoder` from a model folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.kernels.linear import Linear, make_linear
from pdserve.kernels.rms_norm import HeadNorm, RmsNorm
from pdserve.kernels.rotary import pair_neighbours
from pdserve.models.checkpoint import Checkpoint, open_checkpoint
from pdserve.models.config import ModelConfig
from pdserve.models.decoder import Decoder
from pdserve.models.decoder_layer import DecoderLayer
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.finite_weights import verify_finite
from pdserve.models.tied_head import head_is_embedding

log = logging.getLogger(__name__)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NUM_NAMED = 8


@dataclass(frozen=True)
class LoadProgress:
    """Bytes of weights in place, in the dtype they are served in, and the one that was just read."""

    loaded_bytes: int
    total_bytes: int
    name: str


def load_decoder(
    folder: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Callable[[LoadProgress], None] | None = None,
) -> Decoder:
    """Read a Hugging Face model folder; `ConfigError` and `UnsupportedModel` say what is wrong with it."""
    config = ModelConfig.from_folder(folder, dtype)
    if config.unknown_fields:
        log.warning(
            "%s: fields without a known meaning are ignored: %s", folder / "config.json", _few(config.unknown_fields)
        )
    with torch.inference_mode(), open_checkpoint(folder) as checkpoint:
        return _Loader(config, checkpoint, device, progress).decoder()


class _Loader:
    """Reads weights by their names in the checkpoint, fuses those that are multiplied together, and counts."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        device: str,
        progress: Callable[[LoadProgress], None] | None,
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = TORCH_DTYPES[config.dtype]
        self._progress = progress
        self._loaded_bytes = 0
        self._unread = {name for name in checkpoint.names if not name.endswith("rotary_emb.inv_freq")}
        self._embedding_name, self._head_name = self._ends()
        if self._head_name == self._embedding_name:
            self._unread.discard(_HEAD)
        self._total_bytes = sum(torch.Size(checkpoint.shape(name)).numel() for name in self._unread)
        self._total_bytes *= self._dtype.itemsize

    def decoder(self) -> Decoder:
        config = self._config
        embedding = self._tensor(self._embedding_name, config.vocab_size, config.hidden_size)
        layers = [self._layer(index) for index in range(config.num_layers)]
        final_norm = self._norm("model.norm.weight")
        if self._head_name == self._embedding_name:
            lm_head = make_linear(embedding)
        else:
            lm_head = make_linear(self._tensor(self._head_name, config.vocab_size, config.hidden_size))
        if self._unread:
            # A weight that nothing uses means that the model is not what its config.json says.
            raise ConfigError(
                f"{self._checkpoint.folder}: {len(self._unread)} weights have no place: {_few(sorted(self._unread))}"
            )
        return Decoder(config, embedding, layers, final_norm, lm_head)

    def _ends(self) -> tuple[str, str]:
        """The names of the embedding and of the output head: the same name where they are tied."""
        names = set(self._checkpoint.names)
        if not self._config.tie_word_embeddings:
            return _EMBEDDING, _HEAD
        if _EMBEDDING not in names and _HEAD in names:
            return _HEAD, _HEAD
        if not {_EMBEDDING, _HEAD} <= names:
            return _EMBEDDING, _EMBEDDING
        shape = (self._config.vocab_size, self._config.hidden_size)
        head, embedding = (self._checkpoint.read(name, shape) for name in (_HEAD, _EMBEDDING))
        if self._device == "meta":
            return _EMBEDDING, _HEAD  # no weight is read: the larger of both possible sizes
        if head_is_embedding(head, embedding, self._dtype):
            return _EMBEDDING, _EMBEDDING
        log.warning(
            "%s: tie_word_embeddings is true, but %s has other numbers than %s and is used, as in transformers",
            self._checkpoint.folder,
            _HEAD,
            _EMBEDDING,
        )
        return _EMBEDDING, _HEAD

    def _layer(self, index: int) -> DecoderLayer:
        config = self._config
        prefix = f"model.layers.{index}"
        rotated = config.num_heads + config.num_kv_heads
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qk_norm = None
        if config.qk_norm:
            q_weight, k_weight = (
                pair_neighbours(self._tensor(f"{attention}.{name}.weight", config.head_dim), config.head_dim)
                for name in ("q_norm", "k_norm")
            )
            weights = [q_weight.expand(config.num_heads, -1), k_weight.expand(config.num_kv_heads, -1)]
            qk_norm = HeadNorm(torch.cat(weights), config.rms_norm_eps)
        inner, hidden = config.intermediate_size, config.hidden_size
        return DecoderLayer(
            index=index,
            window=config.sliding_windows[index],
            num_rotated_heads=rotated,
            head_dim=config.head_dim,
            input_norm=self._norm(f"{prefix}.input_layernorm.weight"),
            qkv=self._qkv(attention),
            qk_norm=qk_norm,
            output=self._linear(
                [f"{attention}.o_proj"], hidden, config.num_heads * config.head_dim, config.output_bias
            ),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], inner, hidden, config.mlp_bias),
            down=self._linear([f"{mlp}.down_proj"], hidden, inner, config.mlp_bias),
        )

    def _qkv(self, prefix: str) -> Linear:
        config = self._config
        weights, biases = [], []
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
            rows = heads * config.head_dim
            parts = [self._tensor(f"{prefix}.{name}_proj.weight", rows, config.hidden_size)]
            if config.qkv_bias:
                parts.append(self._tensor(f"{prefix}.{name}_proj.bias", rows))
            if name != "v":
                parts = [pair_neighbours(part, config.head_dim) for part in parts]
            weights.append(parts[0])
            biases.extend(parts[1:])
        return make_linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def _linear(self, names: list[str], rows: int, columns: int, has_bias: bool) -> Linear:
        """One layer whose output is the outputs of `names` side by side, each `rows` wide."""
        weights = [self._tensor(f"{name}.weight", rows, columns) for name in names]
        biases = [self._tensor(f"{name}.bias", rows) for name in names] if has_bias else []
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return make_linear(weight, torch.cat(biases) if biases else None)

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._tensor(name, self._config.hidden_size), self._config.rms_norm_eps)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        """A copy on the device, in the served dtype. Raises: ConfigError, also for one with NaN or infinity."""
        source = self._checkpoint.read(name, shape)
        tensor = source.to(self._device, self._dtype, copy=True)
        verify_finite(tensor, source, self._checkpoint.where(name))
        self._unread.discard(name)
        self._loaded_bytes += tensor.nbytes
        if self._progress is not None:
            self._progress(LoadProgress(self._loaded_bytes, self._total_bytes, name))
        return tensor


def _few(names: Sequence[str]) -> str:
    """The first of many names, for a message."""
    rest = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(name[:80] for name in names[:_NUM_NAMED]) + rest
