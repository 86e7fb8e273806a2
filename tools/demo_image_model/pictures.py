"""Pictures of one shape in one colour, drawn with a seeded generator."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

Colour = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""
Point = tuple[float, float]

# A shape has a colour between those of its name, the first of which is the plainest.
COLOURS: dict[str, tuple[Colour, ...]] = {
    "red": ((255, 0, 0), (200, 30, 40), (225, 50, 50)),
    "orange": ((255, 165, 0), (255, 140, 0), (240, 120, 20)),
    "yellow": ((255, 255, 0), (245, 215, 50), (255, 235, 90)),
    "green": ((0, 128, 0), (0, 255, 0), (50, 170, 80)),
    "blue": ((0, 0, 255), (40, 90, 200), (60, 130, 230)),
    "purple": ((128, 0, 128), (150, 60, 190), (110, 40, 160)),
    "black": ((0, 0, 0), (30, 30, 30)),
    "white": ((255, 255, 255), (235, 235, 235)),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "star", "cross")

_CONTRAST = 110  # smallest distance between the colours of shape and background
_MOST_TURNED = 0.2  # radians
_MOST_LONGER = 1.3  # longer side / shorter side


@dataclass(frozen=True)
class Picture:
    """A drawn image and its name."""

    image: Image.Image
    colour: str
    shape: str


def draw(rng: random.Random, ratio: float | None = None, busy: float = 0.0) -> Picture:
    """A shape of any kind and place, upright or turned by a little, as high as two to four fifths of a square picture.

    ratio: of the sides, see `size`. busy: share of pictures with a background of any colour, some with a gradient, and often with
    noise; the others have a background of white, black or grey.
    """
    is_busy = rng.random() < busy
    colour, shape = rng.choice(tuple(COLOURS)), rng.choice(SHAPES)
    sides = size(rng, any_ratio(rng) if ratio is None else ratio)
    filled = _colour(rng, colour)
    image = _background(rng, sides, filled, is_busy)
    radius = min(sides) * rng.uniform(0.34, 0.48)
    centre = [rng.uniform(radius, side - radius) for side in sides]
    _fill(image, shape, (centre[0], centre[1]), radius, rng.uniform(-_MOST_TURNED, _MOST_TURNED), filled)
    return Picture(_worn(rng, image) if is_busy else image, colour, shape)


def any_ratio(rng: random.Random) -> float:
    """A ratio of sides, for `size`: 1 for most of them."""
    return 1.0 if rng.random() < 0.7 else math.exp(rng.uniform(-1, 1) * math.log(_MOST_LONGER))


def size(rng: random.Random, ratio: float) -> tuple[int, int]:
    """Width and height, the shorter side of 40 to 200 pixels. ratio: width / height."""
    short = math.exp(rng.uniform(math.log(40), math.log(200)))
    return round(short * max(1.0, ratio)), round(short * max(1.0, 1 / ratio))


def plain(colour: str, shape: str, side: int = 64, background: Colour | None = None) -> Picture:
    """The shape upright in the middle, in the plainest colour of the name, on white, or on black where it is white itself."""
    filled = COLOURS[colour][0]
    if background is None:
        background = (0, 0, 0) if colour == "white" else (255, 255, 255)
    image = Image.new("RGB", (side, side), background)
    _fill(image, shape, (side / 2, side / 2), side * 0.38, 0.0, filled)
    return Picture(image, colour, shape)


def drawn(rng: random.Random, ratio: float, busy: float) -> Picture:
    """A picture of `draw`, or sometimes, for square ones, of `plain`."""
    if ratio == 1.0 and rng.random() < 0.15:
        return plain(rng.choice(tuple(COLOURS)), rng.choice(SHAPES), rng.randrange(32, 257))
    return draw(rng, ratio, busy)


def photo(rng: random.Random) -> Picture:
    """A picture of `draw` as a camera's file: 1600 x 1200 pixels, compressed as JPEG."""
    small = draw(rng)
    large = small.image.resize((1600, 1200), Image.Resampling.BICUBIC)
    large.save(file := io.BytesIO(), "JPEG", quality=60)
    return Picture(Image.open(file).convert("RGB"), small.colour, small.shape)


