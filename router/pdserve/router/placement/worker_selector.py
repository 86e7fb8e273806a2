"""`WorkerSelector`: places requests by prefix index and configured policy, and logs the decisions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from pdserve.common import clock
from pdserve.common.kv_events import WorkerKey
from pdserve.common.kv_layout import KvLayout
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.admission.admission import Admission
from pdserve.router.placement.block_moves import BlockMoves
from pdserve.router.placement.placement import (
    Candidate,
    Placement,
    PlacementHint,
    PlacementRules,
    compatible_prefill_workers,
    place,
    place_migration,
    place_prefill,
)
from pdserve.router.placement.prefix_index import PrefixIndex
from pdserve.router.placement.routing_decision import LeftOut, RoutingDecision, RoutingLog, views
from pdserve.router.placement.transfer_bandwidth import TransferBandwidth
from pdserve.router.tenants.client import Client
from pdserve.router.workers.fleet import Fleet
from pdserve.router.workers.worker import RemoteWorker

Hashes = Callable[[KvLayout], Sequence[bytes]]
"""Returns the hashes of the prompt's full blocks for a layout; called at most once per layout and prompt."""


def _no_hashes(layout: KvLayout) -> Sequence[bytes]:
    return ()


class WorkerSelector:
    """Chooses workers for all requests of a router."""

    def __init__(self, fleet: Fleet, index: PrefixIndex, settings: RouterSettings) -> None:
        self.bandwidth = TransferBandwidth()
        self.moves = BlockMoves(settings.block_moves, self.bandwidth)
        self.log = RoutingLog()
        self._fleet = fleet
        self._index = index
        self._settings = settings
        self._turns = dict.fromkeys(WorkerRole, 0)

    @property
    def num_indexed_blocks(self) -> int:
        """Number of block hashes in the prefix index."""
        return len(self._index)

    def place(
        self,
        request_id: str,
        attempt: int,
        *,
        tenant: str = "",
        num_tokens: int,
        num_encoder_tokens: int = 0,
        max_tokens: int,
        hashes: Hashes,
        hint: PlacementHint = PlacementHint.ANY,
        blamed: Collection[WorkerKey] = (),
        dead: Collection[WorkerKey] = (),
        sampler_version: int | None = None,
        data_parallel_rank: int | None = None,
        pooling: PoolingParams | None = None,
        adapter: tuple[str, str] = ("", ""),
        source: RemoteWorker | None = None,
        receiver: WorkerKey | None = None,
        is_plan: bool = False,
    ) -> RoutingDecision | None:
        """Workers for one attempt, or None while none can serve it.

        tenant: the owner. num_tokens: length of the prompt. num_encoder_tokens: positions of its sound. dead: workers that died
        under this request and have not reconnected.
        sampler_version, data_parallel_rank: preferred; None for no preference. pooling: of a request that generates no text, which
        only needs a prefill worker that serves the task. adapter: name and fingerprint of what both workers must offer; empty for
        the base model. source: the worker whose sequence the attempt continues. receiver: the only one that may continue it; None:
        any. is_plan: the attempt does not follow at once.
        """
        lora_name, fingerprint = adapter
        if num_encoder_tokens:
            # a worker lays out the positions, and publishes their blocks by hashes that are not known here
            hashes = _no_hashes
        live = {
            role: [
                worker
                for worker in self._fleet.workers(role)
                if not lora_name or worker.adapters.get(lora_name) == fingerprint
            ]
            for role in WorkerRole
        }
        full = {worker.key for role in WorkerRole for worker in live[role] if _is_full(worker, hint)}
        rules = PlacementRules(
            policy=self._settings.policy,
            local_prefill=self._settings.local_prefill,
            hint=hint,
            blamed={*blamed, *full},
            sampler_version=sampler_version,
            data_parallel_rank=data_parallel_rank,
            turns=self._turns,
            bytes_per_s=self.bandwidth.bytes_per_s,
        )
        now_s = clock.monotonic()
        candidates = {
            role: self._candidates(live[role], (num_tokens, num_encoder_tokens), hashes, dead, now_s, fingerprint)
            for role in WorkerRole
        }
        prefill, decode = candidates[WorkerRole.PREFILL], candidates[WorkerRole.DECODE]
        if hint is not PlacementHint.SESSION:
            sources = [each for each in (*prefill, *decode) if each.worker.key not in blamed]
            prefill, decode = self.moves.with_moves(prefill, sources), self.moves.with_moves(decode, sources)
        if pooling is not None:
            prefill, decode = [each for each in prefill if _serves(each.worker, pooling)], []
            candidates = {WorkerRole.PREFILL: prefill, WorkerRole.DECODE: decode}
        if source is not None:
            allowed = [each for each in decode if receiver in (None, each.worker.key)]
            placement = place_migration(source, allowed, rules)
        elif pooling is not None:
            placement = place_prefill(prefill, rules)
        else:
            placement = place(max_tokens, prefill=prefill, decode=decode, rules=rules)
        if placement is None:
            return None
        for role, worker in ((WorkerRole.PREFILL, placement.prefill), (WorkerRole.DECODE, placement.decode)):
            if worker is not None and not is_plan:
                self._turns[role] += 1
                self._index.routed(worker.key, hashes(worker.identity.layout), now_s)
        decision = RoutingDecision(
            unix_s=clock.unix_s(),
            request_id=request_id,
            tenant=tenant,
            attempt=attempt,
            policy=rules.policy,
            hint=hint,
            num_tokens=num_tokens,
            data_parallel_rank=data_parallel_rank,
            placement=placement,
            adapter=lora_name,
            candidates=views(WorkerRole.PREFILL, prefill) + views(WorkerRole.DECODE, decode),
            left_out=self._left_out(placement, candidates, blamed, dead, full),
        )
        if not is_plan:
            self.log.add(decision)
        return decision

    def reported(
        self, hashes: Sequence[bytes], layout: KvLayout, workers: Iterable[RemoteWorker]
    ) -> dict[WorkerKey, int]:
        """Worker -> blocks of a prompt's longest prefix that it has reported. hashes: of its full blocks, by this layout."""
        keys = [worker.key for worker in workers]
        return self._index.reported(hashes, keys, last_suffices=layout.hits_need_last_block)

    def has_workers(self, *, one_token: bool = False, pooling: PoolingParams | None = None) -> bool:
        """True if workers are live whose roles can serve a prompt.

        one_token: only one token is requested. pooling: as in `place`.
        """
        prefill, local_prefill = self._fleet.workers(WorkerRole.PREFILL), self._settings.local_prefill
        if pooling is not None:
            return bool(pooling_workers(prefill, pooling))
        if prefill and one_token and local_prefill != "always":
            return True
        return bool(self._fleet.workers(WorkerRole.DECODE)) and (local_prefill != "never" or bool(prefill))

    def _candidates(
        self,
        workers: Sequence[RemoteWorker],
        lengths: tuple[int, int],
        hashes: Hashes,
        dead: Collection[WorkerKey],
        now_s: float,
        fingerprint: str,
    ) -> list[Candidate]:
        """lengths: `num_tokens` and `num_encoder_tokens` of `place`."""
        by_layout: dict[KvLayout, list[RemoteWorker]] = {}
        for worker in workers:
            if worker.key not in dead:
                by_layout.setdefault(worker.identity.layout, []).append(worker)
        candidates = []
        for layout, alike in by_layout.items():
            prompt = hashes(layout)
            reported = self._index.reported(
                prompt, [worker.key for worker in alike], last_suffices=layout.hits_need_last_block
            )
            overlaps = self._index.expect(prompt, reported, now_s)
            candidates += [
                Candidate(
                    worker=worker,
                    num_tokens=worker.num_sequence_tokens(*lengths),
                    overlap_blocks=overlaps[worker.key],
                    confirmed_blocks=reported[worker.key],
                    loads_adapter=bool(fingerprint) and fingerprint not in worker.load.loaded_adapters,
                )
                for worker in alike
            ]
        return candidates

    def _left_out(
        self,
        placement: Placement,
        candidates: dict[WorkerRole, list[Candidate]],
        blamed: Collection[WorkerKey],
        dead: Collection[WorkerKey],
        full: Collection[WorkerKey],
    ) -> tuple[LeftOut, ...]:
        left = [LeftOut(role=role.value, worker=worker, why=why) for role, worker, why in self._fleet.absent()]
        left += [LeftOut(role="", worker=worker_id, why="died under this request") for worker_id, _ in dead]
        chosen = {worker.key for worker in (placement.prefill, placement.decode) if worker is not None}
        pairable: Collection[WorkerKey] | None = None
        if placement.prefill is not None and placement.decode is not None:
            decode = next(c for c in candidates[WorkerRole.DECODE] if c.worker is placement.decode)
            pairable = {c.worker.key for c in compatible_prefill_workers(decode, candidates[WorkerRole.PREFILL])}
        for role, of_role in candidates.items():
            for candidate in of_role:
                key, name = candidate.worker.key, candidate.worker.identity.worker_id
                if key in full and key not in chosen:
                    left.append(LeftOut(role=role.value, worker=name, why="full, as it reports"))
                elif key in blamed and key not in chosen:
                    left.append(LeftOut(role=role.value, worker=name, why="blamed by the last attempt"))
                elif role is WorkerRole.PREFILL and pairable is not None and key not in pairable:
                    left.append(LeftOut(role=role.value, worker=name, why="its blocks differ from decode's"))
        return tuple(left)


