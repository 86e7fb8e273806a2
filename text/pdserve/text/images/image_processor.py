"""`ImageProcessor`: a caller's image as the pixels of a model, like transformers' `Qwen2VLImageProcessor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdserve.common.errors import InvalidRequest
from pdserve.common.image_processor_config import SERVED_AS_TEXT, ImageLimits, ImageProcessorConfig
from pdserve.common.json_file import read_model_config
from pdserve.text.images.chat_images import ImageSource
from pdserve.text.images.image_url import OpenedImage, open_image, open_image_url

if TYPE_CHECKING:
    from PIL.Image import Image

FIELD = "multi_modal_data"
_NO_LIMITS = ImageLimits()
_NOTHING: Mapping[str, bytes] = {}
_STRIP_PIXELS = 1 << 20


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

    def __init__(self, config: ImageProcessorConfig, image_token_id: int, limits: ImageLimits = _NO_LIMITS) -> None:
        """image_token_id: stands once per image in a prompt."""
        self._config = config
        self._limits = limits
        self.image_token_id = image_token_id

    @classmethod
    def from_folder(cls, folder: Path, limits: ImageLimits = _NO_LIMITS) -> ImageProcessor | None:
        """None for a model that takes no images. Raises: ConfigError, UnsupportedModel."""
        config = read_model_config(folder)
        image_token_id, is_text = config.get("image_token_id"), config.get("model_type") in SERVED_AS_TEXT
        if "vision_config" not in config or not isinstance(image_token_id, int) or is_text:
            return None
        return cls(ImageProcessorConfig.read(folder), image_token_id, limits)

    def verify_number(self, sources: Sequence[ImageSource], field: str) -> None:
        """Raises: InvalidRequest for more images than a prompt may have."""
        most = self._limits.max_images
        if most is not None and len(sources) > most:
            raise InvalidRequest(f"{field} has {len(sources)} images, at most {most} are allowed", field)

    def process_all(
        self, sources: Sequence[ImageSource], field: str, fetched: Mapping[str, bytes] = _NOTHING
    ) -> list[ProcessedImage]:
        """Images of a prompt. field: the caller's name of them. fetched: files of URLs. Raises: InvalidRequest."""
        self.verify_number(sources, field)
        max_bytes = self._limits.max_bytes
        found: list[ProcessedImage] = []
        num_bytes = 0
        for source in sources:
            image = source.image
            if source.url is not None and source.url in fetched:
                file = open_image(fetched[source.url], source.where, field, self._limits.max_pixels)
                image = _upright(file, source.where, field)
            elif source.url is not None:
                file = open_image_url(source.url, source.where, field, self._limits.max_pixels)
                image = _upright(file, source.where, field)
            found.append(self.process(image, source.where, field))
            num_bytes += len(found[-1].data)
            if max_bytes is not None and num_bytes > max_bytes:
                raise InvalidRequest(
                    f"{source.where}: with it, images have {num_bytes} bytes after they are resized, at most {max_bytes} "
                    "are allowed in a prompt",
                    field,
                )
        return found

    def process(self, image: object, where: str, field: str = FIELD) -> ProcessedImage:
        """image: a `PIL.Image.Image`, or an array `[H, W, 3]` of uint8. where: the caller's name of it, in `field`.

        Raises: InvalidRequest for another value, a size beyond the limits, or a file that cannot be decoded.
        """
        pixels = _pillow_image(image, where, field)
        width, height = pixels.size
        if not 0 < width * height <= self._limits.max_pixels:
            raise InvalidRequest(
                f"{where} has {width} x {height} pixels, at most {self._limits.max_pixels} are read", field
            )
        try:
            new_height, new_width = self._config.resized(height, width)
        except ValueError as error:
            raise InvalidRequest(f"{where} {error}", field) from error
        try:
            resized = _on_white(pixels).resize((new_width, new_height), resample=self._config.resample)
        except Exception as error:  # Pillow's decoders raise whatever their formats do
            raise InvalidRequest(f"{where} cannot be decoded: {error!s:.200}", field) from error
        data, config = resized.tobytes(), self._config
        grid_thw = (1, new_height // config.patch_size, new_width // config.patch_size)
        num_tokens = new_height * new_width // config.factor**2
        return ProcessedImage(data, grid_thw, num_tokens, config.identifier(data, grid_thw))


def _pillow_image(image: object, where: str, field: str) -> Image:
    import PIL.Image  # a process without images does not import it

    if isinstance(image, PIL.Image.Image):
        return image
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
            raise InvalidRequest(
                f"{where} is an array {list(image.shape)} of {image.dtype}, [H, W, 3] of uint8 is needed", field
            )
        return PIL.Image.fromarray(np.ascontiguousarray(image))
    raise InvalidRequest(f"{where} is of type {type(image).__name__}; a PIL.Image.Image or an array is needed", field)


def _upright(file: OpenedImage, where: str, field: str) -> Image:
    """The image of a file, rotated by its EXIF data. Raises: InvalidRequest."""
    from PIL.Image import Transpose

    turn = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }.get(file.orientation)
    try:
        return file.image if turn is None else file.image.transpose(turn)
    except Exception as error:  # as decoders do
        raise InvalidRequest(f"{where} cannot be decoded: {error!s:.200}", field) from error


def _on_white(image: Image) -> Image:
    """In red, green and blue; what is transparent becomes white."""
    import PIL.Image

    if image.mode.startswith("I;16"):
        # Pillow would take values above 255 for white
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    width, height = image.size
    seen = PIL.Image.new("RGB", image.size, None)
    # in strips: Pillow lets no other thread run while it composes, and makes three copies
    num_rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, num_rows):
        over = image.crop((0, top, width, min(top + num_rows, height))).convert("RGBA")
        white = PIL.Image.new("RGBA", over.size, (255, 255, 255, 255))
        seen.paste(PIL.Image.alpha_composite(white, over).convert("RGB"), (0, top))
    return seen
