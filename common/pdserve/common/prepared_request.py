"""A request after the router has prepared it: validated, tokenized, hashed. What both legs of an attempt carry."""

from __future__ import annotations

import time

import msgspec

from pdserve.common.sampling_params import SamplingParams


class PreparedRequest(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """One request, ready to be placed."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]
    block_hashes: list[bytes]
    """16 bytes for each full block of the prompt."""
    hash_root: bytes
    request_digest: bytes
    deadline: float
    """`time.monotonic()` of this process at which the request has failed."""
    trace_headers: dict[str, str] = {}
    priority: int = 0

    @property
    def remaining_s(self) -> float:
        """Seconds left of the deadline; not below 0."""
        return max(0.0, self.deadline - time.monotonic())
