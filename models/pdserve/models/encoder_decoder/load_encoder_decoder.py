"""`read_encoder_decoder_config` and `load_encoder_decoder`: read a model with an encoder from its folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pdserve.common.audio_processor_config import AudioProcessorConfig
from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.models.config.config_fields import Dimensions, check_fields
from pdserve.models.config.rope_parameters import DEFAULT_THETA, RopeParameters
from pdserve.models.config.served_dtype import served_dtype
from pdserve.models.config.special_tokens import special_tokens
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.encoder_decoder.bart import Bart, MBart
from pdserve.models.encoder_decoder.encoder_decoder import EncoderDecoder
from pdserve.models.encoder_decoder.encoder_decoder_config import EncoderDecoderConfig
from pdserve.models.encoder_decoder.encoder_decoder_family import MAX_VOCAB, EncoderDecoderFamily
from pdserve.models.encoder_decoder.t5 import T5
from pdserve.models.encoder_decoder.whisper import Whisper
from pdserve.models.json_object import JsonObject
from pdserve.models.weights.body_weights import BodyWeights
from pdserve.models.weights.dummy_weights import DummyWeights
from pdserve.models.weights.open_weights import open_weights
from pdserve.models.weights.quantized.quantization_method import read_quantization
from pdserve.models.weights.weight_loader import LoadProgress, Quantization, WeightLoader, few
from pdserve.models.weights.weight_source import WeightSource

log = logging.getLogger(__name__)

ENCODER_DECODERS: Mapping[str, type[EncoderDecoderFamily]] = {
    "BartForConditionalGeneration": Bart,
    "MBartForConditionalGeneration": MBart,
    "T5ForConditionalGeneration": T5,
    "WhisperForConditionalGeneration": Whisper,
}
"""The single entry of `architectures` in config.json -> its family."""
_OTHER_NAMES: Mapping[str, str] = {
    "BartModel": "BartForConditionalGeneration",
    "MBartModel": "MBartForConditionalGeneration",
    "T5WithLMHeadModel": "T5ForConditionalGeneration",
}
"""Architecture of a published checkpoint -> the one that transformers loads it as: bodies with a tied head, and an old name."""


def encoder_decoder_architecture(config: JsonObject) -> str | None:
    """The architecture in `ENCODER_DECODERS`; None for another model."""
    names = config.items("architectures") or []
    named = names[0] if len(names) == 1 and isinstance(names[0], str) else ""
    named = _OTHER_NAMES.get(named, named)
    return named if named in ENCODER_DECODERS else None


def read_encoder_decoder_config(folder: Path, dtype: str = "auto") -> EncoderDecoderConfig:
    """The dimensions and options of the folder's model. Arguments: as `read_config`. Raises: ConfigError, UnsupportedModel."""
    config = JsonObject.of_model(folder)
    architecture = encoder_decoder_architecture(config)
    if architecture is None:
        raise UnsupportedModel(f"{config.where}: supported with an encoder: {', '.join(ENCODER_DECODERS)}")
    family = ENCODER_DECODERS[architecture]
    if (model_type := config.text("model_type", family.model_type)) != family.model_type:
        raise UnsupportedModel(
            f"{config.where}: model_type {model_type[:80]!r} is not that of {architecture} ({family.model_type})"
        )
    if not config.boolean("is_encoder_decoder", True):
        raise UnsupportedModel(f"{config.where}: is_encoder_decoder is false, and {architecture} has an encoder")
    vocab_size = config.integer("vocab_size", maximum=MAX_VOCAB)
    eos_token_ids, bos_token_id = special_tokens(folder, config, vocab_size)
    common: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": vocab_size,
        "rope": RopeParameters("default", DEFAULT_THETA),
        "dtype": served_dtype(config, dtype),
        "eos_token_ids": eos_token_ids,
        "bos_token_id": bos_token_id,
        "is_body": _is_body(config),
        "decoder_prompt_token_ids": () if family.reads_audio else _decoder_prompt(folder, config, vocab_size),
        "pad_token_id": _pad(config, vocab_size),
        "unknown_fields": (),
        "stored_quantization": read_quantization(config, folder),
    }
    if family.reads_audio:
        common |= {"audio": AudioProcessorConfig.read(folder)} | _suppressed(folder, config, vocab_size)
    made = family.read_fields(config, common)
    own = Dimensions(
        made.hidden_size, made.intermediate_size, made.encoder_layers, made.num_heads, made.num_kv_heads, made.head_dim,
        made.rms_norm_eps, DEFAULT_THETA, made.derived_max_model_len, has_windows=False,
    )  # fmt: skip
    return family.read_fields(
        config, common | {"unknown_fields": check_fields(config, architecture, family.own_fields, own)}
    )


