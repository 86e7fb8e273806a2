"""Messages between services: how large they may be, and how they are parsed.

Parsing time follows the number of fields rather than bytes: 16 MiB of empty entries take 0.3 s of processor time and 1 GiB of
memory. So the size of requests follows from what a worker's model takes, and fields are counted before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from pdserve.common.errors import InvalidRequest, PeerError
from pdserve.common.security.wire_size import verify_num_fields

MAX_FIELDS = 8192
"""Fields of one message and of the messages in it. A request has about 2,000 at most: biases, bad words, stop strings."""
_LEAST_BYTES_OF_A_FIELD = 2
_BASE_BYTES = 1 << 20
"""Every field of a request but token ids at its limit takes less than half of this."""
_TOKEN_BYTES = 8


def max_request_bytes(max_model_len: int, vocab_size: int) -> int:
    """Size up to which a worker takes messages: a whole context, and a list of all tokens that may be sampled."""
    return _BASE_BYTES + _TOKEN_BYTES * (max_model_len + vocab_size)


def parsed(what: str, parse: Callable[[bytes], Any], raw: bytes) -> Any:
    """The protobuf message that `raw` holds. what: names it in errors. parse: its class' `FromString`.

    Raises: PeerError for one that cannot be decoded or has more than `MAX_FIELDS` fields.
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
