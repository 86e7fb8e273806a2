"""`join_ranks`: rank 0's connectors together with those of the other ranks."""

from __future__ import annotations

from pdserve.engine.ranks.rank_processes import RankProcesses
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.worker.ranks.remote_rank import RemoteRank

WORKER_RANK = "pdserve.worker.ranks.worker_rank"
"""The program of a worker's rank above 0."""


def join_ranks(connectors: ConnectorSet, ranks: RankProcesses) -> None:
    """Wait until the other ranks serve their pools.

    Raises: the error with which a rank ended; ConfigError when no connector is left.
    """
    remote = [RemoteRank(peer, rank) for rank, peer in enumerate(ranks.transfer_sockets, 1)]
    try:
        served = [pool for rank in remote for pool in ranks.attempt(rank.wait_until_served)]
        pools = {
            (number, shape): pool for number, rank in enumerate(remote, 1) for shape, pool in enumerate(rank.pools())
        }
        connectors.join(pools, {name for name in connectors.names if all(name in names for names in served)})
    except BaseException:
        for rank in remote:
            rank.close()
        raise
