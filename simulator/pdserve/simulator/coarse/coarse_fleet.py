"""`CoarseFleet`: many workers and a router's choices, without messages.

Placement is the product's `place` over its own account of each worker, and its prefix index. Of many equal workers, those that have
equally much of a prompt differ by their load only, so `place` gets the least loaded one of each such group.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import cast

import numpy as np

from pdserve.common import clock
from pdserve.common.errors import ConfigError, InvalidRequest, Overloaded, PromptTooLong, WorkerLost
from pdserve.common.kv_events import WorkerKey
from pdserve.common.net.service_channel import ServiceChannel
from pdserve.common.protocol import PROTOCOL_VERSION
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.common.worker_identity import WorkerIdentity, WorkerRole
from pdserve.engine.runner.loading.loaded_model import LoadedModel, load_outline
from pdserve.router.admission.admission import Admission
from pdserve.router.admission.place import AdmissionLimits, Cost, Waiter, capacity_of
from pdserve.router.placement.placement import Candidate, Placement, PlacementRules, place
from pdserve.router.placement.prefix_index import PrefixIndex
from pdserve.router.workers.worker import LoadReservation, RemoteWorker, WorkerLoad
from pdserve.simulator.coarse.coarse_worker import Cache, CoarseWorker, EngineLimits, Work
from pdserve.simulator.coarse.event_queue import EventQueue
from pdserve.simulator.virtual_fleet import FleetPlan, WorkerPlan, verify_simulated
from pdserve.simulator.virtual_transfer import Link

ONLY_EXACT = MappingProxyType({"kv_host_mib": 0, "kv_store": None, "speculative_config": None})
"""Settings of workers -> the values that the coarse mode takes."""
PLACED_WEIGHT = 1e-9
"""Of a choice, in blocks of load: loads differ by more."""
REPORT_S = 1.0
"""Seconds between two reports of a worker."""


@dataclass(slots=True, eq=False)
class CoarseRequest:
    """A request with what became of it. Times in seconds since the beginning."""

    num_tokens: int
    num_outputs: int
    hashes: Sequence[bytes]
    """Of the prompt's full blocks, in the trace's sizes."""
    hash_tokens: int
    on_end: Callable[[CoarseRequest], None]
    answer_hashes: Sequence[bytes] = ()
    """Of the blocks after those, which the answer fills, as far as a later prompt has them."""
    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    num_cached: int = 0
    error: str = ""
    waiter: Waiter | None = None
    """From its entry into the router until it has left."""

    def leave(self) -> None:
        """No effect: the router does not stop before it has ended."""


class _Granted:
    """A `Granted` that calls."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self.is_done = False
        self.waits = False
        """True once `ask` has returned."""

    def done(self) -> bool:
        return self.is_done

    def set_result(self, result: None, /) -> None:
        self.is_done = True
        if self.waits:
            self._call()


class _Member:
    """A worker, and the router's account of it."""

    def __init__(self, remote: RemoteWorker, worker: CoarseWorker, link: Link, number: int) -> None:
        """number: in the prefix index."""
        self.remote = remote
        self.number = number
        self.worker = worker
        self.link = link
        self.link_free_s = 0.0
        """When what it reads so far has landed."""
        self._reported_s = 0.0
        self.token_bytes = remote.identity.layout.total_place_bytes / remote.identity.layout.block_size

    def report(self, now_s: float) -> None:
        """What the worker tells each `REPORT_S`, as far as the router does not know it from its own account."""
        if now_s - self._reported_s >= REPORT_S:
            self._reported_s = now_s
            self.remote.report(WorkerLoad(prefill_tokens_per_s=self.worker.prefill_rate.tokens_per_s))


