"""A hash model with images: an image's tokens have contents that its pixels decide, and positions as in M-RoPE."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pdserve.common.request.multimodal import MultiModalFeatureSpec, PlaceholderRange
from pdserve.engine.runner.inputs.mrope_positions import prompt_positions
from pdserve.models.model_inputs import ModelInputs
from tests.support.engine.hash_model import HashModel, logits_of

IMAGE = 63
"""The image token; `prompt_of` has smaller ones."""


class HashImageModel(HashModel):
    """Implements the vision tower, too: `encode` makes the contents of an image's tokens of its pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = self
        self.num_encoded = 0

    def encode(self, data: bytes, grid_thw: tuple[int, int, int]) -> Tensor:
        self.num_encoded += 1
        return torch.from_numpy(contents_of(data)).view(-1, 1)

    def embed_input_ids(self, token_ids: Tensor) -> Tensor:
        return token_ids.view(-1, 1).clone()

    def forward(self, inputs: ModelInputs) -> Tensor:
        ids = inputs.token_ids
        if ids is None:
            assert inputs.inputs_embeds is not None
            ids = inputs.inputs_embeds.view(-1)
        positions = inputs.positions
        if positions.ndim == 2:
            # a number that differs if any axis does
            positions = positions[0] + 3 * (positions[1] - positions[0]) + 7 * (positions[2] - positions[0])
        batch = replace(inputs.batch, positions=positions)
        return super().forward(replace(inputs, batch=batch, token_ids=ids, inputs_embeds=None))


def contents_of(data: bytes) -> np.ndarray:
    """`[tokens]`: what an image's tokens hold; patches and tokens have one pixel."""
    pixels = np.frombuffer(data, np.uint8).reshape(-1, 3).astype(np.int64)
    return 64 + (pixels[:, 0] * 3 + pixels[:, 1] * 2 + pixels[:, 2]) % 900


def image_of(seed: int, height: int, width: int, offset: int) -> MultiModalFeatureSpec:
    """An image whose tokens begin at `offset`."""
    data = np.random.default_rng(seed).integers(0, 256, (height * width, 3), dtype=np.uint8).tobytes()
    identifier = hashlib.blake2b(data + bytes([height, width]), digest_size=16).hexdigest()
    position = PlaceholderRange(offset, height * width)
    return MultiModalFeatureSpec(identifier=identifier, mm_position=position, grid_thw=(1, height, width), data=data)


def image_answer(prompt: Sequence[int], features: Sequence[MultiModalFeatureSpec], count: int) -> list[int]:
    """The reference: `count` tokens after the prompt, without any engine."""
    contents = np.array(prompt)
    for feature in features:
        contents[feature.mm_position.offset : feature.mm_position.end] = contents_of(feature.data)
    axes, delta = prompt_positions(len(prompt), features, merge_size=1)
    positions = axes[0] + 3 * (axes[1] - axes[0]) + 7 * (axes[2] - axes[0])
    output: list[int] = []
    for place in range(len(prompt), len(prompt) + count):
        output.append(int(logits_of(contents, positions).argmax()))
        contents, positions = np.append(contents, output[-1]), np.append(positions, place + delta)
    return output
