"""`ServiceChannel`: calls to one epoch of one worker, each with a proof of the deployment key.

A request is serialized once: the proof covers the bytes that are sent. A response that cannot be decoded arrives as
`Undecodable` instead of a traceback in gRPC's own log; `readable` turns it into an error of that peer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import grpc.aio
from google.protobuf.message import Message

from pdserve.common.errors import PeerError
from pdserve.common.kv_events import WorkerKey
from pdserve.common.rate_limited_log import RateLimitedLog
from pdserve.common.security.call_proof import CallSigner, Metadata
from pdserve.common.security.peer_message import parsed
from pdserve.v1 import kv_source_pb2, step_stream_pb2, worker_pb2

Req = TypeVar("Req", bound=Message)
Res = TypeVar("Res", bound=Message)
M = TypeVar("M")

_warnings = RateLimitedLog(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class Method(Generic[Req, Res]):
    """One method of a service between routers and workers."""

    path: str
    request: type[Req]
    response: type[Res]
    max_response_bytes: int | None = None
    """A larger response is not decoded. None: only gRPC's own limit."""


STEP_STREAM = Method("/pdserve.v1.StepStreamService/Open", step_stream_pb2.StepCommands, step_stream_pb2.StepOutputs)
ATTACH = Method("/pdserve.v1.KvSourceService/Attach", kv_source_pb2.AttachRequest, kv_source_pb2.AttachEvent)
MEET = Method("/pdserve.v1.WorkerService/Meet", worker_pb2.MeetRequest, worker_pb2.MeetResponse)
DRAIN = Method("/pdserve.v1.WorkerService/Drain", worker_pb2.DrainRequest, worker_pb2.DrainResponse)
SET_ROLE = Method("/pdserve.v1.WorkerService/SetRole", worker_pb2.SetRoleRequest, worker_pb2.SetRoleResponse)


class Undecodable:
    """A peer's message that cannot be decoded."""

    __slots__ = ("error",)

    def __init__(self, error: PeerError) -> None:
        self.error = error


def readable(message: M | Undecodable) -> M:
    """A decoded response. Raises: PeerError if it could not be decoded, which is logged at most once per minute and peer."""
    if isinstance(message, Undecodable):
        raise message.error
    return message


def warn_of(peer: str, error: PeerError) -> None:
    """Log at most once per minute and peer, since a peer's messages may be hostile."""
    _warnings.warning(peer, "%s; the call fails", error.message)


def decoder(response: type[Res], peer: str, max_bytes: int | None = None) -> Callable[[bytes], Res]:
    """A deserializer for gRPC, which never raises: it returns `Undecodable` for invalid bytes, which `readable` turns into an
    error. max_bytes: of a message; None: only gRPC's own limit."""

    def decode(raw: bytes) -> Res:
        try:
            if max_bytes is not None and len(raw) > max_bytes:
                raise PeerError(
                    f"a {response.DESCRIPTOR.name} from {peer} has {len(raw)} bytes, at most {max_bytes} are possible"
                )
            return cast(Res, parsed(f"a {response.DESCRIPTOR.name} from {peer}", response.FromString, raw))
        except PeerError as error:
            warn_of(peer, error)
            return cast(Res, Undecodable(error))

    return decode


def as_bytes(message: Message | bytes) -> bytes:
    """A serializer for gRPC; serialized messages pass unchanged."""
    return message if isinstance(message, bytes) else message.SerializeToString()


class ServiceChannel:
    """A gRPC channel, and the signer of calls to one worker. Several `ServiceChannel`s may share a channel."""

    def __init__(self, channel: grpc.aio.Channel, signer: CallSigner, receiver: WorkerKey) -> None:
        self.channel = channel
        self._signer = signer
        self._receiver = receiver

    def unary_unary(
        self, method: Method[Req, Res], request: Req, *, timeout: float | None = None
    ) -> grpc.aio.UnaryUnaryCall[Req, Res]:
        """Make a call. The caller passes the awaited result to `readable`."""
        raw = request.SerializeToString()
        call: Any = self.channel.unary_unary(method.path, None, self._decoder(method))
        return cast("grpc.aio.UnaryUnaryCall[Req, Res]", call(raw, timeout=timeout, metadata=self._proof(method, raw)))

    def stream_stream(self, method: Method[Req, Res], first: bytes) -> grpc.aio.StreamStreamCall[Req, Res]:
        """first: the serialized first message, which is signed; the caller writes it.

        The caller passes each message that it reads to `readable`.
        """
        call: Any = self.channel.stream_stream(method.path, as_bytes, self._decoder(method))
        return cast("grpc.aio.StreamStreamCall[Req, Res]", call(metadata=self._proof(method, first)))

    def _proof(self, method: Method[Any, Any], raw: bytes) -> Metadata:
        return self._signer.metadata(method.path, self._receiver, raw)

    def _decoder(self, method: Method[Any, Res]) -> Callable[[bytes], Res]:
        return decoder(method.response, f"worker {self._receiver[0]}", method.max_response_bytes)
