"""Fields of a client's message that this router does not know: a newer client's wish must not be dropped in silence."""

from __future__ import annotations

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from pdserve.common.errors import InvalidRequest


def refuse_unknown_fields(message: Message, place: str = "") -> None:
    """Raises: InvalidRequest naming the first by its message, which lies at `place`, and its number."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        where = place or message.DESCRIPTOR.name
        raise InvalidRequest(f"{where} has a field number {unknown[0].field_number}, which is not known here", where)
    for descriptor, value in message.ListFields():
        name = f"{place}.{descriptor.name}" if place else descriptor.name
        if isinstance(value, Message):
            refuse_unknown_fields(value, name)
        elif descriptor.message_type is not None and not descriptor.message_type.GetOptions().map_entry:
            for index, part in enumerate(value):
                refuse_unknown_fields(part, f"{name}[{index}]")
