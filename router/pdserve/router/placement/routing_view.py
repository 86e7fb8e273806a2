"""`routing_view`: what `/debug/routing` shows to whom."""

from __future__ import annotations

from typing import Any

from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.admission.admission import Admission
from pdserve.router.placement.worker_selector import WorkerSelector
from pdserve.router.tenants.client import Client


def routing_view(
    client: Client, settings: RouterSettings, admission: Admission, selector: WorkerSelector
) -> dict[str, Any]:
    """For JSON. An operator sees the requests of all tenants and the workers' loads, a user its own tenant's requests."""
    view: dict[str, Any] = {"policy": settings.policy, "local_prefill": settings.local_prefill}
    if not client.sees_all:
        return view | {
            "running": admission.tenants[client.tenant].num_running,
            "queued": admission.num_queued_of(client.tenant),
            "placements": selector.log.content_of(client.tenant),
        }
    return view | {
        "transfer_bytes_per_s": selector.bandwidth.bytes_per_s,
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
        "placements": selector.log.content(),
    }
