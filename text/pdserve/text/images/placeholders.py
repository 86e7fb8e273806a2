"""`with_images`: a prompt's tokens with room for its images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.multimodal import MultiModalFeatureSpec, PlaceholderRange
from pdserve.text.images.image_processor import FIELD, ProcessedImage


class PromptWithImages(NamedTuple):
    """Tokens of a prompt, and its images in their order."""

    token_ids: list[int]
    features: list[MultiModalFeatureSpec]


def with_images(
    token_ids: Sequence[int],
    images: Sequence[ProcessedImage],
    image_token_id: int,
    field: str,
    images_field: str = FIELD,
) -> PromptWithImages:
    """Repeat the n-th image token once per token of the n-th image.

    field: the caller's name of the prompt. images_field: of the images. Raises: InvalidRequest
    unless there is one image token per image.
    """
    places = [place for place, token_id in enumerate(token_ids) if token_id == image_token_id]
    if len(places) != len(images):
        raise InvalidRequest(
            f"{images_field} has {len(images)} images, and {field} has {len(places)} places for them "
            f"(token {image_token_id})",
            images_field,
        )
    expanded: list[int] = []
    features = []
    previous = 0
    for place, image in zip(places, images, strict=True):
        expanded += token_ids[previous:place]
        position = PlaceholderRange(len(expanded), image.num_tokens)
        features.append(
            MultiModalFeatureSpec(
                identifier=image.identifier, mm_position=position, grid_thw=image.grid_thw, data=image.data
            )
        )
        expanded += [image_token_id] * image.num_tokens
        previous = place + 1
    return PromptWithImages([*expanded, *token_ids[previous:]], features)
