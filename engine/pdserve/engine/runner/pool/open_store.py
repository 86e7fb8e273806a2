"""Opens the store of an engine: a folder that no other process uses, or its part of what workers share.

Both are named by deployment key and layout.
"""

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
from pdserve.common.settings.kv_store_url import MooncakeUrl
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.ranks.rank_messages import DiskOptions, MooncakeOptions, StoreOptions
from pdserve.engine.runner.pool.block_store import SealedStore
from pdserve.engine.runner.pool.disk_store import DiskStore
from pdserve.engine.runner.pool.mooncake_store import MooncakeStore
from pdserve.engine.runner.pool.segment_files import DiskFolder

_NAME_BYTES = 8


def store_context(settings: WorkerSettings, layout: KvLayout) -> bytes:
    """Equal for workers that can use each other's stored blocks."""
    return f"{layout_fingerprint(layout)}/{settings.tensor_parallel_size}".encode()


def disk_bytes(settings: WorkerSettings) -> int:
    """Of each rank."""
    return int(settings.kv_disk_gib * (1 << 30))


class StoreClaim:
    """The use of a store until `release`, or the end of this process."""

    def __init__(self, settings: WorkerSettings, layout: KvLayout, key: DeploymentKey) -> None:
        """A worker with a disk that starts again finds the blocks of its last life, or those of another worker that has ended.

        Raises: ConfigError for a folder that cannot be used.
        """
        context = store_context(settings, layout)
        secret = key.derive(STORED_BLOCKS, context)
        # the name of a folder, and of what is shared, tells nothing of the key that seals blocks
        name = key.derive(STORED_BLOCKS, b"folder/" + context)[:_NAME_BYTES].hex()
        self._lock: int | None = None
        if settings.kv_store is not None:
            self.options: StoreOptions = MooncakeOptions(
                MooncakeUrl.parse(settings.kv_store), f"pdserve/{name}", secret
            )
        else:
            self.options = self._claim_folder(settings, name, secret)

    def _claim_folder(self, settings: WorkerSettings, name: str, secret: bytes) -> DiskOptions:
        parent = Path(settings.kv_disk_path or "") / name
        max_bytes = disk_bytes(settings)
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
        return DiskOptions(str(folder), max_bytes, secret)

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
        if self._lock is not None:
            os.close(self._lock)


def open_store(options: StoreOptions, rank: int) -> SealedStore:
    """The part of a rank. Raises: OSError; ConfigError if what it needs is not installed."""
    digest = Gmac(options.key)
    if isinstance(options, MooncakeOptions):
        return SealedStore(MooncakeStore(options.url, options.prefix, rank), digest)
    return SealedStore(DiskStore(DiskFolder(Path(options.folder) / f"rank{rank}"), options.max_bytes), digest)