def _is_body(config: JsonObject) -> bool:
    named = str((config.items("architectures") or [""])[0])
    if not named.endswith("BartModel"):
        return False
    if not config.boolean("tie_word_embeddings", True):
        raise UnsupportedModel(
            f"{config.where}: architecture {named} has no language-model head, and tie_word_embeddings is false; it is served "
            "where the embedding is the head"
        )
    return True


def _decoder_prompt(folder: Path, config: JsonObject, vocab_size: int) -> tuple[int, ...]:
    """`decoder_start_token_id`, or `bos_token_id` without one, as in transformers; then `forced_bos_token_id`."""
    sources = _sources(folder, config)

    def found(name: str) -> tuple[int, ...]:
        ids = next((ids for source in sources if (ids := source.token_ids(name))), ())
        if any(token_id >= vocab_size for token_id in ids):
            raise config.error(name, f"below vocab_size ({vocab_size})")
        return ids[:1]

    start = found("decoder_start_token_id") or found("bos_token_id")
    if not start:
        raise ConfigError(f"{config.where}: decoder_start_token_id is missing, with which the decoder begins")
    return start + found("forced_bos_token_id")


def _suppressed(folder: Path, config: JsonObject, vocab_size: int) -> dict[str, Any]:
    """Fields of `EncoderDecoderConfig`: `suppress_tokens` and `begin_suppress_tokens`, which `generate` of transformers applies."""
    found: dict[str, Any] = {}
    for name, field in (("suppress_tokens", "suppressed"), ("begin_suppress_tokens", "begin_suppressed")):
        ids = next((ids for source in _sources(folder, config) if (ids := source.token_ids(name))), ())
        found[f"{field}_token_ids"] = tuple(sorted({token_id for token_id in ids if token_id < vocab_size}))
    if len({token_id for ids in found.values() for token_id in ids}) >= vocab_size:
        raise config.error("suppress_tokens", "less than the vocabulary: no token is left")
    return found


def _sources(folder: Path, config: JsonObject) -> list[JsonObject]:
    """The files that say how text is generated; for each field, the first file that has it counts."""
    path = folder / "generation_config.json"
    return [JsonObject.read(path), config] if path.exists() else [config]


def _pad(config: JsonObject, vocab_size: int) -> int:
    ids = config.token_ids("pad_token_id") or (0,)
    return ids[0] if ids[0] < vocab_size else 0


def load_encoder_decoder(
    folder: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    quantization: Quantization = None,
    progress: Callable[[LoadProgress], None] | None = None,
) -> EncoderDecoder:
    """Read the weights. Arguments: as `load_decoder`. Raises: ConfigError, UnsupportedModel."""
    config = read_encoder_decoder_config(folder, dtype)
    if config.unknown_fields:
        log.warning(
            "%s: fields without a known meaning are ignored: %s", folder / "config.json", few(config.unknown_fields)
        )
    load = partial(_load, config, quantization=quantization)
    with torch.inference_mode():
        if load_format == "dummy":
            weights = DummyWeights.of_model(
                folder, TORCH_DTYPES[config.dtype], device, lambda shapes: load(shapes, "meta", None)
            )
            return load(weights, device, progress)
        with open_weights(folder, config.stored_quantization) as checkpoint:
            return load(BodyWeights(checkpoint) if config.is_body else checkpoint, device, progress)


def _load(
    config: EncoderDecoderConfig,
    source: WeightSource,
    device: str,
    progress: Callable[[LoadProgress], None] | None,
    *,
    quantization: Quantization,
) -> EncoderDecoder:
    family = config.family
    assert isinstance(family, EncoderDecoderFamily)
    return family.load(
        config,
        source,
        lambda weights, ignored: WeightLoader(
            weights, TORCH_DTYPES[config.dtype], device, ignored=ignored, quantization=quantization, progress=progress
        ),
    )
