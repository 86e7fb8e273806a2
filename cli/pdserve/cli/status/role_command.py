"""`pdserve role`: has a worker take a role, and waits until the calls of its other role have ended."""

from __future__ import annotations

import time

from pdserve.cli.status.status_client import StatusClient
from pdserve.common.errors import DeadlineExceeded

_LOOK_EVERY_S = 0.2


def run_role(client: StatusClient, worker_id: str, role: str, timeout_s: float, *, force: bool) -> None:
    """timeout_s: seconds to wait for the calls of the other role; 0: none. force: also if no other worker has the role that it
    gives up.

    Raises: NotFound for a worker that the router does not know, DeadlineExceeded if calls are open after this time, NotReached,
    PeerError with the reason if the worker cannot take the role.
    """
    client.set_role(worker_id, role, force=force)
    until, said = time.monotonic() + timeout_s, ""
    while timeout_s:
        named = [worker for worker in client.status().workers if worker.worker_id == worker_id]
        taken = all(worker.role == role for worker in named)
        num_calls = sum(worker.num_other_calls for worker in named)
        if taken and not num_calls:
            break
        text = f"{num_calls} earlier calls end or move" if taken else "it has not said so yet"
        if text != said:
            said = text
            print(f"{worker_id} becomes a {role} worker: {text}", flush=True)
        if time.monotonic() >= until:
            raise DeadlineExceeded(f"{worker_id} is not done within {timeout_s:g} s: {text}")
        time.sleep(_LOOK_EVERY_S)
    print(f"{worker_id} is a {role} worker")
