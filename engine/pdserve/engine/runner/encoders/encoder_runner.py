"""`EncoderRunner`: encodes the images of a step, keeps their outputs, and puts them into the places of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from pdserve.common.request.multimodal import MultiModalFeatureSpec
from pdserve.engine.arrays import IntArray
from pdserve.engine.config import EngineConfig
from pdserve.engine.runner.decoder_model import DecoderModel
from pdserve.engine.runner.encoders.encoder_decoder_inputs import EncoderDecoderInputs
from pdserve.engine.runner.inputs.input_batch import InputBatch
from pdserve.engine.scheduler_output import SchedulerOutput
from pdserve.models.model_inputs import ModelInputs


class ImageEncoder(Protocol):
    """A `VisionTower`."""

    def encode(self, data: bytes, grid_thw: tuple[int, int, int]) -> Tensor:
        """`[n, (1 + S) H]`"""


@runtime_checkable
class ImageModel(Protocol):
    """A `Decoder`."""

    @property
    def vision_tower(self) -> ImageEncoder | None:
        """None for a model without images."""

    @property
    def hidden_size(self) -> int:
        """Hidden size H."""


@dataclass(frozen=True, slots=True)
class StepImages:
    """Encoder outputs for I of a step's tokens."""

    rows: Tensor
    """`[I]` int64: tokens of the step."""
    embeds: Tensor
    """`[I, (1 + S) H]`"""


class EncoderRunner:
    """The scheduler decides what is kept: see `EncoderCacheManager`."""

    def __init__(self, model: object, device: torch.device, parts: EncoderDecoderInputs | None = None) -> None:
        """model: a `DecoderModel`; one with images is an `ImageModel`, too. parts: of a model whose encoder reads prompts."""
        self._parts = parts
        self._step: tuple[IntArray, IntArray] = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._model = model if isinstance(model, ImageModel) and model.vision_tower is not None else None
        self._device = device
        self.encoder_cache: dict[str, Tensor] = {}
        """Identifier -> `[n, (1 + S) H]`."""

    @classmethod
    def of_batch(cls, config: EngineConfig, model: DecoderModel, batch: InputBatch, kv_cache: Tensor) -> EncoderRunner:
        """batch: whose steps have these encoders' inputs. kv_cache: of the first KV cache group."""
        return cls(model, kv_cache.device, EncoderDecoderInputs.of_model(config, model, batch, kv_cache))

    def update(self, scheduled: SchedulerOutput) -> None:
        """Drop outputs, then encode. Raises: RuntimeError for images where there is no encoder."""
        for identifier in scheduled.free_encoder_mm_hashes:
            del self.encoder_cache[identifier]
        for feature in scheduled.scheduled_encoder_inputs:
            if self._model is None or self._model.vision_tower is None:
                raise RuntimeError("an image is scheduled, and the model has no encoder")
            self.encoder_cache[feature.identifier] = self._model.vision_tower.encode(feature.data, feature.grid_thw)

    def of_step(
        self,
        features_of_row: Mapping[int, Sequence[MultiModalFeatureSpec]],
        rows: IntArray,
        counts: IntArray,
        num_computed: IntArray,
    ) -> StepImages | None:
        """Begin a step: the outputs for its tokens; None if none is an image's. rows, counts, num_computed `[S]`."""
        self._step = rows, counts
        if not features_of_row or self._parts is not None:
            return None
        places: list[Tensor] = []
        parts: list[Tensor] = []
        start = 0
        for row, count, computed in zip(rows.tolist(), counts.tolist(), num_computed.tolist(), strict=True):
            for feature in features_of_row.get(row, ()):
                position = feature.mm_position
                first, end = max(position.offset, computed), min(position.end, computed + count)
                if first < end:
                    output = self.encoder_cache[feature.identifier]
                    parts.append(output[first - position.offset : end - position.offset])
                    places.append(torch.arange(start + first - computed, start + end - computed))
            start += count
        if not parts:
            return None
        return StepImages(torch.cat(places).to(self._device), torch.cat(parts))

    def placed(self, inputs: ModelInputs, images: StepImages | None) -> ModelInputs:
        """The step's inputs, with these outputs in place of the embeddings of their tokens, which they must have."""
        if self._parts is not None:
            return self._parts.placed(inputs, *self._step)
        if images is None or self._model is None or inputs.inputs_embeds is None:
            return inputs
        embeds, *deepstack = torch.split(images.embeds, self._model.hidden_size, dim=1)
        placed = inputs.inputs_embeds.index_copy_(0, images.rows, embeds)
        return replace(inputs, inputs_embeds=placed, deepstack=deepstack, deepstack_rows=images.rows)
