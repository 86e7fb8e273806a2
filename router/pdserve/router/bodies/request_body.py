"""Reads and decodes a request's body within its limit; every error names the field."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import FormData
from starlette.requests import ClientDisconnect, Request

from pdserve.common.errors import (
    BodyTooLarge,
    Cancelled,
    InvalidRequest,
    UnsupportedMediaType,
)
from pdserve.router.bodies.body_thread import ON_LOOP_BYTES
from pdserve.router.bodies.client_bodies import MIN_VALUES, ClientBodies
from pdserve.router.bodies.form_data import parse_form
from pdserve.router.bodies.ignored_fields import IgnoredFields, tolerant

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*?)`(?: - at `\$\.?(.*)`)?", re.DOTALL)
_AT = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)
_MAX_SHOWN = 80
_MAX_MESSAGE_CHARS = 400


_JSON_TYPE = re.compile(r"application/(?:[\w.-]+\+)?json")


async def read_body(request: Request, kind: type[B], bodies: ClientBodies, build: Callable[[B], T]) -> T:
    """Result of `build` for the decoded body. A large body is decoded and built in a thread.

    Raises: InvalidRequest naming the wrong field; errors of `body_bytes`; exceptions of `build`.
    """
    async with body_bytes(request, bodies) as data:
        return await bodies.in_background_pool(
            len(data), lambda: build(parse_body(data, kind, bodies.model_len, bodies.ignored))
        )


@contextlib.asynccontextmanager
async def body_bytes(request: Request, bodies: ClientBodies) -> AsyncIterator[bytes]:
    """The body, which has its room in the budget of bodies inside this context.

    Raises: BodyTooLarge, UnsupportedMediaType; Overloaded if too many bodies are being read; DeadlineExceeded if the body did not
    arrive within `request_timeout_s`; Cancelled if the client disconnected.
    """
    declared = request.headers.get("content-type", "")
    if declared and not _JSON_TYPE.fullmatch(_media_type(declared)):
        raise UnsupportedMediaType(f"content-type is {declared!r:.80}, but only application/json is understood")
    async with bodies.budget.room(most_bytes(request, bodies)) as room:
        yield await room.read(_read(request, bodies.max_request_bytes), bodies.timeout_s)


@contextlib.asynccontextmanager
async def body_form(request: Request, bodies: ClientBodies) -> AsyncIterator[FormData]:
    """The fields and files of a form, which has its room in the budget of bodies inside this context.

    Raises: InvalidRequest; errors of `body_bytes`.
    """
    declared = request.headers.get("content-type", "")
    if _media_type(declared) != "multipart/form-data" or "boundary=" not in declared.lower():
        raise UnsupportedMediaType(
            f"content-type is {declared!r:.80}, but only multipart/form-data with a boundary is understood"
        )
    async with bodies.budget.room(most_bytes(request, bodies)) as room:
        parts = _parts(request, bodies.max_request_bytes)
        form = await room.read(parse_form(request.headers, parts), bodies.timeout_s)
        try:
            yield form
        finally:
            await form.close()


def _media_type(declared: str) -> str:
    """In lower case and without parameters."""
    return declared.partition(";")[0].strip().lower()


def most_bytes(request: Request, bodies: ClientBodies) -> int:
    """Bytes of the body, at most, before it is read. Raises: BodyTooLarge."""
    max_bytes = bodies.max_request_bytes
    length = request.headers.get("content-length", "")
    num_bytes = int(length) if length.isascii() and length.isdigit() and len(length) < 19 else max_bytes
    if num_bytes > max_bytes:
        raise _too_large(max_bytes)
    return num_bytes


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has more than {max_bytes} bytes, which are allowed at most (max_request_bytes)")


async def _read(request: Request, max_bytes: int) -> bytes:
    data = bytearray()
    async for part in _parts(request, max_bytes):
        data += part
    return bytes(data)


async def _parts(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The body as it arrives. Raises: BodyTooLarge, Cancelled."""
    num_bytes = 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            yield part
    except ClientDisconnect:
        raise Cancelled("the client left before its request was complete") from None


