"""Refuses fields of a client's message that are unknown to this router, so that no option of a newer client is ignored."""

from __future__ import annotations

from google.protobuf.message import Message

from pdserve.common.errors import InvalidRequest


def refuse_unknown_fields(message: Message) -> None:
    """Raises: InvalidRequest naming the first unknown field by its message and number.

    The check compares the message's size with that of a copy without unknown fields; only a message that has some is walked.
    """
    known = _copy(message)
    known.DiscardUnknownFields()
    if known.ByteSize() != message.ByteSize():
        _refuse(message, known, "")


def _refuse(message: Message, known: Message, place: str) -> None:
    """known: the same message without unknown fields. place: path of the message, for errors."""
    rest = _copy(message)
    for descriptor, _ in message.ListFields():
        rest.ClearField(descriptor.name)
    if unknown := rest.SerializeToString():
        where = place or message.DESCRIPTOR.name
        raise InvalidRequest(f"{where} has a field number {_first_number(unknown)}, which is not known here", where)
    for descriptor, value in message.ListFields():
        name = f"{place}.{descriptor.name}" if place else descriptor.name
        same = getattr(known, descriptor.name)
        if isinstance(value, Message):
            parts = [(name, value, same)]
        elif descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        else:
            parts = [(f"{name}[{index}]", part, same[index]) for index, part in enumerate(value)]
        for where, part, same_part in parts:
            if part.ByteSize() != same_part.ByteSize():
                _refuse(part, same_part, where)


def _copy(message: Message) -> Message:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def _first_number(fields: bytes) -> int:
    """The number of the first of these encoded fields."""
    tag = 0
    for place, byte in enumerate(fields[:10]):
        tag |= (byte & 127) << 7 * place
        if byte < 128:
            break
    return tag >> 3
