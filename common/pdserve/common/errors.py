"""The tree of errors; each class has its gRPC status, its HTTP status and whether another attempt may help.

    PdServeError
      InvalidRequest          the client's fault, named by field, value and limit
        PromptTooLong
        BodyTooLarge
        UnsupportedMediaType
      NotFound                a worker, request or response that does not exist
        ModelNotFound         a name of no model and of no adapter
      Unauthenticated         no or a wrong API key
      PermissionDenied        a service's certificate lacks the role for a call
      Overloaded              admission refused it; `retry_after_s` says when to come back
        GrammarUnavailable    a worker could not compile a grammar in time, for no fault of the grammar
      DeadlineExceeded        the request's own deadline passed
      Cancelled               the client disconnected, or the request was aborted
      LayoutMismatch          two workers whose KV blocks differ
      KeyMismatch             a call between services without a valid proof of the deployment key
        ClockSkew             its time stamp is too far from the receiver's clock
      ProtocolMismatch        two services whose protocol versions do not work together
      PeerError               a peer sent a message or an error code that cannot be read
      TransferFailed          KV blocks could not be moved or did not verify
        DigestMismatch        the two calls carry different requests: never retried on the same pair
      WorkerLost              a worker died, or none is available
        WrongWorker           a call reached another worker or epoch than it was made for
      Evicted                 a sequence lost its blocks and is placed again
      NeedsPrefill            decode requires a prefill worker first
      AdapterUnavailable      a worker does not have a request's adapter, or has other content under its name
      Draining                the worker is shutting down
      InternalError           a bug of ours
        LogitsProcessorFailed a bug of a plug-in that the request named
      ConfigError             settings, a model folder or a port that cannot be used; raised before serving
        UnsupportedModel

`common/net/rpc.py` turns these into gRPC statuses and back; the router's `response_writer.py` turns them into HTTP.
"""

from __future__ import annotations

from typing import ClassVar, Self

import grpc

DEFAULT_RETRY_AFTER_S = 1.0
"""Seconds after which a request may come back that a service had no room for, unless the service has an estimate."""


class PdServeError(Exception):
    """Base of everything that pdserve raises on purpose."""

    code: ClassVar[str] = "internal_error"
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    is_for_clients: bool = False
    """The message was written for clients: it names no address, worker or connection. Not sent between services."""
    field: str | None = None
    """The request's field at fault, where one can be named; of an `InvalidRequest` or a `ModelNotFound`."""

    def for_clients(self) -> Self:
        """Mark the message as fit for clients. Returns the error itself."""
        self.is_for_clients = True
        return self

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else self.code


class InvalidRequest(PdServeError, ValueError):
    """A request that is invalid, so that a retry cannot succeed. A `ValueError`, which callers of vLLM catch."""

    code = "invalid_request"
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for one output token."""

    code = "prompt_too_long"


class BodyTooLarge(InvalidRequest):
    """A request of more bytes than a router takes."""

    code = "body_too_large"
    http_status = 413


class UnsupportedMediaType(InvalidRequest):
    """An HTTP body whose content type is not JSON."""

    code = "unsupported_media_type"
    http_status = 415


class NotFound(PdServeError):
    """Something named in a request does not exist."""

    code = "not_found"
    grpc_status = grpc.StatusCode.NOT_FOUND
    http_status = 404


class ModelNotFound(NotFound):
    """The request's `model` is neither a model's name nor an adapter's."""

    code = "model_not_found"
    field = "model"


class Unauthenticated(PdServeError):
    """No API key, or one that is not known."""

    code = "unauthenticated"
    grpc_status = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401
    hold_back_s: float = 0.0
    """Seconds by which the response should be delayed: addresses that fail repeatedly wait."""


class Forbidden(PdServeError):
    """The client's API key has not the role that the operation needs."""

    code = "forbidden"
    grpc_status = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403


class PermissionDenied(PdServeError):
    """A service called another whose methods its certificate's roles do not open."""

    code = "permission_denied"
    grpc_status = grpc.StatusCode.PERMISSION_DENIED
    http_status = 503


