"""`AdapterStore`: adapters by the fingerprint of their content, some of them in main memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from pdserve.common.errors import NotFound
from pdserve.models.lora.lora_adapter import CONFIG_FILE, WEIGHTS_FILE, LoraAdapter, read_adapter
from pdserve.models.lora.lora_targets import LoraTargets

MAX_REPLACED = 256
"""Former contents of folders that are known, in all."""

FileState = tuple[tuple[int, int, int], ...]
"""Per file: inode, size, and time of the last change in nanoseconds."""


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder, when it was read."""

    state: FileState
    fingerprint: str


class AdapterStore:
    """Reads folders, and keeps the `max_cpu_loras` adapters that were used last. Safe from any thread."""

    def __init__(self, targets: LoraTargets, max_cpu_loras: int) -> None:
        self.targets = targets
        self._max_cpu_loras = max_cpu_loras
        self._lock = threading.Lock()
        self._folders: dict[Path, _Folder] = {}
        self._path_of: dict[str, Path] = {}
        """Fingerprint -> a folder that has this content, or had it and is there with another one."""
        self._replaced: OrderedDict[str, None] = OrderedDict()
        """Contents that no folder has any more, the first replaced first; at most `MAX_REPLACED`."""
        self._adapters: OrderedDict[str, LoraAdapter] = OrderedDict()
        """Fingerprint -> adapter, least recently used first."""

    def add(self, folder: Path) -> str:
        """Read and check a folder, if it is new or its files have changed; returns the fingerprint.

        Raises: ConfigError naming the file, the field or tensor, and the value; UnsupportedModel for what is not served.
        """
        state = adapter_file_state(folder)
        with self._lock:
            known = self._folders.get(folder)
            if known is not None and known.state == state:
                return known.fingerprint
        adapter = read_adapter(folder, self.targets)
        with self._lock:
            former = self._folders.get(folder)
            self._folders[folder] = _Folder(state, adapter.fingerprint)
            self._path_of[adapter.fingerprint] = folder
            self._replaced.pop(adapter.fingerprint, None)
            if former is not None:
                self._replace(former.fingerprint)
            self._keep(adapter)
        return adapter.fingerprint

    def remove(self, folder: Path) -> None:
        """Forget a folder. Adapters that are in main memory stay there until others need the room."""
        with self._lock:
            self._folders.pop(folder, None)
            self._path_of = {fingerprint: path for fingerprint, path in self._path_of.items() if path != folder}
            # another folder may have the same content
            self._path_of |= {known.fingerprint: path for path, known in self._folders.items()} | self._path_of
            for fingerprint in [fingerprint for fingerprint in self._replaced if fingerprint not in self._path_of]:
                del self._replaced[fingerprint]

    def has(self, fingerprint: str) -> bool:
        """True if a folder has this content, or had it: one of the last `MAX_REPLACED` contents of folders that are there."""
        with self._lock:
            return fingerprint in self._path_of

    def folder_of(self, fingerprint: str) -> Path | None:
        """A folder that has this content, or had it; None if none is known."""
        with self._lock:
            return self._path_of.get(fingerprint)

    def get(self, fingerprint: str, folder: Path | None = None) -> LoraAdapter:
        """The adapter, read again if it is not in main memory. folder: default: `folder_of`.

        Raises: NotFound if no folder with this content is known, or if its content has changed since; ConfigError.
        """
        with self._lock:
            adapter = self._adapters.get(fingerprint)
            if adapter is not None:
                self._adapters.move_to_end(fingerprint)
                return adapter
            folder = folder or self._path_of.get(fingerprint)
        if folder is None:
            raise NotFound(f"no adapter with the fingerprint {fingerprint} is known here")
        adapter = read_adapter(folder, self.targets)
        if adapter.fingerprint != fingerprint:
            raise NotFound(
                f"the adapter with the fingerprint {fingerprint} is gone: its folder has the fingerprint {adapter.fingerprint} now"
            )
        with self._lock:
            self._keep(adapter)
        return adapter

    def _replace(self, fingerprint: str) -> None:
        """Note that a folder has this content no more."""
        other = next((path for path, known in self._folders.items() if known.fingerprint == fingerprint), None)
        if other is not None:
            self._path_of[fingerprint] = other
            return
        self._replaced[fingerprint] = None
        while len(self._replaced) > MAX_REPLACED:
            oldest, _ = self._replaced.popitem(last=False)
            del self._path_of[oldest]

    def _keep(self, adapter: LoraAdapter) -> None:
        self._adapters[adapter.fingerprint] = adapter
        self._adapters.move_to_end(adapter.fingerprint)
        while len(self._adapters) > self._max_cpu_loras:
            self._adapters.popitem(last=False)


def adapter_file_state(folder: Path) -> FileState:
    """The state of both files; () if one is missing."""
    try:
        stats = [(folder / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except OSError:
        return ()  # `read_adapter` names what is missing
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)
