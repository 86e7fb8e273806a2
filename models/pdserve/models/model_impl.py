"""`read_model_config` and `load_model_decoder`: a model by the code that the setting `model_impl` allows.

A native family computes a model faster, and takes adapters, quantization and ranks. Where none fits, or where the setting says so,
the model's own code in `transformers` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import ModelImpl
from pdserve.kernels.layer_plans import LayerSpec
from pdserve.models.config.draft_head_config import DraftHeadConfig
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.encoder_decoder.load_encoder_decoder import (
    encoder_decoder_architecture,
    load_encoder_decoder,
    read_encoder_decoder_config,
)
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.classification_head import ClassificationHead
from pdserve.models.loading import load_decoder
from pdserve.models.model_inputs import ModelInputs
from pdserve.models.read_config import read_config
from pdserve.models.registry import FAMILIES
from pdserve.models.weights.rank_shard import WHOLE, RankShard
from pdserve.models.weights.weight_loader import LoadProgress, Quantization


class AnyDecoder(Protocol):
    """A `Decoder`, an `EncoderDecoder` or a `TransformersDecoder`."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def attention_specs(self) -> Sequence[Sequence[LayerSpec]]: ...

    @property
    def classifier(self) -> ClassificationHead | None: ...

    def forward(self, inputs: ModelInputs) -> Tensor: ...

    def embed_input_ids(self, token_ids: Tensor) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


def read_model_config(folder: Path, dtype: str = "auto", model_impl: ModelImpl = "auto") -> ModelConfig:
    """As `read_config`, by the code that computes the model. Raises: ConfigError, UnsupportedModel."""
    if _has_encoder(folder, model_impl):
        return read_encoder_decoder_config(folder, dtype)
    if _is_native(folder, model_impl):
        return read_config(folder, dtype)
    # a worker with a native family does not spend the time and memory
    from pdserve.models.transformers.read_transformers_config import read_transformers_config

    return read_transformers_config(folder, dtype)


def load_model_decoder(
    folder: Path,
    *,
    dtype: str = "auto",
    model_impl: ModelImpl = "auto",
    max_model_len: int | None = None,
    device: str = "cpu",
    load_format: str = "auto",
    quantization: Quantization = None,
    shard: RankShard = WHOLE,
    progress: Callable[[LoadProgress], None] | None = None,
    hybrid_kv_cache: bool = False,
    draft_head: DraftHeadConfig | None = None,
    served_on: str | None = None,
) -> AnyDecoder:
    """As `load_decoder`, by the code that computes the model. Raises: ConfigError, UnsupportedModel."""
    if _has_encoder(folder, model_impl):
        return load_encoder_decoder(
            folder,
            dtype=dtype,
            device=device,
            load_format=load_format,
            quantization=quantization,
            progress=progress,
        )
    if _is_native(folder, model_impl):
        return load_decoder(
            folder,
            dtype=dtype,
            max_model_len=max_model_len,
            device=device,
            load_format=load_format,
            quantization=quantization,
            shard=shard,
            progress=progress,
            hybrid_kv_cache=hybrid_kv_cache,
            draft_head=draft_head,
            served_on=served_on,
        )
    from pdserve.models.transformers.read_transformers_config import read_transformers_config
    from pdserve.models.transformers.transformers_decoder import TransformersDecoder

    config = read_transformers_config(folder, dtype)
    config.verify_options(None if quantization == "stored" else quantization, enable_lora=False)
    config.verify_sharding(shard.size, folder)
    return TransformersDecoder.load(folder, config, device=device, load_format=load_format, progress=progress)


def _has_encoder(folder: Path, model_impl: ModelImpl) -> bool:
    """True for the families whose decoder attends to an encoder."""
    if model_impl == "transformers" or not folder.is_dir():
        return False
    return encoder_decoder_architecture(JsonObject.of_model(folder)) is not None


def _is_native(folder: Path, model_impl: ModelImpl) -> bool:
    """True where native families read the folder, or refuse it: with `auto` also what transformers cannot compute either."""
    if model_impl != "auto":
        return model_impl == "native"
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist")
    config = JsonObject.of_model(folder)
    names = config.items("architectures") or []
    if len(names) != 1 or not isinstance(names[0], str):
        return True
    family = FAMILIES.get(names[0])
    model_type = config.text("model_type", "" if family is None else family.model_type)
    if family is not None and model_type == family.model_type:
        return True
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if family is not None:  # another family with the same class, but a configuration of its own
        return bool(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) != names[0])
    return names[0] not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
