"""`MultiModalFeatureSpec`: an image or the sound of a prompt, by vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from pdserve.common.block_hash import HashedSpan
from pdserve.common.errors import InvalidRequest

MAX_IMAGES = 256
"""Limit of one prompt, among services."""
MAX_IMAGE_BYTES = 12 << 20
"""Pixels of one prompt's images, which travel in one message with its tokens."""
IDENTIFIER = re.compile(r"[0-9a-f]{32}")


class PlaceholderRange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of a prompt in whose places an encoder's output stands."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class MultiModalFeatureSpec(msgspec.Struct, kw_only=True, frozen=True, array_like=True, gc=False):
    """One image, or the sound that an encoder reads in place of tokens."""

    identifier: str
    """32 hex digits of the pixels and of how they were made: equal images have equal ones. Of sound: of its samples."""
    mm_position: PlaceholderRange
    grid_thw: tuple[int, int, int]
    """Patches in time (1), height and width; of sound 1, 1 and its samples."""
    data: bytes = b""
    """The resized image: `[H, W, 3]` bytes of red, green and blue; of sound its samples, float32."""
    modality: str = "image"


def hashed_spans(features: Sequence[MultiModalFeatureSpec], first_token: int = 0) -> list[HashedSpan]:
    """The features for `BlockHasher.extend` over the tokens from `first_token` on."""
    return [
        HashedSpan(
            feature.mm_position.offset - first_token,
            feature.mm_position.end - first_token,
            feature.identifier.encode(),
        )
        for feature in features
        if feature.mm_position.end > first_token
    ]


def images_extras(features: Sequence[MultiModalFeatureSpec]) -> bytes:
    """The part of the request digest's `extras` for images and sound, some of which may be after the last full block."""
    return b"".join(
        feature.modality.encode() + msgspec.msgpack.encode((feature.identifier, feature.mm_position, feature.grid_thw))
        for feature in features
    )


def without_pixels(features: Sequence[MultiModalFeatureSpec]) -> list[MultiModalFeatureSpec]:
    """The features for a worker that receives the KV of their tokens."""
    return [msgspec.structs.replace(feature, data=b"") for feature in features]


def verify_features(
    features: Sequence[MultiModalFeatureSpec],
    prompt_token_ids: Sequence[int],
    *,
    image_token_id: int,
    patch_size: int,
    merge_size: int,
    max_tokens: int,
    needs_pixels: bool = True,
) -> None:
    """Check that images and prompt fit together. Raises: InvalidRequest naming `mm_features`.

    max_tokens: of one image. needs_pixels: False where the KV of the tokens is received.
    """
    end = 0
    for place, feature in enumerate(features):
        where, position, (frames, height, width) = f"mm_features[{place}]", feature.mm_position, feature.grid_thw
        if feature.modality != "image":
            raise _refusal(f"{where}.modality is {feature.modality[:40]!r}; image is supported")
        if not IDENTIFIER.fullmatch(feature.identifier):
            raise _refusal(f"{where}.identifier is {feature.identifier[:40]!r}, 32 hex digits are needed")
        if frames != 1 or min(height, width) < 1 or height % merge_size or width % merge_size:
            raise _refusal(f"{where}.grid_thw is {feature.grid_thw}, 1 and two multiples of {merge_size} are needed")
        num_tokens = height * width // merge_size**2
        if num_tokens > max_tokens:
            raise _refusal(f"{where} has {num_tokens} tokens, an image may have {max_tokens}")
        if position.length != num_tokens or position.offset < end or position.end > len(prompt_token_ids):
            raise _refusal(
                f"{where}.mm_position is {position.offset}, {position.length}: {num_tokens} tokens from {end} to "
                f"{len(prompt_token_ids)} are needed"
            )
        if any(prompt_token_ids[token] != image_token_id for token in range(position.offset, position.end)):
            raise _refusal(f"{where}: prompt_token_ids has other tokens than {image_token_id} in its place")
        num_bytes = 3 * height * width * patch_size**2
        if len(feature.data) != num_bytes and (feature.data or needs_pixels):
            raise _refusal(f"{where}.data has {len(feature.data)} bytes, {num_bytes} are needed")
        end = position.end


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, "mm_features")
