"""A router without workers in a process of its own, as `pdserve router` runs it, that may open few files.

limited_router.py FOLDER NUMBER SECONDS: prints its HTTP and its gRPC address. It closes connections that have been silent for that
long, where a service waits longer.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import uvloop

from pdserve.common.address.descriptors import raise_descriptor_limit
from pdserve.common.net import http_connection
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.service import run_router


def main(folder: str, num_descriptors: str, silent_s: str) -> None:
    number = int(num_descriptors)
    http_connection.HEADER_TIMEOUT_S = float(silent_s)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number // 2, number))
    if raise_descriptor_limit() != number:
        raise SystemExit("the soft limit was not raised")
    settings = RouterSettings(port=0, grpc_port=0, drain_s=0.1)

    def ready(http: str, grpc: str) -> None:
        print(http, grpc, flush=True)

    uvloop.run(run_router(settings, model_folder=Path(folder), ready=ready))


if __name__ == "__main__":
    main(*sys.argv[1:])
