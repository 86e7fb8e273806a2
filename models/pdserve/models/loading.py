"""`load_decoder`: a `Decoder` from a model folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from pdserve.common.errors import ConfigError
from pdserve.common.image_processor_config import ImageProcessorConfig
from pdserve.kernels.cpu.linear import make_output_head
from pdserve.kernels.layers.parallel_linear import ParallelLMHead
from pdserve.models.config.draft_head_config import DraftHeadConfig
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.decoder import Decoder
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.eagle_head import load_eagle_head
from pdserve.models.layers.classification_head import ClassificationHead
from pdserve.models.layers.draft_head import DraftHead
from pdserve.models.layers.embedding import make_embedding
from pdserve.models.read_config import read_config
from pdserve.models.vision.vision_tower import load_vision_tower
from pdserve.models.weights.body_weights import BodyWeights, ImageModelWeights, PrefixedWeights
from pdserve.models.weights.dummy_weights import DummyWeights
from pdserve.models.weights.equal_weights import are_equal
from pdserve.models.weights.open_weights import open_weights
from pdserve.models.weights.rank_shard import WHOLE, RankShard
from pdserve.models.weights.weight_loader import LoadProgress, Quantization, WeightLoader, few
from pdserve.models.weights.weight_source import FLOATS, WeightSource

__all__ = ["LoadProgress", "load_decoder"]

log = logging.getLogger(__name__)


def load_decoder(
    folder: Path,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    device: str = "cpu",
    load_format: str = "auto",
    quantization: Quantization = None,
    shard: RankShard = WHOLE,
    progress: Callable[[LoadProgress], None] | None = None,
    hybrid_kv_cache: bool = False,
    draft_head: DraftHeadConfig | None = None,
    served_on: str | None = None,
) -> Decoder:
    """Read a Hugging Face model folder, or one rank's part of it.

    dtype: of weights and KV blocks; `auto` is the folder's. max_model_len: as of `read_config`. load_format: `dummy` reads only
    config.json and draws the weights; `auto` reads them. quantization: of the matrices of attention and MLP; the embedding, the
    output head and routers of experts are in the dtype. shard: this rank's part. progress: called after a weight.
    hybrid_kv_cache, draft_head: see `ModelConfig`. served_on: see `WeightLoader`. Raises: ConfigError, UnsupportedModel.
    """
    config = replace(read_config(folder, dtype, max_model_len), hybrid_kv_cache=hybrid_kv_cache, draft_head=draft_head)
    config.verify_sharding(shard.size, folder)
    if config.unknown_fields:
        log.warning(
            "%s: fields without a known meaning are ignored: %s", folder / "config.json", few(config.unknown_fields)
        )
    rounded = None if quantization == "stored" else quantization
    if config.stored_quantization is not None and (rounded not in (None, "fp8") or load_format == "dummy"):
        given = "load_format is 'dummy'" if rounded is None else f"quantization is {rounded!r}"
        raise ConfigError(f"{given}, but the weights of {folder} are stored quantized")
    if config.stored_quantization is not None and quantization == "fp8":
        quantization = "stored_fp8"
    refusal = config.family.loading_refusal(rounded, load_format)
    if refusal is not None:
        raise ConfigError(refusal)
    with torch.inference_mode():
        if load_format == "dummy":
            weights = DummyWeights.of_model(
                folder,
                TORCH_DTYPES[config.dtype],
                device,
                lambda shapes: _decoder(config, shapes, "meta", quantization, WHOLE, None, served_on or device),
            )
            return _decoder(config, weights, device, quantization, shard, progress, served_on)
        with open_weights(folder, config.stored_quantization) as checkpoint:
            return _decoder(config, _source(config, checkpoint), device, quantization, shard, progress, served_on)


def _source(config: ModelConfig, checkpoint: WeightSource) -> WeightSource:
    """The checkpoint, under the names of a text model's weights."""
    if config.vision is not None or config.family.unserved_parts:
        return ImageModelWeights(checkpoint)
    if (prefix := config.family.published_prefix) is not None:
        checkpoint = PrefixedWeights(checkpoint, prefix)
    return BodyWeights(checkpoint) if config.is_body else checkpoint


