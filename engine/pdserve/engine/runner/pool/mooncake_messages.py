"""Messages between an engine and the process that has its client of Mooncake Store (`mooncake_client.py`), as msgpack values.

engine -> client   `Start`, once; then `Find`, `Read`, `Write`, `Remove` and `Clear`, each of which has an `Answer`
client -> engine   `Unusable`, last; or `State`, after the start and whenever the store begins or ceases to answer, and `Answer`
"""

from __future__ import annotations

import msgspec

from pdserve.common.settings.kv_store_url import MooncakeUrl

NUM_THREADS = 8
"""Of the client, for calls. An engine makes three at a time; others may be stuck in one to a machine that has vanished."""


class Start(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Connect to a store, and add memory to it."""

    url: MooncakeUrl


class Find(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Which of these keys have a value?"""

    call_id: int
    keys: list[str]


class Read(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The value of a key; one of another size is removed."""

    call_id: int
    key: str
    num_bytes: int


class Write(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Give a key a value, unless it has one."""

    call_id: int
    key: str
    value: bytes


class Remove(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Remove a key with its value."""

    call_id: int
    key: str


class Clear(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Remove all keys that begin so."""

    call_id: int
    prefix: str


class Unusable(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The client cannot be loaded."""

    text: str


class State(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Does the store answer?"""

    is_up: bool
    text: str = ""
    """Why not."""


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To a call."""

    call_id: int
    is_done: bool
    """False if it failed, or there is no such value."""
    found: list[bool] = []
    """By key of a `Find`."""
    value: bytes = b""
    """Of a `Read`."""


Call = Find | Read | Write | Remove | Clear
ToClient = Start | Call
FromClient = Unusable | State | Answer
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
decode_from_client = msgspec.msgpack.Decoder(FromClient).decode
encode = msgspec.msgpack.Encoder().encode
