"""Messages between an `EngineCoreClient` and its engine. All are values, so the engine may be in another process.

client -> engine   to a process `LoadModel`, first; `StartEngine`; then `AddRequest`, `ReleaseRequest`, `CallUtility` and commands;
                   `CloseEngine`, last
engine -> client   of a process `LoadedBytes`, then `Loaded`; `EngineStarted`; then `EngineCoreOutputs`, `TransferEvent`,
`Released`, `UtilityOutput`, of a process `EngineState`; `EngineFailed`, last

Between two processes a message is a msgpack value over a Unix socket pair; the end of the socket is the end of the peer. What
concerns
transfers is of the types of the engine's transfer side; after a process has sent it, it consists of msgpack's own types, which
`msgspec.convert` takes. Times are `clock.monotonic()` seconds, which all processes of a machine share.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.common.request.engine_types import EngineCoreEvent, EngineCoreOutputs, StreamingUpdate
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings, WorkerSettings
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.engine_info import EngineInfo
from pdserve.engine.request import Request
from pdserve.engine.scheduler_output import RequestFailure


class LoadModel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Load the model of a folder."""

    folder: str
    section: str
    """Of the settings: a worker's role, or empty."""
    settings: msgspec.Raw
    deployment_key: bytes

    @classmethod
    def of(cls, folder: str, settings: WorkerSettings, deployment_key: bytes) -> LoadModel:
        return cls(folder, settings.section, msgspec.Raw(msgspec.msgpack.encode(settings)), deployment_key)

    def decoded_settings(self) -> WorkerSettings:
        """Raises: msgspec.DecodeError."""
        types = {each.section: each for each in (WorkerSettings, PrefillSettings, DecodeSettings)}
        return msgspec.msgpack.decode(self.settings, type=types[self.section])


class StartEngine(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Start the engine's thread. `EngineStarted` answers."""

    warm_up: bool


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Queue a request, which the client's verifier has passed."""

    request_id: str
    request: msgspec.Raw
    """An `EngineCoreRequest`, decoded on its own: one that cannot be read ends without others."""
    transfer: Any = None
    """Where its blocks go, or come from: a value of the engine's transfer side. None: nowhere."""


class ReleaseRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Abort a request and its transfer, unless they have ended; `Released` follows."""

    request_id: str


class CallUtility(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Call a function of `utilities.py`, or of the transfer side; `UtilityOutput` answers."""

    call_id: int
    name: str
    args: list[Any]


class CloseEngine(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End transfers and engine, then the process."""


class Command(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Runs in the engine's thread, before the next step."""

    def run(self, core: EngineCore) -> None:
        raise NotImplementedError


class ResumeRequest(Command, frozen=True, array_like=True, tag=True):
    """A session's next turn."""

    update: StreamingUpdate

    def run(self, core: EngineCore) -> None:
        core.resume_request(self.update)


class FinishSession(Command, frozen=True, array_like=True, tag=True):
    request_id: str

    def run(self, core: EngineCore) -> None:
        core.finish_session(self.request_id)


class AbortRequests(Command, frozen=True, array_like=True, tag=True):
    request_ids: list[str]

    def run(self, core: EngineCore) -> None:
        for request_id in self.request_ids:
            core.abort_request(request_id)


class EndSequence(Command, frozen=True, array_like=True, tag=True):
    """One of a request's sequences, or this turn of a session, has ended where its text is made."""

    request_id: str
    index: int
    turn: int | None

    def run(self, core: EngineCore) -> None:
        core.scheduler.end_sequence(self.request_id, self.index, self.turn)


class MigrateSequence(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End a sequence after its next token, and send its blocks to the worker that continues it."""

    request_id: str
    index: int
    without_draft_head: bool
    receiver: Any
    """Where its blocks go: a value of the engine's transfer side."""


class FailRequest(Command, frozen=True, array_like=True, tag=True):
    request_id: str
    cause: RequestFailure

    def run(self, core: EngineCore) -> None:
        core.fail_request(self.request_id, self.cause.error())


class FailIdleSessions(Command, frozen=True, array_like=True, tag=True):
    """End sessions that are between two turns."""

    cause: RequestFailure

    def run(self, core: EngineCore) -> None:
        core.fail_idle_sessions(self.cause.error())


class FailRequests(Command, frozen=True, array_like=True, tag=True):
    """End all requests."""

    cause: RequestFailure

    def run(self, core: EngineCore) -> None:
        core.fail_all(self.cause.error())


class LoadedBytes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    loaded_bytes: int
    total_bytes: int


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    info: EngineInfo
    transfers: Any
    """Properties of the transfer side; None without one."""


class EngineStarted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine runs, and has warmed up if it was to."""


class AbortedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that its release has aborted."""

    moments: dict[str, float]
    """Name -> `clock.monotonic()` seconds."""
    prefill_chunks: list[tuple[float, int]]
    num_preemptions: int
    events: list[EngineCoreEvent]
    """Events since its last output."""

    @classmethod
    def of(cls, request: Request) -> AbortedRequest:
        return cls(request.moments, request.prefill_chunks, request.num_preemptions, request.events)


class Released(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine has nothing more of a released request. Follows its last outputs."""

    request_id: str
    aborted: AbortedRequest | None = None
    """None if the request had ended by itself."""
    received: Any = None
    """The transfer that delivered its blocks; None without one."""


class TransferEvent(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """News of a request's transfer."""

    request_id: str
    event: Any


class EngineState(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sent by a process every `STATE_EVERY_S`."""

    tick: int
    ticked_at: float
    transfers: Any
    """State of the transfer side; None without one."""


class UtilityOutput(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A call's result, or its failure."""

    call_id: int
    result: Any = None
    failure: RequestFailure | None = None


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The error that ended the engine, or with which it could not be loaded."""

    failure: RequestFailure


ToEngine = (
    LoadModel
    | StartEngine
    | AddRequest
    | ReleaseRequest
    | CallUtility
    | CloseEngine
    | ResumeRequest
    | FinishSession
    | AbortRequests
    | EndSequence
    | MigrateSequence
    | FailRequest
    | FailIdleSessions
    | FailRequests
)
ForReader = EngineCoreOutputs | TransferEvent | Released | EngineFailed
"""Messages that a client passes on to the reader of its engine."""
FromEngine = ForReader | LoadedBytes | Loaded | EngineStarted | EngineState | UtilityOutput
STATE_EVERY_S = 0.25
"""As often as an idle engine's tick moves."""
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