def pooling_workers(workers: Iterable[RemoteWorker], pooling: PoolingParams) -> list[RemoteWorker]:
    """The prefill workers among which a request without text is placed."""
    return [worker for worker in workers if _serves(worker, pooling)]


def _serves(worker: RemoteWorker, pooling: PoolingParams) -> bool:
    return pooling.is_served_by(worker.identity.hidden_size, worker.identity.num_labels)


def _is_full(worker: RemoteWorker, hint: PlacementHint) -> bool:
    """True if the worker would most likely refuse the request, by its last report."""
    return worker.has_full_queue or (hint is PlacementHint.SESSION and worker.has_all_sessions)


def routing_view(
    client: Client, settings: RouterSettings, selector: WorkerSelector, admission: Admission
) -> dict[str, Any]:
    """For JSON. An operator sees the requests of all tenants and the workers' loads, a user its own tenant's requests."""
    numbers = _admission_numbers(client, admission)
    view: dict[str, Any] = {"policy": settings.policy, "local_prefill": settings.local_prefill}
    if not client.sees_all:
        return view | numbers | {"placements": selector.log.content_of(client.tenant)}
    return (
        view
        | {"transfer_bytes_per_s": selector.bandwidth.bytes_per_s}
        | numbers
        | {"placements": selector.log.content()}
    )


def _admission_numbers(client: Client, admission: Admission) -> dict[str, Any]:
    """Requests in admission for JSON, as the client may see them."""
    if not client.sees_all:
        return {
            "running": admission.tenants[client.tenant].num_running,
            "queued": admission.num_queued_of(client.tenant),
        }
    return {
        "running": admission.num_running,
        "queued": admission.num_queued,
        "sessions": admission.num_sessions,
        "max_sessions": admission.capacity.num_sessions,
        "tenants": {
            tenant: {
                "requests": account.num_requests,
                "running": account.num_running,
                "waiting": account.num_waiting,
                "sessions": account.num_sessions,
            }
            for tenant, account in admission.tenants.items()
        },
    }
