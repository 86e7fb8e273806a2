"""Counts the fields of a protobuf message before anything is built from it."""

from __future__ import annotations

import functools

from google.protobuf.descriptor import Descriptor

from pdserve.common.errors import InvalidRequest

MAX_FIELDS = 1 << 16
"""Fields of a client's message and of the messages in it: an empty message takes 2 bytes here, and 60 once it is parsed."""


def verify_num_fields(data: bytes, descriptor: Descriptor, max_fields: int = MAX_FIELDS) -> None:
    """Raises: InvalidRequest for more than `max_fields`, at a cost that ends there.

    Fields of messages that hold no others are not counted: their numbers, packed or not, take no more memory than bytes.
    What is malformed is left to the parser.
    """
    left = max_fields
    open_messages = [(0, len(data), descriptor)]
    while open_messages:
        at, end, kind = open_messages.pop()
        holders = _holders(kind)
        while at < end:
            left -= 1
            if left < 0:
                raise InvalidRequest(f"the message has more than {max_fields} fields, in it and in its messages")
            tag, at = _varint(data, at, end)
            match tag & 7:
                case 0:
                    _, at = _varint(data, at, end)
                case 1:
                    at += 8
                case 2:
                    length, at = _varint(data, at, end)
                    inner = holders.get(tag >> 3)
                    if inner is not None:
                        open_messages.append((at, min(at + length, end), inner))
                    at += length
                case 5:
                    at += 4
                case _:
                    # groups are in no message of ours, so that the parser keeps them as one unknown field
                    break


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


@functools.cache
def _holders(kind: Descriptor) -> dict[int, Descriptor]:
    """Number -> message, for the fields whose messages hold others."""
    messages = {field.number: field.message_type for field in kind.fields}
    return {number: message for number, message in messages.items() if message is not None and _holds_messages(message)}


def _holds_messages(kind: Descriptor) -> bool:
    return any(field.message_type is not None for field in kind.fields)
