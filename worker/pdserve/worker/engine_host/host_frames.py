"""Messages between `ProcHost` and the process of its engine: msgpack values over a Unix socket pair.

worker -> engine   `LoadHost`, first; `BeginTransfers`, `ServeAttach`, `StartEngine`; then requests and streams; `CloseHost`, last
engine -> worker   `LoadedBytes`; `HostLoaded` or `HostFailed`; `EngineStarted`; then `StepOutputs`, `HostState`, and ends of
                   all kinds; `HostFailed`, last, when the engine fails

The end of the socket is the end of the peer. Times are `time.monotonic()` seconds, which all processes of a machine share.
"""

from __future__ import annotations

import signal

import msgspec

from pdserve.common.request.engine_types import EngineCoreOutputs, StreamingUpdate
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from pdserve.engine.scheduler_output import RequestFailure
from pdserve.kv_transfer.control.receiver_transfer import SourceRef
from pdserve.kv_transfer.control.source_transfer import ExpectedTransfer, PeerId
from pdserve.kv_transfer.control.transfer_state import SourceState
from pdserve.kv_transfer.control.transfer_view import TransfersPage
from pdserve.worker.engine_host.engine_host import HostInfo, RequestEnd, TransferCounts


class LoadHost(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Load a model, and make connectors. One of the settings is given."""

    folder: str
    deployment_key: bytes
    prefill: PrefillSettings | None
    decode: DecodeSettings | None


class BeginTransfers(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker has this identity."""

    identity: PeerId


class ServeAttach(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker is a source: `OpenAttach` may follow."""


class StartEngine(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Start the engine and warm it up."""


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Queue a request; at most one of `expected` and `source` is given."""

    request_id: str
    request: msgspec.Raw
    """An `EngineCoreRequest`, decoded on its own: one that cannot be read ends alone."""
    expected: ExpectedTransfer | None = None
    source: SourceRef | None = None


class ResumeRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A session's next turn."""

    update: StreamingUpdate


class ReleaseRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str


class AbortRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str


class EndSequence(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    index: int
    turn: int | None


class FailIdleSessions(msgspec.Struct, frozen=True, array_like=True, tag=True):
    cause: RequestFailure


class FailRequests(msgspec.Struct, frozen=True, array_like=True, tag=True):
    cause: RequestFailure


class RevokeTransfers(msgspec.Struct, frozen=True, array_like=True, tag=True):
    cause: RequestFailure


class MeetPeer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    worker_id: str
    epoch: int
    address: str


class GetTransfers(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`Transfers` answers."""

    call_id: int


class AddLora(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read and check the adapter in a folder; `LoraAdded` answers."""

    call_id: int
    folder: str


class RemoveLora(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget the adapter in a folder."""

    folder: str


class OpenAttach(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A peer's control stream, whose signature and role the worker has checked."""

    stream_id: int
    host: str
    """The peer's address, without a port."""
    opening: bytes
    """`Open`, serialized."""


class AttachMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message of the peer: `AttachRequest`, serialized; None: it has closed its side."""

    stream_id: int
    message: bytes | None


class CloseAttach(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The call has ended."""

    stream_id: int


class CloseHost(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End all of it, then the process."""


class LoadedBytes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    loaded_bytes: int
    total_bytes: int


class HostLoaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    info: HostInfo


class HostFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The error that ended the engine, or with which it could not be loaded."""

    cause: RequestFailure


class EngineStarted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `StartEngine`: the engine has warmed up."""


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The results of one step."""

    outputs: EngineCoreOutputs


class Receiving(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    awaits_source: bool


class BlocksLanded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    num_blocks: int
    connector: str


class SourceEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    state: SourceState
    cause: RequestFailure | None


class Released(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    end: RequestEnd


class HostState(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sent every `STATE_EVERY_S`."""

    tick: int
    ticked_at: float
    counts: TransferCounts


class Transfers(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int
    page: TransfersPage


class LoraAdded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int
    fingerprint: str
    """Empty if it cannot be used."""
    cause: RequestFailure | None = None


class AttachEvent(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message to the peer: kv_source.proto's `AttachEvent`, serialized; None ends the stream."""

    stream_id: int
    event: bytes | None


ToHost = (
    LoadHost
    | BeginTransfers
    | ServeAttach
    | StartEngine
    | AddRequest
    | ResumeRequest
    | ReleaseRequest
    | AbortRequest
    | EndSequence
    | FailIdleSessions
    | FailRequests
    | RevokeTransfers
    | MeetPeer
    | GetTransfers
    | AddLora
    | RemoveLora
    | OpenAttach
    | AttachMessage
    | CloseAttach
    | CloseHost
)
FromHost = (
    LoadedBytes
    | HostLoaded
    | HostFailed
    | EngineStarted
    | StepOutputs
    | Receiving
    | BlocksLanded
    | SourceEnded
    | Released
    | HostState
    | Transfers
    | LoraAdded
    | AttachEvent
)
STACKS_SIGNAL = signal.SIGUSR1
"""Has the engine's process write the stacks of its threads."""
STATE_EVERY_S = 0.25
"""As often as an idle engine's tick moves."""
decode_to_host = msgspec.msgpack.Decoder(ToHost).decode
decode_from_host = msgspec.msgpack.Decoder(FromHost).decode
