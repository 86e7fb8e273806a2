"""Messages between `ProcessClient` and the process of its engine: msgpack values over a Unix socket pair.

client -> engine   `Load`, once; then `AddRequest`, `ResumeRequest`, `FinishSession`, `AbortRequests`, `EndSequence`, `Utility`
engine -> client   `Loaded`, once; then `Outputs`, `UtilityOutput`; `EngineDead`, last

The end of the socket is the end of the peer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.common.request.engine_types import EngineCoreOutputs, StreamingUpdate
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.engine_info import EngineInfo
from pdserve.engine.scheduler_output import RequestFailure


class Load(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Load the model of a folder."""

    folder: str
    settings: WorkerSettings


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    request: msgspec.Raw
    """An `EngineCoreRequest`, decoded on its own: one that cannot be read ends alone."""


class ResumeRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A session's next turn."""

    update: StreamingUpdate


class FinishSession(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_ids: list[str]


class EndSequence(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    index: int


class Utility(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Call a function of `utilities.py`."""

    call_id: int
    name: str
    args: list[Any]


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    info: EngineInfo


class Outputs(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The results of one step."""

    outputs: EngineCoreOutputs


class UtilityOutput(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A call's result, or its failure."""

    call_id: int
    result: Any = None
    failure: RequestFailure | None = None


class EngineDead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The error that ended the engine, or with which it could not be loaded."""

    failure: RequestFailure


ToEngine = Load | AddRequest | ResumeRequest | FinishSession | AbortRequests | EndSequence | Utility
FromEngine = Loaded | Outputs | UtilityOutput | EngineDead
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
