"""`pdserve role`: has a worker take a role, and waits until the calls of its other role have ended."""

from __future__ import annotations

from pdserve.cli.status.follow_worker import follow
from pdserve.cli.status.status_client import StatusClient


def run_role(client: StatusClient, worker_id: str, role: str, timeout_s: float, *, force: bool) -> None:
    """timeout_s: seconds to wait for the calls of the other role; 0: none. force: also if no other worker has the role that it
    gives up.

    Raises: NotFound for a worker that the router does not know, DeadlineExceeded if calls are open after this time, NotReached,
    PeerError with the reason if the worker cannot take the role.
    """
    client.set_role(worker_id, role, force=force)

    def left() -> str:
        named = [worker for worker in client.status().workers if worker.worker_id == worker_id]
        if any(worker.role != role for worker in named):
            return "it has not said so yet"
        num_calls = sum(worker.num_other_calls for worker in named)
        return f"{num_calls} earlier calls end or move" if num_calls else ""

    follow(left, timeout_s, f"{worker_id} becomes a {role} worker", f"{worker_id} is not done")
    print(f"{worker_id} is a {role} worker")
