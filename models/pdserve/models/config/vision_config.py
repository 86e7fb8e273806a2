"""`VisionConfig`: the vision encoder of a model, as its config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.models.json_object import JsonObject

_TEXT, _VISION = "text_config", "vision_config"
_OF_WHOLE = ("architectures", "model_type", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
"""Fields that the whole model's config.json decides."""
_MAX_WIDTH = 1 << 16
_MAX_LAYERS = 1024


@dataclass(frozen=True)
class VisionConfig:
    """The part of it that others than the encoder read."""

    model_type: str
    """`model_type` of the whole model."""
    image_token_id: int
    """Token that stands once per token of an image."""
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    """Patches of a side that become one token."""
    num_deepstack: int
    """First layers of the language model that get a further output of the encoder."""
    values: Mapping[str, Any] = field(hash=False)
    """`vision_config`, for transformers."""

    @classmethod
    def read(cls, config: JsonObject, model_type: str, hidden_size: int, vocab_size: int) -> VisionConfig:
        """hidden_size, vocab_size: of the language model. Raises: ConfigError."""
        vision = config.child(_VISION)
        if vision is None:
            raise config.error(_VISION, "an object")
        for name, maximum in (("depth", _MAX_LAYERS), ("hidden_size", _MAX_WIDTH), ("intermediate_size", _MAX_WIDTH)):
            vision.integer(name, maximum=maximum)
        if vision.integer("out_hidden_size", maximum=_MAX_WIDTH) != hidden_size:
            raise vision.error("out_hidden_size", f"the language model's hidden_size ({hidden_size})")
        return cls(
            model_type=model_type,
            image_token_id=config.integer("image_token_id", minimum=0, maximum=vocab_size - 1),
            patch_size=vision.integer("patch_size", maximum=256),
            temporal_patch_size=vision.integer("temporal_patch_size", 2, maximum=16),
            merge_size=vision.integer("spatial_merge_size", 2, maximum=16),
            num_deepstack=len(vision.items("deepstack_visual_indexes") or ()),
            values={name: vision.get(name) for name in vision.names},
        )


def language_config(config: JsonObject) -> JsonObject:
    """config.json as that of the language model, with `vision_config` and the fields of the whole.

    Fields of the language model are in `text_config`, or next to the others in older files.
    """
    text = config.child(_TEXT)
    if text is None:
        return config
    values: dict[str, Any] = {name: config.get(name) for name in config.names if name != _TEXT}
    for name in text.names:
        if name not in _OF_WHOLE:
            values[name] = text.get(name)
    # text_config may have defaults of its class, which the whole overrides
    for name in ("dtype", "torch_dtype", "tie_word_embeddings"):
        if values.get(name) is None and text.has(name):
            values[name] = text.get(name)
    return JsonObject(values, config.where)
