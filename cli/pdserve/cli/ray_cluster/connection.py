"""`ray_workers`: connects to a Ray cluster and reserves a place for each worker. Ray's scheduler chooses the nodes."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pdserve.cli.up.cluster_plan import ChildPlan
from pdserve.common.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.cli.ray_cluster.ray_worker import RayWorker

CLIENT = "ray://"
CLIENT_PORT = 10001
_LOOK_AT_PORT_S = 5.0


@contextlib.contextmanager
def ray_workers(
    address: str, timeout_s: float, plans: Sequence[ChildPlan], *, verbose: bool
) -> Iterator[list[RayWorker]]:
    """The workers, placed but not started. Their places are released at the end of the block.

    address: `auto`, host:port of Ray's GCS or ray://host:port. timeout_s: limit for connecting, and again for reserving.
    verbose: print the output of workers on their nodes. Raises: ConfigError in one line.
    """
    if find_spec("ray") is None:
        raise ConfigError(
            "--ray needs the package ray: in pdserve's repository, .venv/bin/python deploy/install.py ray"
        )
    _look_at_port(address, min(timeout_s, _LOOK_AT_PORT_S))
    _connect(address, timeout_s, verbose)

    import ray

    from pdserve.cli.ray_cluster.ray_worker import RayWorker, resources_of

    try:
        bundles = [resources_of(plan) for plan in plans]
        group = ray.util.placement_group(bundles, strategy="SPREAD")
        try:
            _reserve(group, bundles, timeout_s)
            yield [RayWorker(plan, group, place) for place, plan in enumerate(plans)]
        finally:
            ray.util.remove_placement_group(group)
    finally:
        ray.shutdown()


def _look_at_port(address: str, timeout_s: float) -> None:
    """Check that something listens at the address; Ray itself would try for two minutes. Raises: ConfigError."""
    if address == "auto":
        return
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    if not host and address.startswith(CLIENT):
        host, port = port, str(CLIENT_PORT)
    if not host or not port.isdecimal():
        raise ConfigError(f"--ray is {address!r}: auto, host:port or ray://host:port is needed")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s):
            pass
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--ray {address}: nothing answers at {host}:{port}: {error}") from error


def _connect(address: str, timeout_s: float, verbose: bool) -> None:
    """Connect to Ray. Raises: ConfigError with Ray's reason, or after `timeout_s` seconds."""
    import ray

    failures: list[Exception] = []

    def connect() -> None:
        try:
            ray.init(address=address, log_to_driver=verbose, logging_level=logging.ERROR)
        except Exception as error:
            failures.append(error)

    # Ray has no timeout of its own, and takes over SIGTERM in a main thread
    thread = threading.Thread(target=connect, name="ray.init", daemon=True)
    ours = _drop_lines_of_ray()
    try:
        thread.start()
        thread.join(timeout_s)
    finally:
        if thread.is_alive():
            # the thread goes on writing until this process ends
            sys.stderr = os.fdopen(ours, "w", buffering=1)
        else:
            os.dup2(ours, 2)
            os.close(ours)
    if thread.is_alive():
        raise ConfigError(f"--ray {address}: no Ray cluster answered within {timeout_s:g} s")
    if failures:
        raise ConfigError(f"--ray {address}: {' '.join(str(failures[0]).split())}") from failures[0]


def _drop_lines_of_ray() -> int:
    """Drop Ray's output to descriptor 2, a line per attempt to connect; returns a duplicate of the former descriptor."""
    ours, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    return ours


def _reserve(group: Any, bundles: Sequence[dict[str, float]], timeout_s: float) -> None:
    """Wait until Ray has reserved all bundles. Raises: ConfigError naming the needed and the free resources."""
    import ray

    until = time.monotonic() + timeout_s
    # short waits, so that Ctrl-C is noticed
    while not group.wait(timeout_seconds=1):
        if time.monotonic() > until:
            needed = ", ".join(f"{_sum(bundles, name):g} {name}" for name in ("CPU", "GPU") if _sum(bundles, name))
            there = ", ".join(
                f"{ray.available_resources().get(name, 0):g} of {ray.cluster_resources().get(name, 0):g} {name}"
                for name in ("CPU", "GPU")
            )
            largest = ", ".join(f"{value:g} {name}" for name, value in max(bundles, key=lambda one: one["CPU"]).items())
            raise ConfigError(
                f"Ray did not find places for {len(bundles)} workers within {timeout_s:g} s: they need {needed}, up to "
                f"{largest} on one node; free are {there}"
            )


def _sum(bundles: Sequence[dict[str, float]], name: str) -> float:
    return sum(bundle.get(name, 0) for bundle in bundles)
