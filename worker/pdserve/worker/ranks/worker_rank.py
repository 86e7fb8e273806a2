"""The process of a worker's rank above 0, which computes its part of each step and moves its part of the KV blocks.

Usage, only by `RankProcesses`: python -m pdserve.worker.ranks.worker_rank DESCRIPTOR
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading

import msgspec

from pdserve.common.net.tls_renewal import TlsRenewal
from pdserve.common.processes.shared_interpreter import share_interpreter
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.executor.rank_process import main
from pdserve.engine.ranks.rank_messages import StartRank
from pdserve.engine.runner.loading.loaded_model import LoadedModel
from pdserve.kv_transfer.make_connectors import serve_pools
from pdserve.worker.ranks.rank_server import RankServer

log = logging.getLogger(__name__)


def rank_settings(start: StartRank) -> WorkerSettings:
    """The worker's settings, with the rank's data port if that is fixed. Its role determines the certificates."""
    settings = start.settings_of_role()
    return msgspec.structs.replace(settings, data_port=settings.data_port and settings.data_port + start.rank)


def move_blocks(transfers: socket.socket, start: StartRank, model: LoadedModel) -> None:
    """Start the threads that serve this rank's blocks and read into them. Raises: ConfigError."""
    share_interpreter()
    settings = rank_settings(start)
    tls = settings.tls()
    pools = model.pools
    connectors, _ = serve_pools(settings, pools, tls)
    if tls is not None:
        renewal = TlsRenewal(settings, tls)
        threading.Thread(target=lambda: asyncio.run(renewal.run()), name="certificates", daemon=True).start()
    server = RankServer(transfers, connectors, len(pools))
    threading.Thread(target=_run, args=(server,), name="rank-transfers", daemon=True).start()


def _run(server: RankServer) -> None:
    try:
        server.run()
    except Exception:
        # when this process ends, rank 0 ends the worker
        log.exception("the transfers of a rank failed")
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(move_blocks))