def parse_body(data: bytes, kind: type[B], model_len: int, ignored: IgnoredFields | None = None) -> B:
    """Decode a body. model_len: the model's length in tokens. ignored: None refuses unknown fields.

    Raises: InvalidRequest naming the wrong field.
    """
    if len(data) > ON_LOOP_BYTES:
        verify_num_values(data, model_len)
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            if ignored is None or not (match := _UNKNOWN_FIELD.fullmatch(str(error))):
                raise
            return ignored.decode(data, kind, _path(match))
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if (field := _not_finite(data)) is not None:
            raise InvalidRequest(f"{field} must be a finite number", field) from None
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def convert_part(part: Mapping[str, Any], kind: type[B], where: str, ignored: IgnoredFields | None) -> B:
    """An object of a decoded body as a type of its own. where: its path in the body. ignored: as in `parse_body`.

    Raises: InvalidRequest naming the wrong field.
    """
    try:
        try:
            return msgspec.convert(part, kind)
        except msgspec.ValidationError as error:
            if ignored is None or not (match := _UNKNOWN_FIELD.fullmatch(str(error))):
                raise
            ignored.note(_path(match))
            body: B = msgspec.convert(part, tolerant(kind))
            return body
    except msgspec.ValidationError as error:
        raise _named(str(error), where) from None


@contextlib.contextmanager
def writing(field: str) -> Iterator[None]:
    """Context for writing a client's value of this field as JSON. Raises: InvalidRequest if it is nested too deeply.

    The limit of the encoder is lower than that of the decoder.
    """
    try:
        yield
    except RecursionError as error:
        raise InvalidRequest(f"{field} is nested too deeply", field) from error


def shown(value: Any) -> str:
    """A client's value, shortened for a message."""
    try:
        return _clipped(json.dumps(value))
    except RecursionError:
        return "nested too deeply"


def _clipped(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _named(message: str, where: str = "") -> InvalidRequest:
    """where: path of the object in which the field is, if it is not the body."""
    if len(message) > _MAX_MESSAGE_CHARS:
        # the message contains the client's name of a field in full
        message = f"{message[: _MAX_MESSAGE_CHARS // 2]}...{message[-_MAX_MESSAGE_CHARS // 2 :]}"
    for pattern, told in ((_UNKNOWN_FIELD, "is not a known field"), (_MISSING_FIELD, "is missing")):
        if match := pattern.fullmatch(message):
            field = ".".join(part for part in (where, _path(match)) if part)
            return InvalidRequest(f"{field} {told}", field)
    if (match := _AT.fullmatch(message)) and match[2]:
        told = _clipped(match[1][:1].lower() + match[1][1:])
        field = ".".join(part for part in (where, match[2]) if part)
        return InvalidRequest(f"{field}: {told}", field.partition("[")[0])
    return InvalidRequest(f"the body is wrong: {message}")


def _path(match: re.Match[str]) -> str:
    """A field's name below the path of its object."""
    return ".".join(part for part in (match[2], _clipped(match[1])) if part)


def _not_finite(data: bytes) -> str | None:
    """Error text naming the first field with NaN or infinity, which JSON does not allow; None if there is none."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    for key, value in values.items():
        inner = value.values() if isinstance(value, dict) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in inner):
            return str(key)
    return None


MAX_CONTAINERS = 1 << 16
"""Most objects and arrays in one body; each takes up to 0.4 µs of the GIL, and at least 64 bytes of memory."""
_TOKEN = re.compile(rb'"[^"]*+"|[{\[,]')
_ESCAPES = ((rb"\\", b""), (rb"\"", b""))


def verify_num_values(data: bytes, num_tokens: int, field: str | None = None) -> None:
    """Raises: InvalidRequest for more objects, arrays or values than a valid request has.

    num_tokens: the model's length, which bounds a prompt given as a list of numbers. field: the client's name of `data`; None for
    the body. Takes three byte searches over the text
    and, only for a text with very many such characters, in strings or not, one pass of a tokenizer that stops at the limit.
    """
    max_values = MIN_VALUES + num_tokens
    containers = data.count(b"{") + data.count(b"[")
    if containers <= MAX_CONTAINERS and containers + data.count(b",") <= max_values:
        return
    # up to the first error of an invalid text, this finds strings as a decoder does
    for escape, nothing in _ESCAPES:
        data = data.replace(escape, nothing)
    containers = values = 0
    for token in _TOKEN.finditer(data):
        first = token.group()[:1]
        if first == b'"':
            continue
        values += 1
        containers += first != b","
        if containers > MAX_CONTAINERS or values > max_values:
            raise InvalidRequest(
                f"{field or 'the body'} is too complex: at most {MAX_CONTAINERS} objects and arrays, and {max_values} values "
                "in all, are allowed",
                field,
            )
