"""`as_client_sees`: the form of an error that a client may see. The router's log has the original.

Errors of workers and channels name addresses, epochs, paths and gRPC's connection texts, which clients must not see. So an
error's own message is sent only if its class describes the request, or if the router wrote the message for clients. Every other
error is sent as one fixed sentence per class, with its code unchanged.
"""

from __future__ import annotations

import logging

from pdserve.common.errors import (
    AdapterUnavailable,
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    LogitsProcessorFailed,
    NotFound,
    Overloaded,
    PdServeError,
    PeerError,
    TransferFailed,
    Unauthenticated,
    WorkerLost,
)

log = logging.getLogger(__name__)

_ABOUT_THE_REQUEST = (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    LogitsProcessorFailed,
    NotFound,
    Overloaded,
    Unauthenticated,
)
_SENTENCES: tuple[tuple[type[PdServeError], str], ...] = (
    (WorkerLost, "a worker was lost while it served this request"),
    (AdapterUnavailable, "a worker has the request's adapter no more, or with other content"),
    (TransferFailed, "the prompt's KV blocks could not be moved between two workers"),
    (PeerError, "a worker sent what cannot be used"),
    (Draining, "the service is leaving and takes no new requests"),
)
_ANY_OTHER = "internal error"
_LONGEST_CHARS = 2000


def as_client_sees(error: PdServeError, request_id: str) -> PdServeError:
    """Return the error to send. Logs the original under `request_id` if its message is not sent."""
    if error.is_for_clients or isinstance(error, _ABOUT_THE_REQUEST):
        return error
    log.warning("request %s ends with %s: %.*s", request_id, error.code, _LONGEST_CHARS, error.message)
    sentence = next((text for kind, text in _SENTENCES if isinstance(error, kind)), _ANY_OTHER)
    return _with_message(error, f"{sentence}; the router's log has the details under request {request_id}")


def _with_message(error: PdServeError, message: str) -> PdServeError:
    """An error of the same class, so of the same code and status, without the original as its cause."""
    kind = type(error)
    return kind(message).for_clients()
