"""A worker that starts its other processes without importing torch again: `python prepared_worker.py prefill --port ...`."""

from __future__ import annotations

from pathlib import Path

from pdserve.cli.main import main
from tests.support.processes.prepared_children import prepare_children

PREPARED_WORKER = (str(Path(__file__)),)
"""The program in place of the `pdserve` command (`Cluster.worker_program`)."""

if __name__ == "__main__":
    prepare_children()
    main()
