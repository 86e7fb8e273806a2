"""Conversations about pictures as tensors: for training, all pictures of a batch in one size; for transformers, in any."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from demo_image_model.conversations import Example
from demo_image_model.pictures import COLOURS, SHAPES, Picture, size
from demo_model.chat import ChatEncoder
from pdserve.common.image_processor_config import ImageProcessorConfig

PIXELS = ImageProcessorConfig(
    patch_size=8,
    merge_size=2,
    min_pixels=2304,
    max_pixels=4096,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.25, 0.25, 0.25),
)
"""A picture has 9 to 16 tokens."""
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PIXELS.patch_size,
    "merge_size": PIXELS.merge_size,
    "temporal_patch_size": PIXELS.temporal_patch_size,
    "min_pixels": PIXELS.min_pixels,
    "max_pixels": PIXELS.max_pixels,
    "image_mean": list(PIXELS.image_mean),
    "image_std": list(PIXELS.image_std),
}

Side = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class Rows:
    """B conversations of at most T tokens, padded at their ends."""

    input_ids: Tensor
    """`[B, T]`"""
    positions: Tensor
    """`[3, B, T]`: time, height and width of the rotary embedding."""
    is_real: Tensor
    is_answer: Tensor
    is_image: Tensor
    """Each `[B, T]` of bool."""


@dataclass(frozen=True)
class Pictures:
    """N pictures of one size."""

    pixels: Tensor
    """`[N, H, W, 3]` of uint8."""
    names: Tensor
    """`[N, 2]`: places of the picture's colour and shape in `COLOURS` and `SHAPES`."""


@dataclass(frozen=True)
class Batch:
    """Rows, and the pictures of those that have one."""

    rows: Rows
    pictures: Pictures


class Batches:
    """Examples as arguments of the model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.encoder = ChatEncoder(tokenizer, prompt_weight=0.0)
        self._processor = Qwen2VLImageProcessorPil(**PREPROCESSOR)
        (self._image_id,) = self.encoder.ids("<|image_pad|>")

    def make(self, examples: Sequence[Example], side: Side) -> Batch:
        """side: pixels of all pictures, after they are resized."""
        pictures = [each.picture for each in examples if each.picture is not None]
        grid = (side[0] // PIXELS.factor, side[1] // PIXELS.factor)
        return Batch(self._rows(examples, [grid] * len(pictures)), self.pictures(pictures, side))

    def pictures(self, pictures: Sequence[Picture], side: Side) -> Pictures:
        """side: see `make`."""
        resized = [np.asarray(each.image.resize(side[::-1], Image.Resampling.BICUBIC)) for each in pictures]
        colours, shapes = list(COLOURS), list(SHAPES)
        names = [(colours.index(each.colour), shapes.index(each.shape)) for each in pictures]
        pixels = torch.from_numpy(np.stack(resized)) if resized else torch.zeros(0, *side, 3, dtype=torch.uint8)
        return Pictures(pixels, torch.tensor(names).view(-1, 2))

    def for_transformers(self, examples: Sequence[Example]) -> tuple[dict[str, Any], Tensor]:
        """Arguments of the model, with pixels by transformers' own processor; and `[B, T]`: which tokens are answers."""
        images = [each.picture.image for each in examples if each.picture is not None]
        given: dict[str, Any] = dict(self._processor(images, return_tensors="pt")) if images else {}
        merge = PIXELS.merge_size
        grids = given["image_grid_thw"].tolist() if images else []
        rows = self._rows(examples, [(height // merge, width // merge) for _, height, width in grids])
        given |= {"input_ids": rows.input_ids, "attention_mask": rows.is_real.long()}
        return given | {"mm_token_type_ids": rows.is_image.int()}, rows.is_answer

    def _rows(self, examples: Sequence[Example], grids: Sequence[Side]) -> Rows:
        """grids: tokens of each picture's height and width."""
        left = iter(grids)
        made: list[tuple[list[int], list[tuple[int, int, int]], list[bool]]] = []
        for each in examples:
            ids: list[int] = []
            places: list[tuple[int, int, int]] = []
            marks: list[bool] = []
            place = 0
            for token, weight in zip(*self.encoder.encode(each.messages), strict=True):
                if token == self._image_id:
                    height, width = next(left)
                    new = [(place, place + row, place + column) for row in range(height) for column in range(width)]
                    place += max(height, width)
                else:
                    new = [(place, place, place)]
                    place += 1
                ids += [token] * len(new)
                places += new
                marks += [weight > 0] * len(new)
            made.append((ids, places, marks))
        width = max(len(ids) for ids, _, _ in made)
        input_ids = torch.zeros(len(made), width, dtype=torch.long)
        positions = torch.zeros(len(made), width, 3, dtype=torch.long)
        is_real, is_answer = (torch.zeros(len(made), width, dtype=torch.bool) for _ in range(2))
        for number, (ids, places, marks) in enumerate(made):
            input_ids[number, : len(ids)] = torch.tensor(ids)
            positions[number, : len(ids)] = torch.tensor(places)
            is_answer[number, : len(ids)] = torch.tensor(marks)
            is_real[number, : len(ids)] = True
        return Rows(input_ids, positions.permute(2, 0, 1), is_real, is_answer, input_ids == self._image_id)


def resized_side(rng: random.Random, ratio: float) -> Side:
    """The size that the processor gives to some picture of this ratio of sides."""
    width, height = size(rng, ratio)
    return PIXELS.resized(height, width)