class _ByLoad:
    """The members of a role with their loads, by their numbers in the prefix index."""

    def __init__(self) -> None:
        self.members: list[_Member] = []
        self.by_key: dict[WorkerKey, _Member] = {}
        self._by_number: dict[int, _Member] = {}
        self.mask = 0
        self._loads = np.full(0, np.inf)
        """Blocks; infinite for numbers of the other role."""

    def add(self, member: _Member) -> None:
        self.members.append(member)
        self.by_key[member.remote.key] = self._by_number[member.number] = member
        self.mask |= 1 << member.number
        more = member.number + 1 - len(self._loads)
        self._loads = np.concatenate([self._loads, np.full(max(0, more), np.inf)])
        self.changed(member)

    def changed(self, member: _Member) -> None:
        """Its load is another one."""
        load = Candidate(worker=member.remote, num_tokens=1).load_blocks
        # of equally loaded ones, that which was chosen least often
        self._loads[member.number] = load + PLACED_WEIGHT * member.remote.num_placed

    def least(self, mask: int) -> _Member:
        """The least loaded one of a mask with one of them at least."""
        if mask == self.mask:
            return self._by_number[int(self._loads.argmin())]
        num = len(self._loads)
        data = np.frombuffer((mask & self.mask).to_bytes(num // 8 + 1, "little"), np.uint8)
        is_in = np.unpackbits(data, count=num, bitorder="little")
        return self._by_number[int(np.where(is_in, self._loads, np.inf).argmin())]


class CoarseFleet:
    """A router with its workers."""

    def __init__(self, plan: FleetPlan) -> None:
        """Raises: ConfigError, UnsupportedModel."""
        self.events = EventQueue()
        self._settings = plan.router
        self._latency_s = plan.latency_s
        self._index = PrefixIndex()
        self._roles = {role: _ByLoad() for role in WorkerRole}
        self._turns = dict.fromkeys(WorkerRole, 0)
        numbers = itertools.count()
        with clock.used(self.events.time):
            for each in plan.workers:
                verify_simulated(each)
                _verify_coarse(each.settings)
                outline = load_outline(plan.folder, each.settings)
                for _ in range(each.count):
                    member = self._member(each, outline, next(numbers))
                    self._roles[WorkerRole(each.settings.section)].add(member)
        members = [member for role in self._roles.values() for member in role.members]
        if not members:
            raise ConfigError("a fleet needs a worker")
        self._max_model_len = min(each.remote.identity.max_model_len for each in members)
        self._bytes_per_s = members[-1].link.bytes_per_s
        self._block_size = members[0].remote.identity.layout.block_size
        # its workers are always the same
        prefill, decode = ([each.remote for each in self._roles[role].members] for role in WorkerRole)
        capacity = capacity_of(prefill, decode, plan.router)
        self._admission = Admission(AdmissionLimits.of(plan.router), lambda: capacity, clock=self.events.time.monotonic)

    @property
    def workers(self) -> list[tuple[RemoteWorker, CoarseWorker]]:
        """The router's view of each, and what it is."""
        return [(each.remote, each.worker) for role in self._roles.values() for each in role.members]

    @property
    def num_queued(self) -> int:
        """Requests that wait for a place."""
        return self._admission.num_queued

    @property
    def num_running(self) -> int:
        return self._admission.num_running

    def watch(self, every_s: float, call: Callable[[float], None]) -> None:
        """Call with the time, from the beginning on, as long as something else is to come."""

        def look() -> None:
            call(self.events.now_s)
            if self.events:
                self.events.at(self.events.now_s + every_s, look)

        self.events.at(self.events.now_s, look)

    @property
    def busy_s(self) -> float:
        """Seconds in which its workers together computed steps."""
        return sum(each.worker.busy_s for role in self._roles.values() for each in role.members)

    @property
    def step_gaps(self) -> Counter[float]:
        """Seconds between two tokens of a sequence -> how often."""
        return sum((each.worker.step_gaps for role in self._roles.values() for each in role.members), Counter())

    def _member(self, plan: WorkerPlan, outline: LoadedModel, number: int) -> _Member:
        settings, info = plan.settings, outline.engine_info(plan.settings)
        role = WorkerRole(settings.section)
        identity = WorkerIdentity(
            worker_id=f"{role.value}{number}", epoch=1, role=role, protocol_version=PROTOCOL_VERSION, address="",
            attach_address="", layout=info.layout, tokenizer_fingerprint=info.tokenizer_fingerprint,
            max_model_len=info.max_model_len, vocab_size=info.vocab_size, num_blocks=info.num_blocks,
            max_local_prefill_tokens=settings.limits.max_local_prefill_tokens, max_num_seqs=settings.max_num_seqs,
        )  # fmt: skip
        # no call is made
        channel = cast("ServiceChannel", None)
        remote = RemoteWorker(identity, channel)
        limits = EngineLimits(remote.num_blocks, info.layout.block_size, settings.max_num_seqs, settings.step_tokens)
        cache = Cache(
            limits.num_blocks * limits.block_size,
            partial(self._index.stored, remote.key),
            partial(self._index.removed, remote.key),
        )
        return _Member(
            remote, CoarseWorker(self.events, plan.times, limits, cache), plan.link, self._index.number(remote.key)
        )

    # ---- requests

    def submit(self, request: CoarseRequest, when_s: float) -> None:
        """Send it at that time."""
        self.events.at(when_s, partial(self._enter, request))

    def run(self) -> None:
        """Until every request has ended."""
        with clock.used(self.events.time), _without_collections():
            self.events.run()
        for role in self._roles.values():
            for member in role.members:
                member.worker.check_idle()

    def _enter(self, request: CoarseRequest) -> None:
        request.sent_s = self.events.now_s
        if request.num_tokens + request.num_outputs > self._max_model_len:
            too_long = request.num_tokens >= self._max_model_len
            self._fail(request, PromptTooLong.code if too_long else InvalidRequest.code)
            return
        try:
            self._admission.enter(1, request.leave)
        except Overloaded as error:
            self._fail(request, error.code)
            return
        cost = Cost(
            num_blocks=-(-request.num_tokens // self._block_size),
            num_tokens=request.num_tokens,
            max_tokens=request.num_outputs,
        )
        granted = _Granted(partial(self._start, request))
        request.waiter = self._admission.ask(cost, granted)
        if granted.done():
            self._start(request)
        else:
            granted.waits = True
            self.events.at(
                self.events.now_s + self._settings.limits.queue_timeout_s, partial(self._time_out, request, granted)
            )

    def _time_out(self, request: CoarseRequest, granted: _Granted) -> None:
        if not granted.done():
            granted.is_done = True
            assert request.waiter is not None
            self._admission.abandon(request.waiter)
            self._fail(request, Overloaded.code)

    def _fail(self, request: CoarseRequest, error: str) -> None:
        request.error, request.last_s = error, self.events.now_s
        self._leave(request)

    def _start(self, request: CoarseRequest) -> None:
        assert request.waiter is not None
        self._admission.begin(request.waiter)
        now_s = clock.monotonic()
        candidates = {role: self._shortlist(role, request, now_s) for role in WorkerRole}
        rules = PlacementRules(
            policy=self._settings.policy, local_prefill=self._settings.local_prefill, turns=self._turns,
            bytes_per_s=self._bytes_per_s,
        )  # fmt: skip
        placement = place(
            request.num_outputs,
            prefill=candidates[WorkerRole.PREFILL],
            decode=candidates[WorkerRole.DECODE],
            rules=rules,
        )
        if placement is None:
            self._admission.end(request.waiter)
            self._fail(request, WorkerLost.code)
            return
        for role, remote in ((WorkerRole.PREFILL, placement.prefill), (WorkerRole.DECODE, placement.decode)):
            if remote is not None:
                self._turns[role] += 1
        _Run(self, request, placement, candidates[WorkerRole.DECODE]).begin()

    def _shortlist(self, role: WorkerRole, request: CoarseRequest, now_s: float) -> list[Candidate]:
        of_role = self._roles[role]
        if not of_role.members:
            return []
        # by the blocks of the prompt that each has
        chosen: dict[int, _Member] = {}
        if self._settings.policy == "kv_aware":
            # of those that have equally much of the prompt, the least loaded one costs least
            left = of_role.mask
            for depth, mask in self._index.prefixes(request.hashes, left):
                chosen[depth] = of_role.least(mask)
                left &= ~mask
            if left:
                chosen[0] = of_role.least(left)
        else:
            # in turn, the policy takes the next of those that it is given
            is_in_turn = self._settings.policy == "round_robin"
            turn = self._turns[role] % len(of_role.members)
            member = of_role.members[turn] if is_in_turn else of_role.least(of_role.mask)
            [depth] = self._index.reported(request.hashes, [member.remote.key]).values()
            chosen[depth] = member
        for each in chosen.values():
            each.report(now_s)
        in_blocks = request.hash_tokens // self._block_size if request.hash_tokens else 0
        return [
            Candidate(
                worker=each.remote,
                num_tokens=request.num_tokens,
                overlap_blocks=depth * in_blocks,
                confirmed_blocks=depth * in_blocks,
            )
            for depth, each in chosen.items()
        ]

    def _ended(self, request: CoarseRequest) -> None:
        assert request.waiter is not None
        request.last_s = self.events.now_s + self._latency_s
        self._admission.end(request.waiter)
        self._leave(request)

    def _leave(self, request: CoarseRequest) -> None:
        if request.waiter is not None:
            self._admission.leave(1, request.leave)
            request.waiter = None
        request.on_end(request)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """What a request leaves is in no cycle, and looking for cycles among millions of requests takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Run:
    """A placed request."""

    def __init__(
        self, fleet: CoarseFleet, request: CoarseRequest, placement: Placement, decode: Sequence[Candidate]
    ) -> None:
        self._fleet = fleet
        self._request = request
        self._prefill = self._of(WorkerRole.PREFILL, placement.prefill)
        self._decode = self._of(WorkerRole.DECODE, placement.decode)
        if self._prefill is not None and self._decode is not None and placement.local_prefill_tokens is not None:
            [at_decode] = [each for each in decode if each.worker is placement.decode]
            if at_decode.unconfirmed_tokens <= placement.local_prefill_tokens:
                self._prefill = None
        self._shares: dict[_Member, LoadReservation] = {}
        for member, share in ((self._prefill, placement.prefill_share), (self._decode, placement.decode_share)):
            if member is not None:
                self._shares[member] = member.remote.reserve(share)
                self._changed(member)
        self._is_reserved = self._is_computed = False
        self._read_tokens = 0

    def _of(self, role: WorkerRole, remote: RemoteWorker | None) -> _Member | None:
        return None if remote is None else self._fleet._roles[role].by_key[remote.key]

    def _changed(self, member: _Member) -> None:
        role = member.remote.role
        if role is not None:
            self._fleet._roles[role].changed(member)

    def begin(self) -> None:
        request, fleet = self._request, self._fleet
        at = self._decode if self._prefill is None else self._prefill
        assert at is not None
        is_remote = self._prefill is not None and self._decode is not None
        self._work = Work(
            request.num_tokens, 1 if is_remote else request.num_outputs, request.hashes, request.hash_tokens,
            partial(self._first, at), self._computed if is_remote else partial(self._end, at), is_read=is_remote,
        )  # fmt: skip
        now_s = fleet.events.now_s
        if is_remote:
            assert self._decode is not None
            depth = self._decode.worker.cache.match(request.hashes)
            self._read_tokens = max(1, request.num_tokens - depth * request.hash_tokens)
            num_blocks = self._decode.worker.blocks_of(request.num_tokens)
            self._decode.worker.reserve(num_blocks, self._reserved)
        fleet.events.at(now_s + fleet._latency_s, partial(at.worker.add, self._work))

    def _first(self, at: _Member, num_cached: int) -> None:
        self._request.first_s = self._fleet.events.now_s + self._fleet._latency_s
        self._request.num_cached = num_cached
        self._shares[at].computed()
        self._changed(at)

    def _reserved(self) -> None:
        self._is_reserved = True
        self._read()

    def _computed(self) -> None:
        self._is_computed = True
        self._read()

    def _read(self) -> None:
        """Blocks are read while later ones are computed, so that those of the last step are left."""
        if not (self._is_reserved and self._is_computed):
            return
        decode, work, fleet = self._decode, self._work, self._fleet
        assert decode is not None
        assert self._prefill is not None
        now_s = fleet.events.now_s
        rate = decode.link.bytes_per_s / decode.token_bytes
        tail = min(self._read_tokens, max(1, work.num_tokens - work.num_cached), self._prefill.worker.max_step_tokens)
        # of earlier steps, what its link had no time for
        decode.link_free_s = (
            max(decode.link_free_s, now_s - (self._read_tokens - tail) / rate) + self._read_tokens / rate
        )
        lands_s = max(decode.link_free_s, now_s + decode.link.latency_s + tail / rate)
        fleet.events.at(lands_s, self._landed)

    def _landed(self) -> None:
        prefill, decode, work, request = self._prefill, self._decode, self._work, self._request
        assert prefill is not None
        assert decode is not None
        prefill.worker.release(work.num_held)
        self._end_share(prefill)
        self._shares[decode].computed()
        self._changed(decode)
        going_on = Work(
            request.num_tokens, request.num_outputs - 1, request.hashes, request.hash_tokens, _nothing,
            partial(self._end, decode), num_held=decode.worker.blocks_of(request.num_tokens), has_begun=True,
        )  # fmt: skip
        decode.worker.land(going_on)

    def _end(self, at: _Member) -> None:
        at.worker.cache.add(self._request.answer_hashes, self._request.hash_tokens)
        self._end_share(at)
        # which refers to this
        del self._work
        self._fleet._ended(self._request)

    def _end_share(self, member: _Member) -> None:
        self._shares[member].end()
        self._changed(member)


def _verify_coarse(settings: WorkerSettings) -> None:
    """Raises: ConfigError for what only the exact mode simulates."""
    for name, default in ONLY_EXACT.items():
        if (value := getattr(settings, name)) != default:
            raise ConfigError(f"{name} is {value!r}, which only the exact mode simulates")


def _nothing(num_cached: int) -> None:
    """The first token was sampled elsewhere."""
