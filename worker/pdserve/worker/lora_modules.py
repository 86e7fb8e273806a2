"""`LoraModules`: the adapters that a worker offers by name, from its settings and from a folder that is watched.

A folder is read again when its files have changed and were then still for one look, so that a copy under way is not read. Every
adapter is read and checked before it is offered; one that cannot be used is logged once per state of its files.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pdserve.common.errors import ConfigError, WorkerLost
from pdserve.common.request.generation_request import LORA_NAME, LORA_NAME_RULE
from pdserve.common.request.known_adapters import MAX_ADAPTERS, NO_ADAPTERS, KnownAdapters
from pdserve.engine.client.engine_core_client import EngineCoreClient
from pdserve.engine.lora.adapter_store import FileState, adapter_file_state

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
ADD_S = 120.0
"""Seconds for the engine to read and check an adapter."""
_SHOWN_CHARS = 1000


@dataclass(slots=True)
class _Module:
    """A folder by its name for clients."""

    folder: Path
    state: FileState
    """State of its files when it was read last."""
    fingerprint: str = ""
    """Empty: it cannot be used."""
    objection: str = ""
    """The reason why it cannot be used."""


def absolute_folder(path: str) -> Path:
    """The folder that a setting names."""
    return Path(path).expanduser().absolute()


def adapter_folders(given: Mapping[str, Path], watched: Path | None) -> tuple[dict[str, Path], dict[str, str]]:
    """Name -> folder of every adapter that may be offered, and name -> reason of the subfolders that may not.

    given: those of `lora_modules`. watched: `lora_dir`; None for none. Raises: OSError if it cannot be read.
    """
    folders, passed_over = dict(given), {}
    if watched is not None:
        with os.scandir(watched) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        for name in names:
            if name in given:
                passed_over[name] = "lora_modules has that name, too"
            elif not LORA_NAME.fullmatch(name):
                passed_over[name] = f"{LORA_NAME_RULE} are needed as its name"
            elif len(folders) >= MAX_ADAPTERS:
                passed_over[name] = f"a worker offers {MAX_ADAPTERS} adapters at most"
            else:
                folders[name] = watched / name
    return folders, passed_over


class LoraModules:
    """Used in the asyncio thread."""

    def __init__(
        self,
        engine: EngineCoreClient,
        modules: Mapping[str, str],
        folder: str | None,
        on_change: Callable[[KnownAdapters], None],
    ) -> None:
        """modules: name -> PEFT folder. folder: whose subfolders are adapters, too; None for none. on_change: gets what is offered
        now, after each change."""
        self._engine = engine
        self._given = {name: absolute_folder(path) for name, path in modules.items()}
        self._watched = None if folder is None else absolute_folder(folder)
        self._on_change = on_change
        self._modules: dict[str, _Module] = {}
        self._last_seen: dict[str, tuple[Path, FileState]] = {}
        self._passed_over: set[str] = set()
        """Entries of the watched folder that were logged because they cannot be adapters."""
        self._offered: KnownAdapters = NO_ADAPTERS

    @property
    def watches(self) -> bool:
        """False without adapters in the settings."""
        return bool(self._given) or self._watched is not None

    async def start(self) -> None:
        """Offer what is there. Raises: ConfigError for an adapter of `lora_modules`, or a `lora_dir`, that cannot be used."""
        if self._watched is not None and not self._watched.is_dir():
            raise ConfigError(f"lora_dir is {str(self._watched)!r}, which is no folder")
        for name, (folder, state) in (await asyncio.to_thread(self._look)).items():
            module = await self._read(name, folder, state)
            if name in self._given and not module.fingerprint:
                raise ConfigError(f"lora_modules has {name!r}, which cannot be used: {module.objection}")
        self._offer()

    async def run(self) -> None:
        """Follow changes until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.follow()
            except OSError as error:
                log.warning("lora_dir %s cannot be read: %s", self._watched, error.strerror)
            except WorkerLost:
                return  # the worker ends

    async def follow(self) -> None:
        """Look once, and offer what has changed since. Raises: OSError."""
        seen = await asyncio.to_thread(self._look)
        for name in [name for name in self._modules if name not in seen]:
            module = self._modules.pop(name)
            await self._engine.utility_async("remove_lora", str(module.folder))
            if module.fingerprint:
                log.info("adapter %s is offered no more: its folder %s is gone", name, module.folder)
        for name, (folder, state) in seen.items():
            known = self._modules.get(name)
            is_new = known is None or known.folder != folder or known.state != state
            if is_new and self._last_seen.get(name) == (folder, state):
                await self._read(name, folder, state)
        self._last_seen = seen
        self._offer()

    async def _read(self, name: str, folder: Path, state: FileState) -> _Module:
        module = self._modules[name] = _Module(folder, state)
        try:
            async with asyncio.timeout(ADD_S):
                module.fingerprint = await self._engine.utility_async("add_lora", str(folder))
        except TimeoutError:
            raise WorkerLost(f"the engine has not read an adapter for {ADD_S:g} s") from None
        except ConfigError as error:
            module.objection = error.message[:_SHOWN_CHARS]
            log.warning("adapter %s is not offered: %s", name, module.objection)
        else:
            log.info("adapter %s is offered: %s, fingerprint %s", name, folder, module.fingerprint)
        return module

    def _offer(self) -> None:
        offered = {name: module.fingerprint for name, module in self._modules.items() if module.fingerprint}
        if offered != self._offered:
            self._offered = MappingProxyType(offered)
            self._on_change(self._offered)

    def _look(self) -> dict[str, tuple[Path, FileState]]:
        """Name -> its folder with the state of its files. Runs in a thread. Raises: OSError."""
        folders, passed_over = adapter_folders(self._given, self._watched)
        for name, why in passed_over.items():
            self._pass_over(name, why)
        self._passed_over &= passed_over.keys()
        return {name: (folder, adapter_file_state(folder)) for name, folder in folders.items()}

    def _pass_over(self, name: str, why: str) -> None:
        if name not in self._passed_over:
            self._passed_over.add(name)
            log.warning("the folder %.200r in lora_dir is not offered as an adapter: %s", name, why)
