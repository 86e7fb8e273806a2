"""The two state machines of a transfer: every edge of the tables, and no other."""

from __future__ import annotations

import itertools

import pytest

from pdserve.kv_transfer.control.transfer_state import (
    RECEIVER_MOVES,
    SOURCE_MOVES,
    IllegalTransferMove,
    ReceiverState,
    SourceState,
    has_ended,
    move,
)

S, R = SourceState, ReceiverState
SOURCE_ENDS = {S.EXPIRED, S.CANCELLED, S.REVOKED, S.FAILED}
SOURCE = {S.OPEN: {S.COMPLETE} | SOURCE_ENDS, S.COMPLETE: {S.RELEASED} | SOURCE_ENDS}
RECEIVER = {
    R.ATTACHING: {R.ATTACHED, R.FAILED, R.CANCELLED},
    R.ATTACHED: {R.RECEIVING, R.LANDED, R.FAILED, R.CANCELLED},
    R.RECEIVING: {R.LANDED, R.DRAINING},
    R.DRAINING: {R.FAILED, R.CANCELLED},
}


@pytest.mark.parametrize(("before", "after"), [*itertools.product(S, S)])
def test_a_source_moves_along_its_table_and_nowhere_else(before: SourceState, after: SourceState) -> None:
    if after in SOURCE.get(before, set()):
        assert move(SOURCE_MOVES, before, after) is after
    else:
        with pytest.raises(IllegalTransferMove, match=f"{before.name} -> {after.name}"):
            move(SOURCE_MOVES, before, after)
    assert has_ended(SOURCE_MOVES, before) == (before not in SOURCE)


@pytest.mark.parametrize(("before", "after"), [*itertools.product(R, R)])
def test_a_receiver_moves_along_its_table_and_nowhere_else(before: ReceiverState, after: ReceiverState) -> None:
    if after in RECEIVER.get(before, set()):
        assert move(RECEIVER_MOVES, before, after) is after
    else:
        with pytest.raises(IllegalTransferMove, match=f"{before.name} -> {after.name}"):
            move(RECEIVER_MOVES, before, after)
    assert has_ended(RECEIVER_MOVES, before) == (before not in RECEIVER)
