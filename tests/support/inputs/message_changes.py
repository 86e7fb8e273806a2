"""Changes of protobuf messages field by field: odd values, wrong lengths, wrong enum numbers, and very many entries."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

_UINTS = (0, 1, 2, 3, 5, 15, 16, 17, 63, 64, 65, 319, 320, 2**31 - 1, 2**31, 2**32 - 1)
_INTS = (0, 1, -1, 2, 20, 2**31 - 1, -(2**31))
_DOUBLES = (0.0, -0.0, 1.0, -1.0, 0.5, 30.0, 86_401.0, 1e308, -1e308, 1e-320, float("nan"), float("inf"), float("-inf"))
_TEXTS = (
    "",
    "a",
    "\x00",
    "\n",
    "é" * 50,
    "💥",
    "../x",
    "a" * 129,
    "a" * 300,
    "a" * 5000,
    "tcp",
    "xxh3_64",
    "gmac",
    "r",
    "0",
)
_SIZES = (0, 1, 7, 8, 15, 16, 17, 24, 31, 32, 33, 300, 5000)
_NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: _INTS,
    FieldDescriptor.CPPTYPE_INT64: (*_INTS, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT32: _UINTS,
    FieldDescriptor.CPPTYPE_UINT64: (*_UINTS, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 4, 99, 2**31 - 1, -1, -(2**31)),
    FieldDescriptor.CPPTYPE_DOUBLE: _DOUBLES,
    FieldDescriptor.CPPTYPE_FLOAT: tuple(value for value in _DOUBLES if abs(value) < 1e38 or value - value != 0),
    FieldDescriptor.CPPTYPE_BOOL: (True, False),
}


class MessageChanges:
    """Draws from `draw`."""

    def __init__(self, draw: random.Random, *, addresses: tuple[str, ...], max_bytes: int) -> None:
        """addresses: for fields of that name. max_bytes: of a message that has very many entries."""
        self._draw = draw
        self._addresses = addresses
        self._max_bytes = max_bytes

    def changed(self, message: M, *, many: float = 0.03) -> M:
        """A copy with one to four fields changed. many: probability of as many entries as fit into a message."""
        copy = type(message)()
        copy.CopyFrom(message)
        for _ in range(self._draw.choice((1, 1, 1, 2, 4))):
            holder, field = self._draw.choice(list(_places(copy)))
            if field.is_repeated and self._draw.random() < many:
                self._fill(holder, field)
            else:
                self._change(holder, field)
        return copy

    def _change(self, holder: Message, field: FieldDescriptor) -> None:
        name, draw = field.name, self._draw
        if field.is_repeated:
            self._change_entries(holder, field)
        elif field.message_type is not None:
            # of a field that is absent too: it then has its defaults, or one field
            inner = getattr(holder, name)
            inner.SetInParent()
            match draw.randrange(3):
                case 0:
                    holder.ClearField(name)
                case 1 if inner.DESCRIPTOR.fields:
                    self._change(inner, draw.choice(inner.DESCRIPTOR.fields))
        elif draw.random() < 0.1:
            holder.ClearField(name)
        else:
            setattr(holder, name, self._value(field))

    def _change_entries(self, holder: Message, field: FieldDescriptor) -> None:
        entries, draw = getattr(holder, field.name), self._draw
        if _is_map(field):
            for _ in range(draw.choice((1, 2, 70))):
                self._put(entries, field)
            return
        match draw.randrange(5):
            case 0:
                holder.ClearField(field.name)
            case 1 if len(entries):
                entries.extend(list(entries) * draw.choice((1, 3, 20)))
            case 2 if len(entries):
                del entries[draw.randrange(len(entries))]
            case 3 if len(entries) and field.message_type is None:
                entries[draw.randrange(len(entries))] = self._value(field)
            case _:
                self._add(entries, field)

    def _fill(self, holder: Message, field: FieldDescriptor) -> None:
        """As many entries as a message holds, all alike or, in a map, all different."""
        entries, name = getattr(holder, field.name), field.name
        if _is_map(field):
            for number in range(self._max_bytes // 16):
                self._put(entries, field, number)
            return
        one = type(holder)()
        self._add(getattr(one, name), field)
        if field.message_type is not None and self._draw.random() < 0.5:
            getattr(one, name)[0].Clear()
        wire = one.SerializeToString()
        count = max(1, self._max_bytes // len(wire))
        # parsing appends: a loop over entries takes seconds here
        holder.MergeFromString(wire * count)

    def _add(self, entries: Any, field: FieldDescriptor) -> None:
        if field.message_type is None:
            entries.append(self._value(field))
            return
        inner = entries.add()
        if inner.DESCRIPTOR.fields:
            self._change(inner, self._draw.choice(inner.DESCRIPTOR.fields))

    def _put(self, entries: Any, field: FieldDescriptor, number: int | None = None) -> None:
        assert field.message_type is not None
        key_field, value_field = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        key = self._value(key_field)
        if number is not None:
            key = str(number) if isinstance(key, str) else number
        entries[key] = self._value(value_field)

    def _value(self, field: FieldDescriptor) -> Any:
        draw = self._draw
        if field.name == "address":
            return draw.choice(self._addresses)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return draw.randbytes(draw.choice(_SIZES))
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            return draw.choice(_TEXTS)
        return draw.choice(_NUMBERS[field.cpp_type])


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _places(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Every field of the message and of those that are in it, absent ones included."""
    for field in message.DESCRIPTOR.fields:
        assert isinstance(field, FieldDescriptor)
        yield message, field
        if field.message_type is None or _is_map(field):
            continue
        value = getattr(message, field.name)
        if field.is_repeated:
            for inner in value[:3]:
                yield from _places(inner)
        elif message.HasField(field.name):
            yield from _places(value)


def fields_named(message: Message, name: str) -> list[Any]:
    """The values of all fields of that name."""
    return [getattr(holder, name) for holder, field in _places(message) if field.name == name]
