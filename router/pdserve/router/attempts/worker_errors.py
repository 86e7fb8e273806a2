"""`believed`: the error that a router takes over from a worker, as far as it can check it.

A compromised or broken worker must not decide which error a client gets. Its error counts as the request's own only if the request
has the part that the error is about; every other error is the worker's, and the request is tried elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pdserve.common.errors import (
    AdapterUnavailable,
    BodyTooLarge,
    DeadlineExceeded,
    DigestMismatch,
    Draining,
    Evicted,
    GrammarUnavailable,
    InternalError,
    InvalidRequest,
    LogitsProcessorFailed,
    NeedsPrefill,
    Overloaded,
    PdServeError,
    PeerError,
    PromptTooLong,
    TransferFailed,
    WorkerLost,
)
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.wire.request_bytes import encode_request
from pdserve.router.workers.call_failure import CallFailed

MAX_TEXT_CHARS = 2000
"""Characters of a worker's message about a request, at most."""
MAX_RETRY_AFTER_S = 60.0
"""Most seconds for which a worker may delay a retry."""
DEADLINE_MARGIN_S = 0.25
"""Seconds by which a worker may report the deadline earlier than it passes here."""
_LARGE_BYTES = 1 << 20
"""Every worker takes requests of this size."""

_GIVEN: Mapping[str, Callable[[GenerationRequest], object]] = {
    "structured_outputs": lambda request: request.sampling_params.structured_outputs,
    "logits_processors": lambda request: request.sampling_params.logits_processors,
    "allowed_token_ids": lambda request: request.sampling_params.allowed_token_ids,
    "bad_words": lambda request: request.sampling_params.bad_words_token_ids,
    "min_tokens": lambda request: request.sampling_params.min_tokens,
    "prompt_embeds": lambda request: request.prompt_embeds is not None,
    "mm_features": lambda request: request.mm_features,
    "multi_modal_data": lambda request: request.mm_features,
}
"""Field that a worker checks and a router cannot -> whether a request gives it."""
_OF_ANY_WORKER = (DigestMismatch, Draining, PeerError, WorkerLost)
_OF_THE_RECEIVER = (Evicted, NeedsPrefill, TransferFailed)
"""Errors that the worker which serves the text says of itself. Of a source, what it has not delivered is a failed transfer."""


def believed(
    failure: CallFailed, request: GenerationRequest, *, is_source: bool = False, is_session: bool = False
) -> CallFailed:
    """The failure of a call with an error that may reach the client.

    is_source: the worker only computes the prompt's KV, for another one that serves the request. is_session: the worker counts
    the tokens of earlier turns.
    """
    error = _of_session(failure.error) if is_session else None
    error = error or _error(failure.error, request, is_source)
    return CallFailed(error, failure.died, is_answer=failure.is_answer)


def may_fail_by_itself(request: GenerationRequest) -> bool:
    """True if it has something that a worker may refuse, whichever worker it is."""
    return any(given(request) for given in _GIVEN.values())


def _of_session(error: PdServeError) -> PdServeError | None:
    """An error by which a worker may end a session, or refuse one: its limits are its own, and it counts the turns."""
    if isinstance(error, Overloaded):
        error.retry_after_s = min(error.retry_after_s, MAX_RETRY_AFTER_S)
    return _with_bounded_text(error) if isinstance(error, DeadlineExceeded | Overloaded | PromptTooLong) else None


def _error(error: PdServeError, request: GenerationRequest, is_source: bool) -> PdServeError:
    if _is_about(error, request):
        return _bounded(error)
    speaks_of_itself = isinstance(error, _OF_THE_RECEIVER) or type(error) is InternalError
    if isinstance(error, _OF_ANY_WORKER) or (speaks_of_itself and not is_source):
        return error
    said = f"the worker answered with {error.code}: {error.message[:MAX_TEXT_CHARS]}"
    return TransferFailed(said) if is_source else PeerError(said)


def _is_about(error: PdServeError, request: GenerationRequest) -> bool:
    """True if the request itself may have caused the error, and has what it is about."""
    match error:
        case BodyTooLarge():
            return len(encode_request(request)) > _LARGE_BYTES
        case InvalidRequest():
            given = _GIVEN.get(error.field or "")
            return given is not None and bool(given(request))
        case LogitsProcessorFailed():
            return bool(request.sampling_params.logits_processors)
        case DeadlineExceeded():
            return request.remaining_s <= DEADLINE_MARGIN_S
        case AdapterUnavailable():
            return bool(request.lora_name)
        case GrammarUnavailable():
            return request.sampling_params.structured_outputs is not None
        case Overloaded():
            return True
        case _:
            return False


def _bounded(error: PdServeError) -> PdServeError:
    """The same error with a text and numbers that the router answers for."""
    if isinstance(error, DeadlineExceeded):
        return DeadlineExceeded("the request's deadline passed while a worker served it")
    if isinstance(error, Overloaded):
        kind: type[Overloaded] = Overloaded
        said = "the workers that could serve this have no room"
        if isinstance(error, GrammarUnavailable):
            kind, said = (
                GrammarUnavailable,
                "no worker could compile or match the grammar of structured_outputs in time",
            )
        full = kind(said, min(error.retry_after_s, MAX_RETRY_AFTER_S))
        full.by_peer = error.by_peer
        return full
    return _with_bounded_text(error)


def _with_bounded_text(error: PdServeError) -> PdServeError:
    error.args = ("".join(char if char.isprintable() else " " for char in error.message[:MAX_TEXT_CHARS]),)
    return error
