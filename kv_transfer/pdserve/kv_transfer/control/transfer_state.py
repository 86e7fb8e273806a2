"""The states of a transfer on both sides, the legal moves, and the function that checks a move.

Source:   OPEN -> COMPLETE -> RELEASED, and from OPEN or COMPLETE to EXPIRED, CANCELLED, REVOKED, FAILED
Receiver: ATTACHING -> ATTACHED -> RECEIVING -> LANDED; ATTACHED -> LANDED when there is nothing to fetch;
          ATTACHING, ATTACHED -> FAILED, CANCELLED; RECEIVING -> DRAINING -> FAILED, CANCELLED

In DRAINING a read may still write: the blocks are in quarantine until it has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar


class SourceState(enum.Enum):
    OPEN = enum.auto()
    """Computing, or waiting for the receiver."""
    COMPLETE = enum.auto()
    """All blocks are published and the first token is known."""
    RELEASED = enum.auto()
    EXPIRED = enum.auto()
    CANCELLED = enum.auto()
    REVOKED = enum.auto()
    FAILED = enum.auto()


class ReceiverState(enum.Enum):
    ATTACHING = enum.auto()
    ATTACHED = enum.auto()
    RECEIVING = enum.auto()
    DRAINING = enum.auto()
    LANDED = enum.auto()
    FAILED = enum.auto()
    CANCELLED = enum.auto()


_SOURCE_ENDS = frozenset({SourceState.EXPIRED, SourceState.CANCELLED, SourceState.REVOKED, SourceState.FAILED})
_RECEIVER_ENDS = frozenset({ReceiverState.FAILED, ReceiverState.CANCELLED})

SOURCE_MOVES: Mapping[SourceState, frozenset[SourceState]] = {
    SourceState.OPEN: _SOURCE_ENDS | {SourceState.COMPLETE},
    SourceState.COMPLETE: _SOURCE_ENDS | {SourceState.RELEASED},
    SourceState.RELEASED: frozenset(),
    **{state: frozenset() for state in _SOURCE_ENDS},
}
RECEIVER_MOVES: Mapping[ReceiverState, frozenset[ReceiverState]] = {
    ReceiverState.ATTACHING: _RECEIVER_ENDS | {ReceiverState.ATTACHED},
    ReceiverState.ATTACHED: _RECEIVER_ENDS | {ReceiverState.RECEIVING, ReceiverState.LANDED},
    ReceiverState.RECEIVING: frozenset({ReceiverState.LANDED, ReceiverState.DRAINING}),
    ReceiverState.DRAINING: _RECEIVER_ENDS,
    ReceiverState.LANDED: frozenset(),
    **{state: frozenset() for state in _RECEIVER_ENDS},
}

State = TypeVar("State", SourceState, ReceiverState)


class IllegalTransferMove(RuntimeError):
    """A move that is not in the table; a bug in this process, not caused by a peer."""


def move(moves: Mapping[State, frozenset[State]], current: State, to: State) -> State:
    """Return the new state. Raises: IllegalTransferMove."""
    if to not in moves[current]:
        raise IllegalTransferMove(f"{current.name} -> {to.name}")
    return to


def has_ended(moves: Mapping[State, frozenset[State]], state: State) -> bool:
    """True if no move leaves the state."""
    return not moves[state]
