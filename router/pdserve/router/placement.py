"""Where the legs of an attempt run: pure functions over the workers as they stand.

Decode is chosen first, then prefill among the workers whose blocks decode can read.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from pdserve.router.worker import Worker

LocalPrefill = Literal["never", "auto", "always"]
WorkerKey = tuple[str, int]


class Wish(enum.Enum):
    """What the request's history asks of its next placement."""

    ANY = "any"
    LOCAL = "local"
    """Decode prefills: a transfer failed before."""
    REMOTE = "remote"
    """Through a prefill worker: decode said that it needs one, or evicted the request."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt's workers. Without prefill, decode prefills; without decode, only the first token is wanted."""

    prefill: Worker | None = None
    decode: Worker | None = None
    prefill_here: bool = False
    """No prefill worker lives, so decode must not ask for one."""


def place(
    num_tokens: int,
    max_tokens: int,
    *,
    prefill: Sequence[Worker],
    decode: Sequence[Worker],
    local_prefill: LocalPrefill,
    wish: Wish = Wish.ANY,
    blamed: Collection[WorkerKey] = (),
) -> Placement | None:
    """Workers for a prompt of `num_tokens`, or None while there are none that may serve it.

    prefill, decode: workers that live. blamed: workers to avoid while there is another way.
    """
    if max_tokens == 1 and local_prefill != "always":
        if alone := least_loaded(prefill, blamed):
            return Placement(prefill=alone)
        if local_prefill == "never":
            return None
    if local_prefill == "never":
        decode = [worker for worker in decode if partners(worker, prefill)]
    chosen = least_loaded(decode, blamed)
    if chosen is None:
        return None
    candidates = partners(chosen, prefill)
    if not candidates:
        return Placement(decode=chosen, prefill_here=True)
    if _prefills_itself(chosen, num_tokens, local_prefill, wish):
        return Placement(decode=chosen)
    must = local_prefill == "never" or wish is Wish.REMOTE
    source = least_loaded(candidates, blamed, strict=not must)
    return Placement(prefill=source, decode=chosen)


def partners(decode: Worker, prefill: Sequence[Worker]) -> list[Worker]:
    """The prefill workers whose KV blocks `decode` can read."""
    return [worker for worker in prefill if worker.identity.layout == decode.identity.layout]


def least_loaded(
    workers: Sequence[Worker], blamed: Collection[WorkerKey] = (), *, strict: bool = False
) -> Worker | None:
    """The worker of lowest cost; a blamed one only when there is no other, and under `strict` not even then.

    Of equally loaded workers the one that this router has used least.
    """
    fresh = [worker for worker in workers if worker.key not in blamed]
    candidates = fresh if fresh or strict else workers
    return min(candidates, key=lambda worker: (cost_blocks(worker), worker.num_placed), default=None)


def cost_blocks(worker: Worker) -> float:
    """Work that waits at a worker, in blocks: what is still to prefill there, and one for each request it holds."""
    return worker.waiting_tokens / worker.identity.layout.block_size + worker.num_requests


def _prefills_itself(decode: Worker, num_tokens: int, local_prefill: LocalPrefill, wish: Wish) -> bool:
    if local_prefill == "never" or wish is Wish.REMOTE:
        return False
    limit = decode.identity.max_local_prefill_tokens
    if limit is not None and num_tokens > limit:
        return False
    return local_prefill == "always" or wish is Wish.LOCAL