def _decoder(
    config: ModelConfig,
    checkpoint: WeightSource,
    device: str,
    quantization: Quantization,
    shard: RankShard,
    progress: Callable[[LoadProgress], None] | None,
    served_on: str | None,
) -> Decoder:
    family, hidden = config.family, config.hidden_size
    embedding_name, head_name = _ends(config, checkpoint, device, shard)
    is_tied = head_name == embedding_name
    ignored = {name for name in checkpoint.names if family.ignores(name, config.num_layers)}
    if config.draft_head is not None and config.draft_head.is_in_checkpoint:
        ignored -= {name for name in ignored if family.is_of_draft_head(name, config.num_layers)}
    if is_tied:
        ignored |= {family.head_name} - {embedding_name}
    weights = WeightLoader(
        checkpoint,
        TORCH_DTYPES[config.dtype],
        device,
        ignored=ignored,
        quantization=quantization,
        shard=shard,
        progress=progress,
        served_on=served_on,
    )
    rows = shard.part(0, config.vocab_size)
    embedding = weights.tensor(embedding_name, config.vocab_size, hidden, part=rows)
    layers = family.linked([family.load_layer(weights, config, index) for index in range(config.num_layers)])
    draft_head: DraftHead | None = None
    if config.draft_head is not None:
        is_in_checkpoint = config.draft_head.is_in_checkpoint
        draft_head = (
            family.load_draft_head(weights, config) if is_in_checkpoint else load_eagle_head(config, device, shard)
        )
    token_inputs = family.load_token_inputs(weights, config)
    final_norm = family.load_norm(weights, family.final_norm_name, config)
    lm_head, classifier = None, None
    if config.classifier is None:
        head = embedding if is_tied else weights.tensor(head_name, config.vocab_size, hidden, part=rows)
        lm_head = make_output_head(head)
    else:
        weight = weights.tensor(family.classifier_name, config.classifier.num_labels, hidden)
        classifier = ClassificationHead(weight, config.classifier.activation)
    tower = None  # not split: each rank has the whole of it, and encodes every image
    if config.vision is not None:
        tower = load_vision_tower(weights, config.vision, ImageProcessorConfig.read(checkpoint.folder), device)
    weights.check_all_read()
    scale = family.embedding_scale(embedding.dtype)
    embed = make_embedding(embedding, scale, shard.group)
    if lm_head is not None and shard.group is not None:
        lm_head = ParallelLMHead(lm_head, shard.group)
    return Decoder(config, embed, layers, final_norm, lm_head, classifier, tower, draft_head, token_inputs)


def _ends(config: ModelConfig, checkpoint: WeightSource, device: str, shard: RankShard) -> tuple[str, str]:
    """The names of the embedding and of the language-model head; the same name if they are tied. Each rank compares its part."""
    names = set(checkpoint.names)
    embedding_name, head_name = config.family.embedding_name, config.family.head_name
    if not config.tie_word_embeddings or config.classifier is not None:
        return embedding_name, head_name
    if embedding_name not in names and head_name in names:
        return head_name, head_name
    if not {embedding_name, head_name} <= names:
        return embedding_name, embedding_name
    shape = (config.vocab_size, config.hidden_size)
    rows = shard.part(0, config.vocab_size)
    head, embedding = (checkpoint.read(name, shape, FLOATS, rows) for name in (head_name, embedding_name))
    if device == "meta":
        return embedding_name, head_name  # no weight is read: the larger of both possible sizes
    is_equal = are_equal(head, embedding, TORCH_DTYPES[config.dtype])
    for compared in (head, embedding):
        checkpoint.release(compared)
    if is_equal if shard.group is None else shard.group.minimum(is_equal):
        return embedding_name, embedding_name
    log.warning(
        "%s: tie_word_embeddings is true, but %s has other numbers than %s and is used, as in transformers",
        checkpoint.folder,
        head_name,
        embedding_name,
    )
    return embedding_name, head_name
