"""`status_of`: a router's `StatusView` for a client."""

from __future__ import annotations

import heapq
from importlib.metadata import version

import msgspec

from pdserve.common import clock
from pdserve.common.timeline import now_unix_ns
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.admission.admission import Admission
from pdserve.router.placement.worker_selector import WorkerSelector
from pdserve.router.telemetry.request_log import KEPT_REQUESTS, KEPT_S
from pdserve.router.telemetry.router_telemetry import RouterTelemetry
from pdserve.router.telemetry.status_view import (
    MAX_TENANTS,
    MAX_WORKERS,
    AdmissionView,
    MovesView,
    QueueView,
    StatusView,
    TenantView,
    WorkerView,
)
from pdserve.router.tenants.client import Client
from pdserve.router.workers.fleet import Fleet
from pdserve.router.workers.worker import RemoteWorker

_MAX_CAUSE_CHARS = 200
_VERSION = version("pdserve")


def _admission_view(client: Client, admission: Admission) -> AdmissionView:
    """An operator sees all tenants, a user its own. The size is bounded."""
    if not client.sees_all:
        account = admission.tenants[client.tenant]
        return AdmissionView(
            queue=QueueView(
                num_requests=account.num_requests,
                num_running=account.num_running,
                num_queued=admission.num_queued_of(client.tenant),
                num_sessions=account.num_sessions,
            )
        )
    tenants = admission.tenants.items()
    most = heapq.nlargest(MAX_TENANTS, tenants, key=lambda item: item[1].num_requests)
    return AdmissionView(
        queue=QueueView(
            num_requests=admission.num_requests,
            num_running=admission.num_running,
            num_queued=admission.num_queued,
            num_sessions=admission.num_sessions,
            num_places=admission.capacity.num_requests,
        ),
        num_tenants=len(tenants),
        tenants=[
            TenantView(
                tenant=tenant,
                num_requests=each.num_requests,
                num_running=each.num_running,
                num_waiting=each.num_waiting,
                num_sessions=each.num_sessions,
            )
            for tenant, each in most
        ],
    )


def status_of(
    client: Client,
    model: str,
    fleet: Fleet,
    admission: Admission,
    selector: WorkerSelector,
    telemetry: RouterTelemetry,
    *,
    healthy: bool,
) -> StatusView:
    """An operator sees the fleet and all tenants' requests, a user its own tenant's requests. The size is bounded."""
    seen = _admission_view(client, admission)
    log, now_ns = telemetry.request_log, now_unix_ns()
    own = StatusView(
        unix_s=now_ns / 1e9,
        version=_VERSION,
        model=model,
        healthy=healthy,
        uptime_s=(now_ns - log.started_unix_ns) / 1e9,
        tenant=client.tenant,
        queue=seen.queue,
        recent=log.recent(client),
        slowest=log.slowest(client),
        kept_requests=KEPT_REQUESTS,
        kept_s=KEPT_S,
    )
    if not client.sees_all:
        return own
    workers = fleet.lives()
    # a draining worker is in both lists
    names = {worker.identity.worker_id for worker in workers}
    absent = [entry for entry in fleet.absent() if entry[1] not in names]
    return msgspec.structs.replace(
        own,
        sees_all=True,
        num_workers=len(absent) + len(workers),
        workers=[
            *(_absent_view(*entry) for entry in absent[:MAX_WORKERS]),
            *map(_worker_view, workers[: max(0, MAX_WORKERS - len(absent))]),
        ],
        num_tenants=seen.num_tenants,
        tenants=seen.tenants,
        errors=telemetry.metrics.error_counts(),
        num_indexed_blocks=selector.num_indexed_blocks,
        transfer_bytes_per_s=selector.bandwidth.bytes_per_s,
        moves=MovesView(
            blocks=selector.moves.counts(),
            block_bytes=selector.moves.num_bytes,
            requests=telemetry.metrics.migration_counts(),
            pause_p50_s=telemetry.metrics.median_migration_pause_s,
        ),
    )


def _absent_view(role: WorkerRole, name: str, why: str) -> WorkerView:
    return WorkerView(role=role.value, worker_id=name, state="absent", cause=why[:_MAX_CAUSE_CHARS])


def _worker_view(worker: RemoteWorker) -> WorkerView:
    identity, load = worker.identity, worker.load
    return WorkerView(
        role=worker.role_name,
        worker_id=identity.worker_id,
        state=worker.state.value,
        address=identity.address,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_remote_kv=load.num_remote_kv,
        num_waiting_tokens=load.num_waiting_tokens,
        max_num_seqs=identity.max_num_seqs,
        blocks_in_use=load.blocks_in_use,
        blocks_total=load.blocks_total or identity.num_blocks,
        num_sessions=load.num_sessions,
        max_sessions=load.max_sessions,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        num_calls=worker.num_in_flight,
        num_other_calls=load.num_other_calls,
        connected_s=clock.monotonic() - worker.joined_at,
        connectors=list(identity.connectors),
        protocol_version=identity.protocol_version,
        sampler_version=identity.sampler_version,
        model_fingerprint=identity.layout.model_fingerprint[:16],
    )
