"""`as_client_sees`: what a client is given of an error. The router's log has the rest.

Errors of workers and channels name addresses, epochs, paths and gRPC's connection texts. None of that is a client's
business, so an error's own message goes out only where its class speaks about the request, or where the router wrote the
message for clients. Everything else goes out as one fixed sentence per class, with the code unchanged.
"""

from __future__ import annotations

import logging

from pdserve.common.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    LogitsProcessorFailed,
    NotFound,
    Overloaded,
    PdServeError,
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
    (TransferFailed, "the prompt's KV blocks could not be moved between two workers"),
    (Draining, "the service is leaving and takes no new requests"),
)
_ANY_OTHER = "internal error"
_LONGEST_CHARS = 2000


def as_client_sees(error: PdServeError, request_id: str) -> PdServeError:
    """The error that goes out. Logs the original under `request_id` where its message stays here."""
    if error.is_for_clients or isinstance(error, _ABOUT_THE_REQUEST):
        return error
    log.warning("request %s ends with %s: %.*s", request_id, error.code, _LONGEST_CHARS, error.message)
    sentence = next((text for kind, text in _SENTENCES if isinstance(error, kind)), _ANY_OTHER)
    return _with_message(error, f"{sentence}; the router's log has the details under request {request_id}")


def _with_message(error: PdServeError, message: str) -> PdServeError:
    """An error of the same class, so of the same code and status, without the original as its cause."""
    kind = type(error)
    return kind(message).for_clients()
