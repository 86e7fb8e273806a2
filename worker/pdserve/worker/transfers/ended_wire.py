"""The end of a transfer at its source, as routers read it."""

from __future__ import annotations

from pdserve.kv_transfer.control.transfer_state import SourceState
from pdserve.v1 import prefill_pb2
from pdserve.worker.engine_client import SourceEnd

REPORTED = {
    SourceState.RELEASED: prefill_pb2.Ended.RELEASED,
    SourceState.REVOKED: prefill_pb2.Ended.REVOKED,
    SourceState.EXPIRED: prefill_pb2.Ended.EXPIRED,
}
"""Ends that have a value on the wire; others are failures, or the router's own doing."""


def ended_to_wire(end: SourceEnd) -> prefill_pb2.Ended:
    cause = "" if end.cause is None else end.cause.message
    return prefill_pb2.Ended(how=REPORTED.get(end.state, prefill_pb2.Ended.HOW_UNSPECIFIED), cause=cause)
