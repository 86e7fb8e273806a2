"""Images of URLs, opened without decoding: format and size are read from the header and checked first."""

from __future__ import annotations

import base64
import binascii
import io
import re
from typing import TYPE_CHECKING, NamedTuple

from pdserve.common.errors import InvalidRequest, PdServeError
from pdserve.text.images.bare_image import MAX_SCANS, BareImage, TooManyParts, bare_image
from pdserve.text.images.webp_process import decoded_webp

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# each repetition takes memory of the matcher
_DATA_URL = re.compile(r"data:(?P<type>[\w.+/-]{0,128})(?:;[\w.+=-]{1,128}){0,8};base64,", re.ASCII)
_REMOTE = re.compile(r"https?://", re.ASCII | re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,20}:", re.ASCII | re.IGNORECASE)
_SCANNED = 16
"""Scans that the largest image may have; a smaller one has more, up to `MAX_SCANS`."""
_WEBP, _WEBP_PIXELS = b"RIFF", 1 << 21
"""A file of more pixels is decoded in a process of its own."""
_BASE64_PIECE = 1 << 20
"""Characters that are decoded at once, while no other thread runs; a multiple of 4."""


class OpenedImage(NamedTuple):
    """An image, which is decoded when its pixels are read."""

    image: Image
    orientation: int
    """See `BareImage`."""


def is_remote(url: str) -> bool:
    """True for a URL of HTTP."""
    return _REMOTE.match(url) is not None


def open_image_url(url: str, where: str, field: str, max_pixels: int) -> OpenedImage:
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
        data = _decoded(url, head.end())
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{where} is not valid base64: {error!s:.80}", field) from error
    return open_image(data, where, field, max_pixels)


def _decoded(url: str, start: int) -> bytes:
    """Raises: ValueError."""
    pieces = []
    for place in range(start, len(url), _BASE64_PIECE):
        piece = url[place : place + _BASE64_PIECE]
        if piece.endswith("=") and place + _BASE64_PIECE < len(url):
            raise binascii.Error("data after its end")
        pieces.append(base64.b64decode(piece, validate=True))
    return b"".join(pieces)


def open_image(data: bytes, where: str, field: str, max_pixels: int) -> OpenedImage:
    """Open a file of `FORMATS` without its metadata. Raises: InvalidRequest, as `open_image_url`; Overloaded."""
    import PIL.Image

    try:
        bare = bare_image(data)
        # before Pillow allocates anything: it makes the whole canvas of a WebP file as it opens one
        _verify_size(bare.size, where, field, max_pixels)
        _verify_scans(bare, where, field, max_pixels)
        width, height = bare.size
        if data.startswith(_WEBP) and width * height > _WEBP_PIXELS:
            return OpenedImage(decoded_webp(data, width * height, where, field), bare.orientation)
        image = PIL.Image.open(io.BytesIO(bare.data), formats=FORMATS)
    except PdServeError:
        raise
    except TooManyParts as error:
        raise InvalidRequest(f"{where} {error!s}", field) from error
    except Exception as error:  # Pillow's parsers raise whatever their formats do
        raise InvalidRequest(
            f"{where} has {len(data)} bytes that are no image of {', '.join(FORMATS)}", field
        ) from error
    _verify_size(image.size, where, field, max_pixels)
    return OpenedImage(image, bare.orientation)


def _verify_scans(bare: BareImage, where: str, field: str, max_pixels: int) -> None:
    """A file of a few bytes per scan would take hours to decode. Raises: InvalidRequest."""
    width, height = bare.size
    most = _SCANNED * max_pixels
    if bare.num_scans > MAX_SCANS or bare.num_scans * width * height > most:
        raise InvalidRequest(
            f"{where} has {bare.num_scans} scans of {width} x {height} pixels; at most {MAX_SCANS} scans, of {most} pixels "
            "together, are decoded",
            field,
        )


def _verify_size(size: tuple[int, int], where: str, field: str, max_pixels: int) -> None:
    width, height = size
    if not 0 < width * height <= max_pixels:
        raise InvalidRequest(f"{where} has {width} x {height} pixels, at most {max_pixels} are decoded", field)
