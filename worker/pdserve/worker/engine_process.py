"""The process of a worker's engine, its pool and its transfers.

Usage, by `ProcessClient` only: python -m pdserve.worker.engine_process DESCRIPTOR

The kernel kills the process together with the worker. In a prefill worker it serves `Attach` on `attach_port`.
"""

from __future__ import annotations

import sys

from pdserve.common.net.tls_renewal import TlsRenewal
from pdserve.common.processes.child_life import end_with_parent
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.common.tasks.background_task import background_task
from pdserve.engine.client.engine_process import run_engine_process
from pdserve.engine.runner.loading.loaded_model import LoadedModel
from pdserve.worker.ranks.join_ranks import WORKER_RANK
from pdserve.worker.transfers.worker_transfers import TransferMemory, WorkerTransfers


def make_transfers(settings: WorkerSettings, model: LoadedModel, deployment_key: DeploymentKey) -> WorkerTransfers:
    """Transfers with identity and certificates of their own."""
    tls = settings.tls()
    transfers = WorkerTransfers(settings, TransferMemory.of(settings, model, tls), deployment_key, tls)
    transfers.serve_attach()
    transfers.renewal = background_task("certificates", TlsRenewal(settings, tls).run)
    return transfers


def main() -> int:
    end_with_parent()
    return run_engine_process(make_transfers, WORKER_RANK)


if __name__ == "__main__":
    sys.exit(main())
