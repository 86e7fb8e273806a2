"""`parse_form`: the fields and files of a `multipart/form-data` body."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator

from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from pdserve.common.errors import InvalidRequest

MAX_FIELDS = 64
MAX_FILES = 4
MAX_FIELD_BYTES = 64 << 10
"""Bytes of a field that is no file."""


class _FormParser(MultiPartParser):
    # what clients send is never written to a disk; the body's limit bounds it
    spool_max_size = sys.maxsize
    has_ended = False
    """The last boundary was found."""

    def on_end(self) -> None:
        self.has_ended = True


def form_bytes(form: FormData) -> int:
    """Bytes of all files and fields."""
    return sum(value.size or 0 if isinstance(value, UploadFile) else len(value) for value in form.values())


async def parse_form(headers: Headers, parts: AsyncGenerator[bytes, None]) -> FormData:
    """Close the form after use. headers: of the request. parts: the body as it arrives.

    Raises: InvalidRequest; errors of `parts`.
    """

    async def complete() -> AsyncGenerator[bytes, None]:
        async for part in parts:
            yield part
        if not parser.has_ended:
            raise InvalidRequest("the body is cut: its last boundary is missing")

    parser = _FormParser(headers, complete(), max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the body cannot be read as multipart/form-data: {error.message}") from None
