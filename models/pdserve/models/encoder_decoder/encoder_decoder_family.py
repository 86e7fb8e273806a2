"""`EncoderDecoderFamily`: how one family of models with an encoder reads its configuration and its weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pdserve.common.errors import UnsupportedModel
from pdserve.models.config.model_config import FamilyLayers
from pdserve.models.encoder_decoder.encoder_decoder import EncoderDecoder
from pdserve.models.encoder_decoder.encoder_decoder_config import EncoderDecoderConfig
from pdserve.models.encoder_decoder.inner_mlp import ACTIVATIONS
from pdserve.models.json_object import JsonObject
from pdserve.models.weights.weight_loader import WeightLoader
from pdserve.models.weights.weight_source import WeightSource

MakeLoader = Callable[[WeightSource, frozenset[str]], WeightLoader]
"""(weights, names that may remain unread) -> their loader."""
MAX_VOCAB = 1 << 24
MAX_WIDTH = 1 << 20
MAX_LAYERS = 4096
MAX_HEADS = 1 << 16
"""Upper limits that no known model reaches."""


@dataclass(frozen=True)
class EncoderDecoderFamily(FamilyLayers, ABC):
    """Base class of the families in this folder. A subclass's fields are its options; those of `FamilyLayers` are not used."""

    reads_audio: ClassVar[bool] = False
    """True if the encoder reads sound; the decoder then reads a request's prompt."""

    @classmethod
    @abstractmethod
    def read_fields(cls, config: JsonObject, common: dict[str, Any]) -> EncoderDecoderConfig:
        """Read the family's fields of config.json. common: fields of `EncoderDecoderConfig` that are equal for all families.

        Raises: ConfigError, UnsupportedModel.
        """

    @abstractmethod
    def load(self, config: EncoderDecoderConfig, source: WeightSource, make_loader: MakeLoader) -> EncoderDecoder:
        """Read the weights; the loader checks that none is left unread. Raises: ConfigError, UnsupportedModel."""


def read_activation(config: JsonObject, field: str, default: str) -> str:
    """The activation that the field names, a key of `ACTIVATIONS`. Raises: ConfigError, UnsupportedModel."""
    name = config.text(field, default)
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"{config.where}: {field} is {name[:80]!r}; supported: {', '.join(ACTIVATIONS)}")
    return name
