"""`without_images`: messages with markers in place of their images, and the images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pdserve.common.errors import InvalidRequest

FIELD = "messages"

_DETAILS = ("auto", "low", "high", "original")


class ImagePart(dict[str, str]):
    """A part of a message in which an image stands, for chat templates. A client's own part is never of this type."""

    def __init__(self) -> None:
        super().__init__(type="image")


class ImageSource(NamedTuple):
    """An image of a message."""

    where: str
    """The client's name of it."""
    url: str | None
    image: object = None
    """An image that the caller gave in place of a URL."""


def without_images(
    messages: Sequence[Mapping[str, Any]], *, takes_objects: bool = False
) -> tuple[list[Mapping[str, Any]], list[ImageSource]]:
    """takes_objects: parts `image_pil` are read, too. Raises: InvalidRequest naming a malformed part."""
    plain: list[Mapping[str, Any]] = []
    sources: list[ImageSource] = []
    for place, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple) or not any(map(_is_image, content)):
            plain.append(message)
            continue
        parts = []
        for number, part in enumerate(content):
            if _is_image(part) and (takes_objects or part["type"] != "image_pil"):
                sources.append(_source(part, f"{FIELD}[{place}].content[{number}].{part['type']}"))
                parts.append(ImagePart())
            else:
                parts.append(part)
        plain.append({**message, "content": parts})
    return plain, sources


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image_url", "image_pil")


def _source(part: Mapping[str, Any], where: str) -> ImageSource:
    given = part.get(part["type"])
    if part["type"] == "image_pil":
        return ImageSource(where, None, given)
    if isinstance(given, Mapping):
        detail = given.get("detail")
        if detail not in (None, *_DETAILS):
            raise InvalidRequest(f"{where}.detail is {detail!r:.40}, one of {', '.join(_DETAILS)} is needed", FIELD)
        given = given.get("url")
    if not isinstance(given, str):
        raise InvalidRequest(f"{where}.url must be a string, not {type(given).__name__}", FIELD)
    return ImageSource(where, given)
