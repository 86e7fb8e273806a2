"""The source of measured transfers: a process with a pool of a worker's blocks, which lets others read them until its input ends.

    python -m pdserve.cli.profile.transfer_source prefill|decode SHAPE NUM_BLOCKS [CONFIG]

SHAPE is that of a block, as JSON. It reads the worker's settings from its environment and the file, and prints its connectors with
their metadata as a line of JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from pdserve.common.errors import ConfigError
from pdserve.common.kv_layout import BlockShape
from pdserve.common.processes.child_answers import ChildAnswers
from pdserve.common.processes.shared_interpreter import share_interpreter
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import WORKER_SETTINGS, WorkerSettings
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.make_connectors import serve_pools
from pdserve.kv_transfer.memory.pool_memory import PoolMemory
from pdserve.models.kv_cache import make_kv_cache

TOKEN = b"pdserve profile "
"""Of the only grant."""


class SourceAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """What the process prints."""

    metadata: dict[str, bytes] = {}
    """By connector."""
    problem: str = ""
    """Why there is nothing to read."""


def serve_blocks(settings: WorkerSettings, shape: BlockShape, num_blocks: int) -> tuple[ConnectorSet, PoolMemory]:
    """A pool on the device of the settings, and the connectors that they allow. Raises: ConfigError."""
    share_interpreter()
    connectors, [pool] = serve_pools(settings, [make_kv_cache(shape, num_blocks, settings.device)], settings.tls())
    return connectors, pool


def main(role: str, shape: BlockShape, num_blocks: int, config: Path | None) -> None:
    answers = ChildAnswers()
    try:
        connectors, _ = serve_blocks(load_settings(WORKER_SETTINGS[role], toml=config), shape, num_blocks)
    except ConfigError as error:
        answers.send(SourceAnswer(problem=error.message))
        return
    connectors.grant(TOKEN).publish(0, range(num_blocks))
    answers.send(SourceAnswer({name: connectors.metadata(name) for name in connectors.names}))
    sys.stdin.read()
    connectors.close()


if __name__ == "__main__":
    _, role, shape, num_blocks, *config = sys.argv
    main(role, msgspec.json.decode(shape, type=BlockShape), int(num_blocks), Path(config[0]) if config else None)