def _colour(rng: random.Random, name: str) -> Colour:
    shares = [rng.random() ** 2 + 1e-6 for _ in COLOURS[name]]
    mixed = np.average(COLOURS[name], axis=0, weights=shares)
    red, green, blue = (int(min(255, max(0, value + rng.uniform(-8, 8)))) for value in mixed)
    return red, green, blue


def _background(rng: random.Random, size: tuple[int, int], filled: Colour, is_busy: bool) -> Image.Image:
    """An image of this size, width first, on which `filled` is seen."""
    first = _seen_beside(rng, filled, is_busy)
    if not is_busy or rng.random() < 0.6:
        return Image.new("RGB", size, first)
    second = _seen_beside(rng, filled, is_busy, near=first)
    ramp = np.linspace(0, 1, size[rng.randrange(2)])
    along = ramp[None, :] if len(ramp) == size[0] else ramp[:, None]
    share = np.broadcast_to(along, (size[1], size[0]))[..., None]
    return Image.fromarray((np.array(first) * (1 - share) + np.array(second) * share).astype(np.uint8))


def _seen_beside(rng: random.Random, filled: Colour, is_busy: bool, near: Colour | None = None) -> Colour:
    """A colour of the background. near: another one that it resembles, so that all between them is seen too."""
    while True:
        kind = rng.random()
        if near is not None:
            found = [value + rng.uniform(-40, 40) for value in near]
        elif not is_busy:
            found = [
                255.0 - rng.uniform(0, 15) if kind < 0.5 else rng.uniform(0, 15) if kind < 0.7 else rng.uniform(0, 255)
            ] * 3
        elif kind < 0.4:
            found = list(map(float, _colour(rng, rng.choice(tuple(COLOURS)))))
        else:
            found = [rng.uniform(0, 255) for _ in range(3)]
        red, green, blue = (int(min(255, max(0, value))) for value in found)
        if math.dist((red, green, blue), filled) >= _CONTRAST:
            return red, green, blue


def _fill(image: Image.Image, shape: str, centre: Point, radius: float, turn: float, colour: Colour) -> None:
    """radius: of the circle around the shape."""
    pen = ImageDraw.Draw(image)
    if shape == "circle":
        (x, y), radius = centre, radius * 0.9
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        return
    pen.polygon([_moved(point, centre, radius, turn) for point in _corners(shape)], fill=colour)


def _corners(shape: str) -> Sequence[Point]:
    """Corners of the upright shape around (0, 0), at a distance of at most 1; y grows downwards."""
    if shape == "square":
        return _regular(4, math.pi / 4)
    if shape == "triangle":
        return _regular(3, 0.0)
    if shape == "star":
        outer, inner = _regular(5, 0.0), _regular(5, math.pi / 5, 0.42)
        return [point for pair in zip(outer, inner, strict=True) for point in pair]
    if shape == "cross":
        arm, end = 0.3, 0.95
        quarter = ((arm, -end), (arm, -arm), (end, -arm))
        corners: list[Point] = []
        for number in range(4):
            corners += [_moved(point, (0.0, 0.0), 1.0, number * math.pi / 2) for point in quarter]
        return corners
    raise ValueError(f"no such shape: {shape}")


def _regular(number: int, turn: float, radius: float = 1.0) -> list[Point]:
    """Corners on a circle, the first above the centre."""
    angles = [turn + 2 * math.pi * corner / number for corner in range(number)]
    return [(radius * math.sin(angle), -radius * math.cos(angle)) for angle in angles]


def _moved(point: Point, centre: Point, radius: float, turn: float) -> Point:
    (x, y), sine, cosine = point, math.sin(turn), math.cos(turn)
    return centre[0] + radius * (x * cosine - y * sine), centre[1] + radius * (x * sine + y * cosine)


def _worn(rng: random.Random, image: Image.Image) -> Image.Image:
    """Often with noise, or compressed."""
    kind = rng.random()
    if kind < 0.35:
        noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(2, 10), (*image.size[::-1], 3))
        return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))
    if kind < 0.5:
        image.save(file := io.BytesIO(), "JPEG", quality=rng.randrange(30, 95))
        return Image.open(file).convert("RGB")
    return image
