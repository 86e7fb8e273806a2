"""A request's body: read within its limit, decoded, and every fault named by its field."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from pdserve.common.errors import (
    BodyTooLarge,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    UnsupportedMediaType,
)
from pdserve.common.rpc import MAX_MESSAGE_BYTES

B = TypeVar("B", bound=msgspec.Struct)
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*?)`(?: - at `\$\.?(.*)`)?", re.DOTALL)
_AT = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)
_JSON_TYPE = re.compile(r"application/(?:[\w.-]+\+)?json")
_MAX_SHOWN = 80


async def read_body(request: Request, kind: type[B], timeout_s: float) -> B:
    """Raises: InvalidRequest naming the field that is wrong; BodyTooLarge, UnsupportedMediaType; DeadlineExceeded when
    the body did not come within `timeout_s`; Cancelled when the client left meanwhile."""
    declared = request.headers.get("content-type", "")
    if declared and not _JSON_TYPE.fullmatch(declared.partition(";")[0].strip().lower()):
        raise UnsupportedMediaType(f"content-type is {declared!r:.80}, but only application/json is understood")
    try:
        async with asyncio.timeout(timeout_s):
            data = await _read(request)
    except TimeoutError:
        raise DeadlineExceeded(f"the request's body did not come within {timeout_s:g} s") from None
    return parse_body(data, kind)


async def _read(request: Request) -> bytes:
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > MAX_MESSAGE_BYTES:
                raise BodyTooLarge(f"the body has more than {MAX_MESSAGE_BYTES} bytes")
    except ClientDisconnect as error:
        raise Cancelled("the client left before its request was complete") from error
    return bytes(data)


def parse_body(data: bytes, kind: type[B]) -> B:
    """Raises: InvalidRequest naming the field that is wrong."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if (field := _not_finite(data)) is not None:
            raise InvalidRequest(f"{field} must be a finite number", field) from error
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


@contextlib.contextmanager
def writing(field: str) -> Iterator[None]:
    """While what a client gave in this field is written as JSON: what could just be read may be too deep for that.

    Raises: InvalidRequest.
    """
    try:
        yield
    except RecursionError as error:
        raise InvalidRequest(f"{field} is nested too deeply", field) from error


def shown(value: Any) -> str:
    """A client's value, for a message."""
    try:
        return _clipped(json.dumps(value))
    except RecursionError:
        return "nested too deeply"


def _clipped(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _named(message: str) -> InvalidRequest:
    for pattern, told in ((_UNKNOWN_FIELD, "is not a known field"), (_MISSING_FIELD, "is missing")):
        if match := pattern.fullmatch(message):
            field = ".".join(part for part in (match[2], _clipped(match[1])) if part)
            return InvalidRequest(f"{field} {told}", field)
    if (match := _AT.fullmatch(message)) and match[2]:
        told = _clipped(match[1][:1].lower() + match[1][1:])
        return InvalidRequest(f"{match[2]}: {told}", match[2].partition("[")[0])
    return InvalidRequest(f"the body is wrong: {message}")


def _not_finite(data: bytes) -> str | None:
    """JSON knows no NaN and no infinity, yet clients send them: the first field that holds one, if that is the fault."""
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
