"""`LoadedEngine`: a loaded model, and the engines that are made over its pool, one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, Self

from pdserve.common.block_hash import BlockHasher
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY, DeploymentKey
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.engine_info import EngineInfo
from pdserve.engine.make_engine_core import make_engine_core
from pdserve.engine.runner.loading.loaded_model import LoadedModel, load_model
from pdserve.engine.runner.pool.open_store import StoreClaim
from pdserve.engine.sampling.logits_processors import LogitsProcessors
from pdserve.engine.scheduler.kv_messages import KvOutbox


def local_hasher(block_size: int) -> BlockHasher:
    """Hashes for an engine without services. They never leave this machine, so a public key is enough."""
    return BlockHasher(DEVELOPMENT_KEY, block_size)


class EngineSource(Protocol):
    """Makes the engines of an `InprocClient`."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def num_threads(self) -> int: ...

    @property
    def cpu_core(self) -> int | None: ...

    def make_core(self) -> EngineCore:
        """An engine with an empty cache over the one pool: the last one made owns it."""

    def close(self) -> None:
        """End what was started with the engine, which must have ended. May be called again."""


class LoadedEngine:
    """An `EngineSource`."""

    def __init__(
        self,
        model: LoadedModel,
        settings: WorkerSettings,
        deployment_key: DeploymentKey = DEVELOPMENT_KEY,
        logits_processors: LogitsProcessors | None = None,
        outbox: KvOutbox | None = None,
    ) -> None:
        """logits_processors: default: those that the settings name. outbox: of the engine's transfers; None without services.

        Raises: ConfigError naming the setting, its value and its limit.
        """
        self._settings = settings
        self._model = model
        weakref.finalize(self, model.close)
        self._store: StoreClaim | None = None
        if settings.has_block_store:
            self._store = StoreClaim(settings, model.layout, deployment_key)
            self._release_store = weakref.finalize(self, self._store.release)
        self._hasher = BlockHasher(deployment_key, settings.block_size)
        self._outbox = outbox
        self._logits_processors = logits_processors or LogitsProcessors.from_entry_points(settings.logits_processors)
        self._close_grammars: Callable[[], object] = lambda: None
        self._core: EngineCore | None = None
        self.info = model.engine_info(settings)
        self.num_threads = settings.num_threads
        self.cpu_core = settings.cpu_core

    @classmethod
    def load(cls, folder: Path, settings: WorkerSettings, logits_processors: LogitsProcessors | None = None) -> Self:
        """An engine without services. Raises: ConfigError naming the setting, its value and its limit; UnsupportedModel."""
        return cls(load_model(folder, settings), settings, logits_processors=logits_processors)

    def make_core(self, settings: WorkerSettings | None = None) -> EngineCore:
        """As `EngineSource.make_core`. settings: of this engine, where they differ from those of the model in what shapes neither
        weights nor pool."""
        settings = settings or self._settings
        # the last engine may have left sequences in their grammars, and loads that write into the pool
        self._close_core()
        grammars = self._model.grammar_compiler(settings)
        if grammars is not None:
            # its thread and its processes would outlive this object
            self._close_grammars = weakref.finalize(self, grammars.close)
        config = self._model.engine_config(settings)
        if self._outbox is None:
            config = replace(config, max_sequences=settings.max_num_seqs)
        self._core = make_engine_core(
            config,
            self._model.decoder,
            self._model.kv_caches,
            self._hasher,
            self.info.vocab_size,
            self._outbox,
            grammars,
            self._logits_processors,
            lora=self._model.lora_runner,
            ranks=self._model.ranks,
            host_caches=self._model.host_caches,
            draft_model=self._model.draft_model,
            token_texts=self._model.token_texts,
            store=None if self._store is None else self._store.options,
        )
        return self._core

    def close(self) -> None:
        self._close_core()
        self._model.close()
        if self._store is not None:
            self._release_store()

    def _close_core(self) -> None:
        if self._core is not None:
            self._core.executor.close()
        self._close_grammars()
