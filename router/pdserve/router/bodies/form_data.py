"""`FormData`: the fields and the file of a `multipart/form-data` body, which is in memory and within its limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.common.errors import InvalidRequest, UnsupportedMediaType

MAX_PARTS = 64
MAX_FIELD_BYTES = 64 << 10
"""Bytes of a field that is no file."""
_MAX_HEADER_BYTES = 4096
"""Headers of a part."""
_MAX_BOUNDARY_BYTES = 70


class FormData:
    """Decoded by python-multipart."""

    def __init__(self, files: dict[str, bytes], fields: dict[str, list[str]]) -> None:
        self.files = files
        """Name -> content."""
        self.fields = fields
        """Name -> values in their order."""

    @classmethod
    def parse(cls, data: bytes, content_type: str) -> FormData:
        """content_type: the header. Raises: InvalidRequest, UnsupportedMediaType."""
        # imported here: a router of a model without sound does not need it
        from python_multipart.exceptions import MultipartParseError
        from python_multipart.multipart import MultipartParser, parse_options_header

        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= _MAX_BOUNDARY_BYTES:
            raise UnsupportedMediaType(
                f"content-type is {content_type!r:.80}, but only multipart/form-data with a boundary is understood"
            )
        parts = _Parts(parse_options_header)
        try:
            parser = MultipartParser(boundary, parts.callbacks())
            parser.write(data)
            parser.finalize()
        except MultipartParseError as error:
            raise InvalidRequest(f"the body is no multipart/form-data: {error!s:.200}") from None
        if not parts.is_complete:
            raise InvalidRequest("the body is cut: its last boundary is missing")
        return cls(parts.files, parts.fields)


class _Parts:
    """Takes the parser's events."""

    def __init__(self, parse_options: Callable[[bytes], tuple[bytes, dict[bytes, bytes]]]) -> None:
        self.files: dict[str, bytes] = {}
        self.fields: dict[str, list[str]] = {}
        self.is_complete = False
        self._parse_options = parse_options
        self._num_parts = 0
        self._header_name = self._header_value = b""
        self._num_header_bytes = 0
        self._disposition = b""
        self._name = ""
        self._is_file = False
        self._content = bytearray()

    def callbacks(self) -> Any:
        """Functions for the parser, by the names of its events."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._add_name,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_data,
            "on_part_end": self._end,
            "on_end": self._end_all,
        }

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"the body has more than {MAX_PARTS} parts")
        self._header_name = self._header_value = self._disposition = b""
        self._num_header_bytes = 0
        self._content = bytearray()

    def _count_header(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > _MAX_HEADER_BYTES:
            raise InvalidRequest(f"a part of the body has headers of more than {_MAX_HEADER_BYTES} bytes")

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header_name += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _end_headers(self) -> None:
        _, options = self._parse_options(self._disposition)
        name = options.get(b"name", b"")
        self._name, self._is_file = name.decode(errors="replace"), b"filename" in options
        if not name:
            raise InvalidRequest("a part of the body has no name in its content-disposition")
        if self._is_file and self._name in self.files:
            raise InvalidRequest(f"{self._name[:80]} is there twice", self._name[:80])

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._content += memoryview(data)[start:end]
        if not self._is_file and len(self._content) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{self._name[:80]} has more than {MAX_FIELD_BYTES} bytes", self._name[:80])

    def _end(self) -> None:
        if self._is_file:
            self.files[self._name] = bytes(self._content)
            self._content = bytearray()
            return
        try:
            value = self._content.decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"{self._name[:80]} is not valid UTF-8", self._name[:80]) from None
        self.fields.setdefault(self._name, []).append(value)

    def _end_all(self) -> None:
        self.is_complete = True
