"""One cluster for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import pd_cluster
from tests.support.processes.shared_cluster import FLAGS, THROUGH_BOTH, SharedCluster


@pytest.fixture(scope="session")
def running_cluster(
    tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedCluster]:
    model = tiny_checkpoints("llama")
    with pd_cluster(tmp_path_factory.mktemp("shared"), model, both=FLAGS, router=THROUGH_BOTH) as cluster:
        yield SharedCluster(cluster, model, Oracle(model))


@pytest.fixture
def shared(running_cluster: SharedCluster) -> Iterator[SharedCluster]:
    """The cluster; after each test its pools are at rest, and no log has a traceback."""
    yield running_cluster
    running_cluster.processes.check_pools()
    running_cluster.processes.check_logs()
