"""Every field of a message wrong in every way, made from the message's descriptor: a field that is added is covered by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

LIE = "LIE of a peer"
"""Part of each text that is put into a message, which no client may see."""
MANY = 300_000
"""Entries of a huge list."""
_INT32 = (0, 1, -1, 2**31 - 1, -(2**31))
_UINT32 = (0, 1, 2**31 - 1, 2**31, 2**32 - 1)
_VALUES: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_INT32: _INT32,
    FieldDescriptor.CPPTYPE_INT64: (*_INT32, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT32: _UINT32,
    FieldDescriptor.CPPTYPE_UINT64: (*_UINT32, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 3, 4, 99, -1, 2**31 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, -1.0, 1e308, float("nan"), float("inf"), float("-inf")),
    FieldDescriptor.CPPTYPE_FLOAT: (0.0, -1.0, 3e38, float("nan"), float("inf"), float("-inf")),
    FieldDescriptor.CPPTYPE_BOOL: (True, False),
}
_TEXTS = ("", LIE, LIE + "\n\x00", LIE * 1000, "../" + LIE)
_BYTES = (b"", b"\x00", b"\xff" * 16, b"\xff" * 17, b"\x00" * 5000)
NOT_UTF8 = b"\xff\xfe" + LIE.encode()
_MAX_DEPTH = 4
PARTS = range(4)
"""Cases of a table are tested in turns, one of each field in one of these parts."""
FEW = 5000
"""Entries of a list where one case of each field is tried."""


class Wrong(NamedTuple):
    """A case: what is sent in place of one message."""

    name: str
    """`field.field: how`"""
    messages: list[bytes]
    """Serialized: usually one, none where the message is left out."""


def one_of_each(cases: Iterable[Wrong]) -> Iterator[Wrong]:
    """One case per field, and one that concerns the whole message. Fields take turns in the ways of being wrong, so that a table of
    several fields has most of them."""
    fields: dict[str, list[Wrong]] = {}
    for case in cases:
        field, separator, _ = case.name.partition(": ")
        fields.setdefault(field if separator else "", []).append(case)
    for number, made in enumerate(fields.values()):
        yield made[number * 5 % len(made)]


def part_of(cases: Iterable[Wrong], part: int) -> Iterator[Wrong]:
    """Every case of so many as there are parts: `make test` runs the first part, and `make test-all` each one."""
    return islice(cases, part, None, len(PARTS))


def wrong_messages(message: Message, *, many: int = MANY) -> Iterator[Wrong]:
    """Every case of a well-formed message."""
    raw = message.SerializeToString()
    yield Wrong("left out", [])
    yield Wrong("twice", [raw, raw])
    yield Wrong("empty", [b""])
    yield Wrong("garbage", [b"\xff" * 9])
    yield Wrong("cut", [raw[:-1]])
    yield Wrong("an unknown field", [raw + b"\xa2\x3f\x03abc"])
    for path, made in _fields(message, message, "", 0, many):
        yield Wrong(path, [made])


def _fields(root: Message, holder: Message, prefix: str, depth: int, many: int) -> Iterator[tuple[str, bytes]]:
    """(path and how, the whole message with it). `holder` is changed and restored."""
    kept = type(holder)()
    kept.CopyFrom(holder)
    for field in holder.DESCRIPTOR.fields:
        assert isinstance(field, FieldDescriptor)
        path = f"{prefix}{field.name}"
        for how, change in _changes(field, many):
            change(holder)
            if isinstance(change, _Raw):
                # what no Python value can hold goes to the end of the bytes, of the outermost message alone
                if holder is root:
                    yield f"{path}: {how}", root.SerializeToString() + change.wire
            else:
                yield f"{path}: {how}", root.SerializeToString()
            holder.CopyFrom(kept)
        if field.message_type is None or _is_map(field) or depth == _MAX_DEPTH:
            continue
        if field.is_repeated:
            if inner := getattr(holder, field.name):
                yield from _fields(root, inner[0], f"{path}[0].", depth + 1, many)
        elif holder.HasField(field.name):
            yield from _fields(root, getattr(holder, field.name), f"{path}.", depth + 1, many)


class _Set:
    def __init__(self, field: FieldDescriptor, value: Any) -> None:
        self.field, self.value = field, value

    def __call__(self, holder: Message) -> None:
        if self.field.is_repeated:
            entries = getattr(holder, self.field.name)
            if len(entries):
                entries[0] = self.value
            else:
                entries.append(self.value)
        else:
            setattr(holder, self.field.name, self.value)


class _Clear:
    def __init__(self, field: FieldDescriptor) -> None:
        self.field = field

    def __call__(self, holder: Message) -> None:
        holder.ClearField(self.field.name)


class _Empty(_Clear):
    """A message that is there, with nothing in it."""

    def __call__(self, holder: Message) -> None:
        holder.ClearField(self.field.name)
        value = getattr(holder, self.field.name)
        if self.field.is_repeated:
            value.add()
        else:
            value.SetInParent()


class _Repeat(_Clear):
    def __init__(self, field: FieldDescriptor, count: int) -> None:
        super().__init__(field)
        self.count = count

    def __call__(self, holder: Message) -> None:
        entries = getattr(holder, self.field.name)
        if _is_map(self.field):
            assert self.field.message_type is not None
            key, value = (self.field.message_type.fields_by_name[name] for name in ("key", "value"))
            is_text = key.cpp_type == FieldDescriptor.CPPTYPE_STRING
            for number in range(min(self.count, 20_000)):
                entries[str(number) if is_text else number] = _values(value)[1]
            return
        one = type(holder)()
        if len(entries):
            getattr(one, self.field.name).extend(list(entries)[:1])
        elif self.field.message_type is None:
            getattr(one, self.field.name).append(_values(self.field)[1])
        else:
            getattr(one, self.field.name).add()
        # parsing appends: a loop over entries takes seconds here
        holder.MergeFromString(one.SerializeToString() * self.count)


class _Reverse(_Clear):
    def __call__(self, holder: Message) -> None:
        entries = getattr(holder, self.field.name)
        turned = list(entries)[::-1]
        del entries[:]
        entries.extend(turned)


class _Raw(_Clear):
    """Bytes for the field that protobuf's Python does not take."""

    @property
    def wire(self) -> bytes:
        tag = self.field.number << 3 | 2
        head = bytes([tag]) if tag < 128 else bytes([tag & 127 | 128, tag >> 7])
        return head + bytes([len(NOT_UTF8)]) + NOT_UTF8


