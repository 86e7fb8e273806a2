"""Counts what a protobuf message has before anything is built from it."""

from __future__ import annotations

import functools
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from pdserve.common.errors import BodyTooLarge, InvalidRequest

MAX_FIELDS = 1 << 16
"""Fields of a client's message and of the messages in it: an empty message takes 2 bytes here, and 60 once it is parsed."""

_VARINT, _FIXED_64, _BYTES, _GROUP, _END_GROUP, _FIXED_32 = range(6)
"""Wire types."""
_WIRE_TYPES = {
    FieldDescriptor.TYPE_DOUBLE: _FIXED_64,
    FieldDescriptor.TYPE_FIXED64: _FIXED_64,
    FieldDescriptor.TYPE_SFIXED64: _FIXED_64,
    FieldDescriptor.TYPE_FLOAT: _FIXED_32,
    FieldDescriptor.TYPE_FIXED32: _FIXED_32,
    FieldDescriptor.TYPE_SFIXED32: _FIXED_32,
    FieldDescriptor.TYPE_STRING: _BYTES,
    FieldDescriptor.TYPE_BYTES: _BYTES,
    FieldDescriptor.TYPE_MESSAGE: _BYTES,
}
"""The other types are varints."""
_NUMBER_BYTES = {_FIXED_64: 8, _FIXED_32: 4}
_COUNTED_AT_ONCE = 1 << 20
_ENDS = bytes(range(128))
"""Last bytes of varints."""


class LargeMessage(NamedTuple):
    """Bounds of a message that is larger than most. All its fields are counted, those of texts and prompts too."""

    max_values: int
    """Numbers in all lists. A list takes one byte per number here, and one call parses all of it."""
    max_bytes: int
    """Bytes outside of `files`."""
    files: frozenset[str]
    """Full names of the fields that make a message large."""
    option: str
    """The setting that `max_bytes` comes from."""


def verify_num_fields(
    data: bytes, descriptor: Descriptor, max_fields: int = MAX_FIELDS, large: LargeMessage | None = None
) -> bool:
    """Verify a message, at a cost that ends with what is too much. False if all fields are known; True if some may not be, or
    without `large`.

    large: None for a message whose size is a bound by itself: then fields of messages that hold no others are not counted, as
    their numbers, packed or not, take no more memory than bytes. What is malformed is left to the parser.
    Raises: InvalidRequest for more than `max_fields`; with `large` also for too many numbers, and BodyTooLarge.
    """
    left = max_fields
    num_values = num_file_bytes = 0
    may_have_unknown = large is None
    open_messages = [(0, len(data), descriptor, "")]
    while open_messages:
        at, end, kind, path = open_messages.pop()
        fields = _fields(kind)
        depth = 0  # groups that are open
        while at < end:
            left -= 1
            if left < 0:
                raise InvalidRequest(f"the message has more than {max_fields} fields, in it and in its messages")
            tag, at = _varint(data, at, end)
            wire_type = tag & 7
            start = at
            match wire_type:
                case 0:
                    _, at = _varint(data, at, end)
                case 1:
                    at += 8
                case 2:
                    length, start = _varint(data, at, end)
                    at = start + length
                case 5:
                    at += 4
                case 3:
                    # groups are in no message of ours: the parser keeps each as one unknown field
                    depth += 1
                case 4 if depth:
                    depth -= 1
                case _:
                    break
            if depth or wire_type == _END_GROUP:
                may_have_unknown = True
                continue
            field = fields.get(tag >> 3)
            if large is None:
                if field is not None and field.holder is not None and wire_type == _BYTES:
                    open_messages.append((start, min(at, end), field.holder, ""))
                continue
            is_list = field is not None and field.is_list
            if field is None or (wire_type != field.wire_type and not (is_list and wire_type == _BYTES)):
                may_have_unknown = True
            elif field.message is not None:
                open_messages.append((start, min(at, end), field.message, f"{path}{field.name}."))
            elif field.full_name in large.files:
                num_file_bytes += min(at, end) - start
            elif is_list:
                is_packed = wire_type == _BYTES
                num_values += _num_numbers(data, start, min(at, end), field.wire_type) if is_packed else 1
                if num_values > large.max_values:
                    raise InvalidRequest(
                        f"with {path}{field.name}, the message has more than {large.max_values} numbers in its lists",
                        f"{path}{field.name}",
                    )
    if large is not None and len(data) - num_file_bytes > large.max_bytes:
        raise BodyTooLarge(
            f"the message has {len(data) - num_file_bytes} bytes besides files, at most {large.max_bytes} are allowed "
            f"({large.option})"
        )
    return may_have_unknown


def _num_numbers(data: bytes, start: int, end: int, wire_type: int) -> int:
    """Numbers in a packed list."""
    if (size := _NUMBER_BYTES.get(wire_type)) is not None:
        return max(0, end - start) // size
    parts = range(start, end, _COUNTED_AT_ONCE)
    return sum(
        (stop := min(part + _COUNTED_AT_ONCE, end)) - part - len(data[part:stop].translate(None, _ENDS))
        for part in parts
    )


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """(value, index of the next byte); the index is beyond the end if the number is truncated."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
    return value, end + 1


class _Field(NamedTuple):
    name: str
    full_name: str
    wire_type: int
    """The wire type of one value."""
    is_list: bool
    """A list of numbers."""
    message: Descriptor | None
    holder: Descriptor | None
    """The same, if that message holds others."""


@functools.cache
def _fields(kind: Descriptor) -> dict[int, _Field]:
    return {field.number: _field(field) for field in kind.fields}


def _field(field: FieldDescriptor) -> _Field:
    wire_type, message = _WIRE_TYPES.get(field.type, _VARINT), field.message_type
    holder = (
        message if message is not None and any(inner.message_type is not None for inner in message.fields) else None
    )
    return _Field(field.name, field.full_name, wire_type, field.is_repeated and wire_type != _BYTES, message, holder)
