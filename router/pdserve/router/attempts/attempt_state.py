"""The states of an attempt, and the moves between them."""

from __future__ import annotations

import enum

from pdserve.common.errors import InternalError


class AttemptState(enum.Enum):
    """
    PLACED ──remote──> PREFILLING ──first token──> STREAMING ──last token──> DONE
       └───────────────local──────────────────────────┘
    any of these but DONE ──> FAILED | CANCELLED
    """

    PLACED = "placed"
    PREFILLING = "prefilling"
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = frozenset({AttemptState.FAILED, AttemptState.CANCELLED})
EDGES: dict[AttemptState, frozenset[AttemptState]] = {
    AttemptState.PLACED: _ENDS | {AttemptState.PREFILLING, AttemptState.STREAMING},
    AttemptState.PREFILLING: _ENDS | {AttemptState.STREAMING},
    AttemptState.STREAMING: _ENDS | {AttemptState.DONE},
    AttemptState.DONE: frozenset(),
    AttemptState.FAILED: frozenset(),
    AttemptState.CANCELLED: frozenset(),
}


class IllegalTransition(InternalError):
    """A state change that is not in `EDGES`."""


def moved(state: AttemptState, to: AttemptState) -> AttemptState:
    """Return `to`. Raises: IllegalTransition if there is no such edge."""
    if to not in EDGES[state]:
        raise IllegalTransition(f"an attempt cannot change from {state.value} to {to.value}")
    return to
