"""`ImageProcessor`: a caller's image as the pixels of a model, like transformers' `Qwen2VLImageProcessor`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdserve.common.errors import InvalidRequest
from pdserve.common.image_processor_config import ImageProcessorConfig

if TYPE_CHECKING:
    from PIL.Image import Image

FIELD = "multi_modal_data"
MAX_SOURCE_PIXELS = 1 << 27
"""Limit of an image before it is resized; decoded, it has 3 or 4 bytes per pixel."""
_DIGEST_BYTES = 16


class ProcessedImage(NamedTuple):
    """A resized image."""

    data: bytes
    """`[H, W, 3]` bytes of red, green and blue."""
    grid_thw: tuple[int, int, int]
    """Patches in time (1), height and width."""
    num_tokens: int
    identifier: str
    """See `MultiModalFeatureSpec.identifier`."""


class ImageProcessor:
    """Safe from any thread."""

    def __init__(self, config: ImageProcessorConfig) -> None:
        self._config = config

    def process(self, image: object, where: str) -> ProcessedImage:
        """image: a `PIL.Image.Image`, or an array `[H, W, 3]` of uint8. where: the caller's name of it.

        Raises: InvalidRequest for another value, a size beyond the limits, or a file that cannot be decoded.
        """
        pixels = _pillow_image(image, where)
        width, height = pixels.size
        if not 0 < width * height <= MAX_SOURCE_PIXELS:
            raise InvalidRequest(f"{where} has {width} x {height} pixels, at most {MAX_SOURCE_PIXELS} are read", FIELD)
        try:
            new_height, new_width = self._config.resized(height, width)
        except ValueError as error:
            raise InvalidRequest(f"{where} {error}", FIELD) from error
        try:
            resized = _on_white(pixels).resize((new_width, new_height), resample=self._config.resample)
        except Exception as error:  # Pillow's decoders raise whatever their formats do
            raise InvalidRequest(f"{where} cannot be decoded: {error!s:.200}", FIELD) from error
        data = resized.tobytes()
        config = self._config
        return ProcessedImage(
            data=data,
            grid_thw=(1, new_height // config.patch_size, new_width // config.patch_size),
            num_tokens=new_height * new_width // config.factor**2,
            identifier=self._identifier(data, new_height, new_width),
        )

    def _identifier(self, data: bytes, height: int, width: int) -> str:
        digest = hashlib.blake2b(self._config.digest, digest_size=_DIGEST_BYTES, person=b"image")
        digest.update(height.to_bytes(4, "little") + width.to_bytes(4, "little"))
        digest.update(data)
        return digest.hexdigest()


def _pillow_image(image: object, where: str) -> Image:
    import PIL.Image  # a process without images does not import it

    if isinstance(image, PIL.Image.Image):
        return image
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
            raise InvalidRequest(
                f"{where} is an array {list(image.shape)} of {image.dtype}, [H, W, 3] of uint8 is needed", FIELD
            )
        return PIL.Image.fromarray(np.ascontiguousarray(image))
    raise InvalidRequest(f"{where} is of type {type(image).__name__}; a PIL.Image.Image or an array is needed", FIELD)


def _on_white(image: Image) -> Image:
    """In red, green and blue; what is transparent becomes white."""
    import PIL.Image

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    over = image.convert("RGBA")
    return PIL.Image.alpha_composite(PIL.Image.new("RGBA", over.size, (255, 255, 255, 255)), over).convert("RGB")
