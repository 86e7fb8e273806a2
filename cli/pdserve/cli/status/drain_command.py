"""`pdserve drain`: has a worker leave, and waits until it has."""

from __future__ import annotations

import time

from pdserve.cli.status.follow_worker import follow
from pdserve.cli.status.status_client import StatusClient
from pdserve.router.telemetry.status_view import WorkerView


def run_drain(client: StatusClient, worker_id: str, timeout_s: float) -> None:
    """timeout_s: seconds to wait until it has left; 0: none.

    Raises: NotFound for a worker that the router does not know, DeadlineExceeded if it has not left in time, NotReached, PeerError.
    """
    client.drain(worker_id)
    began = time.monotonic()

    def left() -> str:
        workers = _still_there(client, worker_id, time.monotonic() - began)
        return ", ".join(f"{worker.num_calls} calls, {worker.num_sessions} sessions" for worker in workers)

    follow(left, timeout_s, f"{worker_id} drains", f"{worker_id} has not left")
    print(f"{worker_id} has left" if timeout_s else f"{worker_id} drains")


def _still_there(client: StatusClient, worker_id: str, since_s: float) -> list[WorkerView]:
    """The workers of this name that were connected then; one that was started again has joined later."""
    named = [worker for worker in client.status().workers if worker.worker_id == worker_id]
    return [worker for worker in named if worker.state != "absent" and worker.connected_s >= since_s]
