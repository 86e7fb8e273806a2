"""Images of URLs, opened without decoding: format and size are read from the header and checked first."""

from __future__ import annotations

import base64
import binascii
import io
import re
from typing import TYPE_CHECKING

from pdserve.common.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_DATA_URL = re.compile(r"data:(?P<type>[\w.+/-]*)(?P<parameters>(?:;[\w.+=-]+)*);base64,", re.ASCII)
_REMOTE = re.compile(r"https?://", re.ASCII | re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,20}:", re.ASCII | re.IGNORECASE)


def is_remote(url: str) -> bool:
    """True for a URL of HTTP."""
    return _REMOTE.match(url) is not None


def open_image_url(url: str, where: str, field: str, max_pixels: int) -> Image:
    """The image of `data:image/png;base64,...`. where: the client's name of it.

    Raises: InvalidRequest for another URL, bytes that are no image of `FORMATS`, and more than `max_pixels` pixels.
    """
    head = _DATA_URL.match(url)
    if head is None:
        scheme = _SCHEME.match(url)
        shown = scheme[0] if scheme else url[:20]
        raise InvalidRequest(
            f"{where} begins with {shown!r}; images are taken as data:image/...;base64, and through a router from hosts of "
            "its setting allowed_media_domains",
            field,
        )
    if not head["type"].startswith("image/"):
        raise InvalidRequest(f"{where} has the type {head['type'][:40]!r}, image/... is needed", field)
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{where} is not valid base64: {error!s:.80}", field) from error
    return open_image(data, where, field, max_pixels)


def open_image(data: bytes, where: str, field: str, max_pixels: int) -> Image:
    """An image that is not decoded yet. Raises: InvalidRequest, as `open_image_url`."""
    import PIL.Image

    if (size := _webp_size(data)) is not None:
        # Pillow allocates the whole canvas as it opens one
        _verify_size(size, where, field, max_pixels)
    try:
        image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
    except PIL.Image.DecompressionBombError as error:
        raise InvalidRequest(f"{where} has more pixels than {max_pixels}, which are decoded at most", field) from error
    except Exception as error:  # Pillow's parsers raise whatever their formats do
        raise InvalidRequest(
            f"{where} has {len(data)} bytes that are no image of {', '.join(FORMATS)}", field
        ) from error
    _verify_size(image.size, where, field, max_pixels)
    return image


def _verify_size(size: tuple[int, int], where: str, field: str, max_pixels: int) -> None:
    width, height = size
    if not 0 < width * height <= max_pixels:
        raise InvalidRequest(f"{where} has {width} x {height} pixels, at most {max_pixels} are decoded", field)


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a WebP file by its first chunk; None for another file."""
    if len(data) < 30 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    match data[12:16]:
        case b"VP8X":
            return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 ":
            sides = data[26:28], data[28:30]
            width, height = (int.from_bytes(side, "little") & 0x3FFF for side in sides)
            return width, height
    return None
