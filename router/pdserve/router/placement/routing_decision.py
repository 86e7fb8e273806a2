"""`RoutingDecision`: one placement and its inputs, for `/debug/routing` and the span `route`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pdserve.common.worker_identity import WorkerRole
from pdserve.router.placement.placement import Candidate, Estimates, Placement, PlacementHint, PolicyName
from pdserve.router.workers.worker import RemoteWorker

LOG_LENGTH = 128
"""Number of placements that a router keeps."""
_MAX_IN_ATTRIBUTES = 16
"""Most candidates in a span's attributes."""

RouteAttribute = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
"""Value of an attribute of the span `route`."""
_OWN_FIELDS = ("time_unix_s", "request_id", "attempt", "policy", "hint", "kind", "prompt_tokens")


class CandidateView(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate's state at the time of the choice."""

    role: str
    worker_id: str
    epoch: str
    """Hexadecimal, because JSON readers may round 64-bit numbers."""
    overlap_blocks: int
    """Blocks of the prompt expected there."""
    confirmed_blocks: int
    """Blocks of the prompt reported by the worker."""
    cost_blocks: float
    load_blocks: float
    waiting_tokens: int
    held_blocks: int
    num_requests: int
    loads_adapter: bool
    """True if the worker would have to load the request's adapter."""

    @classmethod
    def of(cls, role: WorkerRole, candidate: Candidate) -> CandidateView:
        worker = candidate.worker
        return cls(
            role=role.value,
            worker_id=worker.identity.worker_id,
            epoch=f"{worker.identity.epoch:016x}",
            overlap_blocks=candidate.overlap_blocks,
            confirmed_blocks=candidate.confirmed_blocks,
            cost_blocks=round(candidate.cost_blocks, 3),
            load_blocks=round(candidate.load_blocks, 3),
            waiting_tokens=worker.waiting_tokens,
            held_blocks=worker.held_blocks,
            num_requests=worker.num_requests,
            loads_adapter=candidate.loads_adapter,
        )


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that could not be chosen."""

    role: str
    worker: str
    """The worker's id, or its address if the id is unknown."""
    why: str


class RoutingDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One placement, explained. Holds no part of the prompt."""

    unix_s: float
    request_id: str
    tenant: str = ""
    """The tenant of the request."""
    attempt: int
    policy: PolicyName
    hint: PlacementHint
    num_tokens: int
    data_parallel_rank: int | None = None
    """The rank of decode workers that the request prefers; None: no preference."""
    adapter: str = ""
    """Name of the request's adapter; "" for none."""
    placement: Placement
    candidates: tuple[CandidateView, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def has_its_rank(self) -> bool | None:
        """True if a decode worker of the preferred rank was chosen; None without a preference."""
        if self.data_parallel_rank is None:
            return None
        decode = self.placement.decode
        return decode is not None and decode.identity.data_parallel_rank == self.data_parallel_rank

    def content(self) -> dict[str, Any]:
        """For JSON."""
        placement = self.placement
        return {
            "time_unix_s": round(self.unix_s, 3),
            "request_id": self.request_id,
            "tenant": self.tenant,
            "attempt": self.attempt,
            "policy": self.policy,
            "hint": self.hint.value,
            "kind": placement.kind,
            "prompt_tokens": self.num_tokens,
            "data_parallel_rank": self.data_parallel_rank,
            "has_its_rank": self.has_its_rank,
            "adapter": self.adapter,
            "prefill": _name(placement.prefill),
            "decode": _name(placement.decode),
            "local_prefill_tokens": placement.local_prefill_tokens,
            "estimates": placement.estimates,
            "move": self._move(),
            "candidates": self.candidates,
            "left_out": self.left_out,
        }

    def _move(self) -> dict[str, Any] | None:
        if (move := self.placement.move) is None:
            return None
        return {
            "source": _name(move.source),
            "blocks": move.num_blocks,
            "move_s": round(move.move_s, 6),
            "compute_s": None if move.compute_s is None else round(move.compute_s, 6),
        }

    def own_content(self) -> dict[str, Any]:
        """For JSON, without workers, loads and cached blocks, which depend on other tenants."""
        content = self.content()
        return {name: content[name] for name in _OWN_FIELDS}

    def attributes(self) -> dict[str, RouteAttribute]:
        """Flat attributes of a span, without empty values. Those of candidates are lists in the order of `candidates`."""
        placement, candidates = self.placement, self.candidates[:_MAX_IN_ATTRIBUTES]
        estimates = placement.estimates or Estimates()
        flat: dict[str, RouteAttribute | None] = {
            "pdserve.route.policy": self.policy,
            "pdserve.route.hint": self.hint.value,
            "pdserve.route.kind": placement.kind,
            "pdserve.route.attempt": self.attempt,
            "pdserve.route.prefill": _name(placement.prefill),
            "pdserve.route.decode": _name(placement.decode),
            "pdserve.route.prefill_overlap_blocks": self._overlap(WorkerRole.PREFILL, placement.prefill),
            "pdserve.route.decode_overlap_blocks": self._overlap(WorkerRole.DECODE, placement.decode),
            "pdserve.route.data_parallel_rank": self.data_parallel_rank,
            "pdserve.route.has_its_rank": self.has_its_rank,
            "pdserve.adapter": self.adapter or None,
            "pdserve.route.local_prefill_tokens": placement.local_prefill_tokens,
            "pdserve.route.move_source": None if placement.move is None else _name(placement.move.source),
            "pdserve.route.move_blocks": None if placement.move is None else placement.move.num_blocks,
            "pdserve.route.local_estimate_s": estimates.local_s,
            "pdserve.route.remote_estimate_s": estimates.remote_s,
            "pdserve.route.candidates": [view.worker_id for view in candidates],
            "pdserve.route.candidates.role": [view.role for view in candidates],
            "pdserve.route.candidates.overlap_blocks": [view.overlap_blocks for view in candidates],
            "pdserve.route.candidates.cost_blocks": [view.cost_blocks for view in candidates],
            "pdserve.route.left_out": [
                f"{left.role} {left.worker}: {left.why}" for left in self.left_out[:_MAX_IN_ATTRIBUTES]
            ],
        }
        return {name: value for name, value in flat.items() if value is not None}

    def _overlap(self, role: WorkerRole, worker: RemoteWorker | None) -> int | None:
        if worker is None:
            return None
        name = worker.identity.worker_id
        views = (view for view in self.candidates if view.role == role.value and view.worker_id == name)
        return next((view.overlap_blocks for view in views), None)


def _name(worker: RemoteWorker | None) -> str | None:
    return None if worker is None else worker.identity.worker_id


class RoutingLog:
    """The last placements, newest last."""

    def __init__(self, length: int = LOG_LENGTH) -> None:
        self._decisions: deque[RoutingDecision] = deque(maxlen=length)

    def add(self, decision: RoutingDecision) -> None:
        self._decisions.append(decision)

    def content(self) -> list[dict[str, Any]]:
        """For JSON, newest first."""
        return [decision.content() for decision in reversed(self._decisions)]

    def content_of(self, tenant: str) -> list[dict[str, Any]]:
        """A tenant's placements for JSON, newest first, without information about other tenants."""
        return [decision.own_content() for decision in reversed(self._decisions) if decision.tenant == tenant]


def views(role: WorkerRole, candidates: Iterable[Candidate]) -> tuple[CandidateView, ...]:
    return tuple(CandidateView.of(role, candidate) for candidate in candidates)
