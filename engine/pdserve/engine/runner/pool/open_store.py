"""Opens the store of an engine: one folder per deployment key and layout, and in it one per worker that runs at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from itertools import count
from pathlib import Path

from pdserve.common.errors import ConfigError
from pdserve.common.kv_layout import KvLayout
from pdserve.common.registry.registry import layout_fingerprint
from pdserve.common.security.block_digest import Gmac
from pdserve.common.security.deployment_key import STORED_BLOCKS, DeploymentKey
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.ranks.rank_messages import StoreOptions
from pdserve.engine.runner.pool.block_store import SealedStore
from pdserve.engine.runner.pool.disk_store import DiskStore

_FOLDER_NAME_BYTES = 8


class StoreClaim:
    """A folder that no other process uses until `release`, or the end of this one."""

    def __init__(self, settings: WorkerSettings, layout: KvLayout, key: DeploymentKey) -> None:
        """A worker that starts again finds the blocks of its last life, or those of another worker that has ended.

        Raises: ConfigError for a folder that cannot be used.
        """
        context = f"{layout_fingerprint(layout)}/{settings.tensor_parallel_size}".encode()
        secret = key.derive(STORED_BLOCKS, context)
        # the folder's name tells nothing of the key that seals blocks
        name = key.derive(STORED_BLOCKS, b"folder/" + context)[:_FOLDER_NAME_BYTES].hex()
        parent = Path(settings.kv_disk_path or "") / name
        max_bytes = int(settings.kv_disk_gib * (1 << 30))
        try:
            folder = self._claim(parent)
            free_bytes = shutil.disk_usage(folder).free
            has_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        except OSError as error:
            raise ConfigError(f"kv_disk_path {settings.kv_disk_path}: {error.strerror}") from error
        if (needed := max_bytes * settings.tensor_parallel_size) > free_bytes + has_bytes:
            self.release()
            raise ConfigError(
                f"kv_disk_gib is {settings.kv_disk_gib}, which takes {needed >> 20} MiB, and "
                f"{settings.kv_disk_path} has room for {(free_bytes + has_bytes) >> 20} MiB"
            )
        self.options = StoreOptions(str(folder), max_bytes, secret)

    def _claim(self, parent: Path) -> Path:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for number in count():
            folder = parent / str(number)
            folder.mkdir(exist_ok=True, mode=0o700)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
            else:
                return folder
        raise AssertionError("count() does not end")

    def release(self) -> None:
        """Let another process use the folder."""
        os.close(self._lock)


def open_store(options: StoreOptions, rank: int) -> SealedStore:
    """The part of a rank. Raises: OSError."""
    folder = Path(options.folder) / f"rank{rank}"
    return SealedStore(DiskStore(folder, options.max_bytes), Gmac(options.key))
