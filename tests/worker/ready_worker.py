"""A worker that says, once it is ready, how many objects a full garbage collection would look through, and leaves.

Usage: ready_worker.py FOLDER
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path

from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.common.worker_identity import WorkerIdentity, WorkerRole
from pdserve.decode.decode_servicer import decode_calls
from pdserve.worker.worker_process import run_worker


def on_ready(identity: WorkerIdentity) -> None:
    print(len(gc.get_objects()), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    gc.unfreeze()  # a process that was forked has everything frozen that it began with; a new one has not
    settings = DecodeSettings(port=0, connector="tcp", num_blocks=8)
    calls = {WorkerRole.DECODE: decode_calls}
    asyncio.run(run_worker(settings, Path(sys.argv[1]), calls, ConfigError("a test"), on_ready=on_ready))
