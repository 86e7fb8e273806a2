"""Messages between services: how large they may be, and how they are parsed.

Parsing time follows the number of fields rather than bytes: 16 MiB of empty entries take 0.3 s of CPU time and 1 GiB of
memory. So the size of requests follows from what a worker's model takes, and fields are counted before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from pdserve.common.errors import InvalidRequest, PeerError
from pdserve.common.security.wire_size import verify_num_fields

MAX_FIELDS = 8192
"""Limit of fields in one message and in its nested messages. A request has at most about 2,000: biases, bad words, stop strings."""
_LEAST_BYTES_OF_A_FIELD = 2
_BASE_BYTES = 1 << 20
"""Bytes for the fields of a request other than token ids; all of them at their limits take less than half of it."""
_TOKEN_BYTES = 8
COMMAND_BYTES = 64 << 10
"""Bytes of a router's message besides one request of the largest size: ended sequences and cancelled calls take half at most."""


def max_request_bytes(max_model_len: int, vocab_size: int) -> int:
    """Size up to which a worker takes requests: a whole context, and a list of all tokens that may be sampled."""
    return _BASE_BYTES + _TOKEN_BYTES * (max_model_len + vocab_size)


def max_event_bytes(max_model_len: int, vocab_size: int) -> int:
    """Size up to which a router takes an event of one call: merged log-probabilities, or those of a step over all tokens."""
    return 4 * _BASE_BYTES + 2 * _TOKEN_BYTES * (max_model_len + vocab_size)


def parsed(what: str, parse: Callable[[bytes], Any], raw: bytes) -> Any:
    """Parse `raw`, a protobuf message. what: name of the message for errors. parse: `FromString` of its class.

    Raises: PeerError for a message that cannot be decoded or has more than `MAX_FIELDS` fields.
    """
    kind = getattr(parse, "__self__", None)
    try:
        if len(raw) > _LEAST_BYTES_OF_A_FIELD * MAX_FIELDS and kind is not None:
            verify_num_fields(raw, kind.DESCRIPTOR, MAX_FIELDS)
        return parse(raw)
    except InvalidRequest:
        raise PeerError(f"{what} of {len(raw)} bytes has more than {MAX_FIELDS} fields") from None
    except DecodeError:
        raise PeerError(f"{what} of {len(raw)} bytes cannot be decoded") from None