def _changes(field: FieldDescriptor, many: int) -> Iterator[tuple[str, Any]]:
    yield "missing", _Clear(field)
    if field.is_repeated:
        if not _is_map(field):
            yield "reversed", _Reverse(field)
        for count in (2, 300, many):
            yield f"{count} entries", _Repeat(field, count)
    if field.message_type is not None:
        if not _is_map(field):
            yield "empty", _Empty(field)
        return
    for value in _values(field):
        yield f"{value!r:.24}", _Set(field, value)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING and field.type != FieldDescriptor.TYPE_BYTES:
        yield "not UTF-8", _Raw(field)


def _values(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _BYTES
    return _TEXTS if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else _VALUES[field.cpp_type]


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


# ---- msgpack


_ANYTHING: tuple[Any, ...] = (
    None, True, 0, -1, 2**31, 2**63, 2**64 - 1, float("nan"), float("inf"), -1e308, "", LIE, LIE * 100, b"", b"\xff" * 17, [], {},
    [0] * 70_000, {"x": 1}, [[]], [{}],
)  # fmt: skip


def wrong_structs(data: bytes, kind: type[msgspec.Struct], *fields: str) -> Iterator[Wrong]:
    """As `wrong_messages`, for a msgpack map of a struct's fields. fields: those that are structs themselves, by their path."""
    tree = msgspec.msgpack.decode(data)
    nested = {name: field.type for name, field in ((f.name, f) for f in msgspec.structs.fields(kind))}
    yield Wrong("cut", [data[:-1]])
    yield Wrong("garbage", [b"\xc1" * 9])
    for name in (*kind.__struct_fields__, "of_tomorrow"):
        for value in _ANYTHING:
            yield Wrong(f"{name}: {str(value)[:24]!r}", [_encoded({**tree, name: value})])
        yield Wrong(f"{name}: missing", [_encoded({key: value for key, value in tree.items() if key != name})])
    for name in fields:
        inner = nested[name]
        for case in wrong_structs(_encoded(tree.get(name, {})), inner):
            if case.name not in ("cut", "garbage"):
                value = msgspec.msgpack.decode(case.messages[0])
                yield Wrong(f"{name}.{case.name}", [_encoded({**tree, name: value})])


def _encoded(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)
