"""`PreparedRequest`: a request after the router has validated, tokenized and hashed it; both calls of an attempt carry it."""

from __future__ import annotations

import time

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.sampling_params import SamplingParams

MAX_PRIORITY = 2**31 - 1
"""Largest value of the wire format."""
MAX_CLIENT_REQUEST_ID_CHARS = 256
MAX_TENANT_BYTES = 16
MAX_REQUEST_ID_CHARS = 128
"""A router's own ids have 36 at most."""
MAX_EOS_TOKEN_IDS = 1024


def verify_request_id(request_id: str) -> None:
    """Check the router's id of a request, which engines, logs and spans repeat. Raises: InvalidRequest."""
    if not (0 < len(request_id) <= MAX_REQUEST_ID_CHARS and request_id.isascii() and request_id.isprintable()):
        raise InvalidRequest(
            f"request.request_id is {request_id[:40]!r} of {len(request_id)} characters, 1 to {MAX_REQUEST_ID_CHARS} "
            "printable ASCII characters are needed",
            "request_id",
        )


def verify_priority(priority: int) -> None:
    """Raises: InvalidRequest."""
    if not -MAX_PRIORITY - 1 <= priority <= MAX_PRIORITY:
        raise InvalidRequest(f"priority must be from {-MAX_PRIORITY - 1} to {MAX_PRIORITY}, not {priority}", "priority")


def verify_client_request_id(client_request_id: str, field: str = "client_request_id") -> None:
    """Check the client's id of its request: it goes into spans, so it is short and one line.

    field: the client's name of the field. Raises: InvalidRequest.
    """
    if len(client_request_id) > MAX_CLIENT_REQUEST_ID_CHARS:
        raise InvalidRequest(
            f"{field} has {len(client_request_id)} characters, at most {MAX_CLIENT_REQUEST_ID_CHARS} are allowed",
            field,
        )
    if not client_request_id.isprintable():
        place = next(place for place, char in enumerate(client_request_id) if not char.isprintable())
        raise InvalidRequest(
            f"{field} has U+{ord(client_request_id[place]):04X} at character {place}, "
            "only printable characters are allowed",
            field,
        )


class ResumeState(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """One sequence that earlier attempts have begun, with the client's output of it."""

    index: int
    output_token_ids: list[int]


class PreparedRequest(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """One request, ready to be placed."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]
    block_hashes: list[bytes]
    """24 bytes for each full block of `given_token_ids`. They do not travel: each service computes its own."""
    hash_root: bytes
    request_digest: bytes
    deadline: float
    """`time.monotonic()` of this process at which the request has failed."""
    trace_headers: dict[str, str] = {}
    client_request_id: str = ""
    """The client's id of the request, for spans."""
    priority: int = 0
    """Lower runs first, where the worker's `scheduling_policy` is `priority`."""
    placement_hashes: list[bytes] = []
    """8 bytes for each of `block_hashes`, by which workers publish them. At the router alone."""
    pooling_params: PoolingParams | None = None
    """For an embedding; `sampling_params` mean nothing then."""
    tenant: bytes = b""
    """The tenant, as an opaque digest of at most `MAX_TENANT_BYTES`; b"" where there is one tenant."""
    resume: ResumeState | None = None
    """Index of the one sequence that is resumed; None for all sequences of a new request."""

    @property
    def given_token_ids(self) -> list[int]:
        """Tokens computed before the first new one: the prompt, and the output of the resumed sequence."""
        return self.prompt_token_ids if self.resume is None else self.prompt_token_ids + self.resume.output_token_ids

    @property
    def num_sequences(self) -> int:
        """Sequences that engines are asked for."""
        return self.sampling_params.n if self.resume is None else 1

    @property
    def remaining_s(self) -> float:
        """Seconds left of the deadline; not below 0."""
        return max(0.0, self.deadline - time.monotonic())
