"""A Ray cluster of several nodes on this machine: `python ray_nodes.py NUM_NODES FOLDER`; ends when its standard input does.

Node k has the address 127.0.0.(k + 2); the head, node 0, has no CPU, every other node two. FOLDER takes Ray's files; its path is
short, as Ray makes sockets there. One JSON line on standard output names the cluster's address when all nodes are there.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

persist_port: Any = import_module("ray._raylet").persist_port
OBJECT_STORE_BYTES = 80 << 20
"""Ray accepts no less than 75 MiB."""
NO_SERVICES = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""Ports of agents that Ray does not start without its dashboard; their files then have the number -1."""


def main() -> None:
    folder = Path(sys.argv[2])
    cluster = Cluster()
    for number in range(int(sys.argv[1]) + 1):
        node_id = secrets.token_hex(28)
        port = free_port()
        # a node aborts if its agents, three Python programs, do not name their ports within 15 s: they are named for them
        writer = threading.Thread(target=write_ports, args=(folder / "session_latest", node_id, port), daemon=True)
        writer.start()
        head: dict[str, Any] = {
            "include_dashboard": False, "no_monitor": True, "temp_dir": str(folder),
            "_system_config": {"health_check_period_ms": 1000, "agent_register_timeout_ms": 180_000},
        }  # fmt: skip
        cluster.add_node(
            num_cpus=2 if number else 0, object_store_memory=OBJECT_STORE_BYTES, node_ip_address=f"127.0.0.{number + 2}",
            wait=False, runtime_env_agent_port=port, env_vars={"RAY_OVERRIDE_NODE_ID_FOR_TESTING": node_id},
            **({} if number else head),
        )  # fmt: skip
        writer.join()
    cluster.wait_for_nodes(180)
    print(json.dumps(cluster.address), flush=True)
    sys.stdin.read()
    cluster.shutdown()


def write_ports(session: Path, node_id: str, port: int) -> None:
    while not session.is_dir():
        time.sleep(0.01)
    for name in NO_SERVICES:
        persist_port(str(session), node_id, name, -1)
    persist_port(str(session), node_id, "runtime_env_agent_port", port)


def free_port() -> int:
    with socket.socket() as drawn:
        drawn.bind(("127.0.0.1", 0))
        return int(drawn.getsockname()[1])


if __name__ == "__main__":
    main()
