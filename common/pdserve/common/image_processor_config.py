"""`ImageProcessorConfig`: how images become pixels of a model, as its `preprocessor_config.json` says."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.common.json_file import read_json_object

FILE = "preprocessor_config.json"
_TYPES = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
SERVED_AS_TEXT = frozenset({"gemma4", "llama4"})
"""`model_type` of models with an encoder of images that is not computed: they take only text."""
MAX_ASPECT_RATIO = 200
_DIGEST_BYTES = 16
_MAX_PATCH = 256
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280
_MOST_PIXELS = 1 << 28
_RESAMPLINGS = range(6)
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of a prompt's images."""

    max_pixels: int = 1 << 27
    """Pixels of one before it is resized."""
    max_images: int | None = None
    max_bytes: int | None = None
    """Bytes of all after they are resized, 3 per pixel."""


@dataclass(frozen=True, slots=True)
class ImageProcessorConfig:
    """Defaults are those of transformers' `Qwen2VLImageProcessor`."""

    patch_size: int = 14
    """Pixels of a patch's side."""
    temporal_patch_size: int = 2
    """Frames of a patch; an image is repeated."""
    merge_size: int = 2
    """Patches of a side that become one token together."""
    min_pixels: int = _MIN_PIXELS
    max_pixels: int = _MAX_PIXELS
    """An image is resized so that its pixels are between the two."""
    resample: int = 3
    """Pillow's number of the filter; 3 is bicubic."""
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, float, float] = _CLIP_MEAN
    image_std: tuple[float, float, float] = _CLIP_STD

    @classmethod
    def read(cls, folder: Path) -> ImageProcessorConfig:
        """Raises: ConfigError naming file, field and value; UnsupportedModel for another image processor."""
        path = folder / FILE
        values = read_json_object(path)
        kind = values.get("image_processor_type", _TYPES[0])
        if kind not in _TYPES:
            raise UnsupportedModel(f"{path}: image_processor_type is {kind!r:.80}; supported: {', '.join(_TYPES)}")
        for step in _STEPS:
            if values.get(step, True) is not True:
                raise UnsupportedModel(f"{path}: {step} is {values[step]!r:.80}; images are served where it is true")
        size = values.get("size") or {}
        if not isinstance(size, Mapping):
            raise ConfigError(f"{path}: size must be an object, not {size!r:.80}")
        lowest, highest = size.get("shortest_edge", _MIN_PIXELS), size.get("longest_edge", _MAX_PIXELS)
        config = cls(
            patch_size=_integer(path, "patch_size", values.get("patch_size", 14), _MAX_PATCH),
            temporal_patch_size=_integer(path, "temporal_patch_size", values.get("temporal_patch_size", 2), 16),
            merge_size=_integer(path, "merge_size", values.get("merge_size", 2), 16),
            min_pixels=_integer(path, "min_pixels", _first(values.get("min_pixels"), lowest), _MOST_PIXELS),
            max_pixels=_integer(path, "max_pixels", _first(values.get("max_pixels"), highest), _MOST_PIXELS),
            resample=_integer(path, "resample", values.get("resample", 3), max(_RESAMPLINGS), minimum=0),
            rescale_factor=_number(path, "rescale_factor", values.get("rescale_factor", 1 / 255)),
            image_mean=_numbers(path, "image_mean", values.get("image_mean", _CLIP_MEAN)),
            image_std=_numbers(path, "image_std", values.get("image_std", _CLIP_STD)),
        )
        if config.max_pixels < max(config.min_pixels, config.factor**2):
            raise ConfigError(
                f"{path}: max_pixels is {config.max_pixels}, at least min_pixels ({config.min_pixels}) and the "
                f"{config.factor**2} pixels of a token are needed"
            )
        return config

    @property
    def factor(self) -> int:
        """Pixels of a token's side, of which both sides of a resized image are multiples."""
        return self.patch_size * self.merge_size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the resized image: multiples of `factor`, close to the same aspect ratio.

        Raises: ValueError for an aspect ratio above `MAX_ASPECT_RATIO`.
        """
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise ValueError(
                f"is {width} x {height}, the sides of an image may differ by a factor of {MAX_ASPECT_RATIO}"
            )
        factor = self.factor
        rounded = round(height / factor) * factor, round(width / factor) * factor
        if rounded[0] * rounded[1] > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            return _multiple(math.floor(height / shrink / factor), factor), _multiple(
                math.floor(width / shrink / factor), factor
            )
        if rounded[0] * rounded[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
        return rounded

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest image. One side of a long image may be rounded up, to a token or to the next one."""
        side = math.sqrt(MAX_ASPECT_RATIO)
        long = math.ceil(side * math.sqrt(self.max_pixels) / self.factor)
        grown = self.min_pixels // self.factor**2 + math.ceil((side + 1) * math.sqrt(self.min_pixels) / self.factor) + 1
        return max(self.max_pixels // self.factor**2, long, grown)

    def identifier(self, data: bytes, grid_thw: tuple[int, int, int]) -> str:
        """See `MultiModalFeatureSpec` for identifier, data and grid_thw."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"image")
        digest.update(json.dumps([asdict(self), grid_thw], sort_keys=True).encode())
        digest.update(data)
        return digest.hexdigest()


def _multiple(count: int, factor: int) -> int:
    return max(1, count) * factor


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


def _integer(path: Path, name: str, value: Any, maximum: int, *, minimum: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ConfigError(f"{path}: {name} must be an integer from {minimum} to {maximum}, not {value!r:.80}")
    return value


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{path}: {name} must be a positive number, not {value!r:.80}")
    return float(value)


def _numbers(path: Path, name: str, value: Any) -> tuple[float, float, float]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ConfigError(f"{path}: {name} must be a list of 3 positive numbers, not {value!r:.80}")
    red, green, blue = (_number(path, name, each) for each in value)
    return red, green, blue
