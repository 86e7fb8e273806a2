"""The states of an attempt, and the moves between them.

PLACED ──remote──> PREFILLING ──first token──> STREAMING ──last token──> DONE
   └───────────────local──────────────────────────┘
any of these but DONE ──> FAILED | CANCELLED
"""

from __future__ import annotations

import enum

from pdserve.common.errors import InternalError


class AttemptState(enum.Enum):
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


class IllegalMove(InternalError):
    """A state machine was asked for an edge that it does not have."""


def moved(state: AttemptState, to: AttemptState) -> AttemptState:
    """`to`, if there is such an edge. Raises: IllegalMove."""
    if to not in EDGES[state]:
        raise IllegalMove(f"an attempt cannot go from {state.value} to {to.value}")
    return to