class Overloaded(PdServeError):
    """The service has no room; nothing was started."""

    code = "overloaded"
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    retryable = True

    def __init__(self, message: str, retry_after_s: float = DEFAULT_RETRY_AFTER_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.by_peer = False
        """True if another service raised it; otherwise this one or a channel did."""


class GrammarUnavailable(Overloaded):
    """A worker could not compile or match a grammar in time, for lack of CPU time or because a process ended."""

    code = "grammar_unavailable"
    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503


class DeadlineExceeded(PdServeError):
    """The request's deadline passed before it was done."""

    code = "deadline_exceeded"
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class Cancelled(PdServeError):
    """The client left or aborted the request."""

    code = "cancelled"
    grpc_status = grpc.StatusCode.CANCELLED
    http_status = 499


class LayoutMismatch(PdServeError):
    """Two workers' KV blocks differ in shape, dtype or model."""

    code = "layout_mismatch"
    grpc_status = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 503


class KeyMismatch(PdServeError):
    """A call between services has no proof of the deployment key, or a wrong, repeated or changed one."""

    code = "key_mismatch"
    grpc_status = grpc.StatusCode.UNAUTHENTICATED
    http_status = 503
    retryable = True


class ClockSkew(KeyMismatch):
    """The clocks of two services differ too much to distinguish a proof from an old one."""

    code = "clock_skew"


class ProtocolMismatch(PdServeError):
    """Two services whose protocol versions do not work together."""

    code = "protocol_mismatch"
    grpc_status = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 503
    retryable = True


class PeerError(PdServeError):
    """A peer sent something that cannot be read; another peer may serve the request."""

    code = "peer_error"
    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    retryable = True


class TransferFailed(PdServeError):
    """The KV blocks of an attempt could not be moved, or did not verify."""

    code = "transfer_failed"
    grpc_status = grpc.StatusCode.ABORTED
    http_status = 503
    retryable = True


class DigestMismatch(TransferFailed):
    """Prefill and decode were given different requests under one transfer."""

    code = "digest_mismatch"
    retryable = False


class WorkerLost(PdServeError):
    """A worker died, became unreachable, or none is available."""

    code = "worker_lost"
    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    retryable = True


class WrongWorker(WorkerLost):
    """A call reached another worker than it was made for: that epoch is over, or elsewhere."""

    code = "wrong_worker"


class Evicted(PdServeError):
    """A sequence lost its blocks and is cheaper to resume through prefill."""

    code = "evicted"
    grpc_status = grpc.StatusCode.ABORTED
    http_status = 503
    retryable = True


class NeedsPrefill(PdServeError):
    """More tokens are uncached than this worker prefills itself; nothing was done."""

    code = "needs_prefill"
    grpc_status = grpc.StatusCode.ABORTED
    http_status = 503
    retryable = True

    uncached_tokens: int = 0
    """Prompt tokens that would have to be computed. Not part of what travels as an error: see `DecodeEvent.needs_prefill`."""


class AdapterUnavailable(PdServeError):
    """A worker does not have the LoRA adapter of a request, or has other content under its name."""

    code = "adapter_unavailable"
    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    retryable = True


class Draining(PdServeError):
    """The worker is leaving and takes no new work."""

    code = "draining"
    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    retryable = True


class InternalError(PdServeError):
    """A bug of ours; the log has the traceback."""


class LogitsProcessorFailed(InternalError):
    """A plug-in raised, or made a NaN, on a row of this request; the worker's log has the traceback."""

    code = "logits_processor_failed"


class ConfigError(PdServeError):
    """Something that stops a service from starting: a setting, a folder, a port."""

    code = "config_error"
    grpc_status = grpc.StatusCode.FAILED_PRECONDITION


class UnsupportedModel(ConfigError):
    """A model folder whose architecture or feature is not implemented."""

    code = "unsupported_model"


def _tree(root: type[PdServeError]) -> list[type[PdServeError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


BY_CODE: dict[str, type[PdServeError]] = {error.code: error for error in _tree(PdServeError)}
"""Wire code -> class. An unknown code is read as `PeerError`."""
BY_CODE["internal_error"] = InternalError


def from_code(
    code: str, message: str, field: str | None = None, retry_after_s: float = DEFAULT_RETRY_AFTER_S
) -> PdServeError:
    """Rebuild a peer's error; unknown codes, which a newer peer may send, become `PeerError`.

    field: of an `InvalidRequest`. retry_after_s: of an `Overloaded`; replaced if it is no number of seconds.
    """
    kind = BY_CODE.get(code)
    error = PeerError(f"{message} (unknown error code {code[:64]!r})") if kind is None else kind(message)
    if isinstance(error, InvalidRequest):
        error.field = field or None
    if isinstance(error, Overloaded):
        error.retry_after_s = retry_after_s if 0 <= retry_after_s < float("inf") else DEFAULT_RETRY_AFTER_S
    return error
