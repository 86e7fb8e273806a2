"""`LoadedEngine`: a model folder's decoder and pool, and the engines that are made over them, one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pdserve.common.block_hash import BlockHasher
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.make_engine_core import make_engine_core
from pdserve.engine.runner.loaded_model import load_model
from pdserve.engine.sampling.logits_processors import LogitsProcessors


def local_hasher(block_size: int) -> BlockHasher:
    """Hashes for an engine without services. They never leave this machine, so a public key is enough."""
    return BlockHasher(DEVELOPMENT_KEY, block_size)


class LoadedEngine:
    """An engine without transfers, for a front end in this process or in its parent."""

    def __init__(
        self, folder: Path, settings: WorkerSettings, logits_processors: LogitsProcessors | None = None
    ) -> None:
        """Load the model. logits_processors: default: those that the settings name.

        Raises: ConfigError naming the setting, its value and its limit; UnsupportedModel.
        """
        self._settings = settings
        self._model = load_model(folder, settings)
        weakref.finalize(self, self._model.close)
        self._logits_processors = logits_processors or LogitsProcessors.from_entry_points(settings.logits_processors)
        self._close_grammars: Callable[[], object] = lambda: None
        self._core: EngineCore | None = None
        self.info = self._model.engine_info(settings)

    @property
    def num_threads(self) -> int:
        return self._settings.num_threads

    def make_core(self) -> EngineCore:
        """An engine with an empty cache over the one pool: the last one made owns it."""
        # the last engine may have left sequences in their grammars, and loads that write into the pool
        self._close_core()
        grammars = self._model.grammar_compiler(self._settings)
        if grammars is not None:
            # its thread and its processes would outlive this object
            self._close_grammars = weakref.finalize(self, grammars.close)
        self._core = make_engine_core(
            replace(self._model.engine_config(self._settings), max_sequences=self._settings.max_num_seqs),
            self._model.decoder,
            self._model.kv_caches,
            local_hasher(self._settings.block_size),
            self.info.vocab_size,
            grammars=grammars,
            logits_processors=self._logits_processors,
            lora=self._model.lora_runner,
            ranks=self._model.ranks,
            host_caches=self._model.host_caches,
            draft_model=self._model.draft_model,
            token_texts=self._model.token_texts,
        )
        return self._core

    def close(self) -> None:
        """End what was started beside the engine, which must have ended. May be called again."""
        self._close_core()
        self._model.close()

    def _close_core(self) -> None:
        if self._core is not None:
            self._core.executor.close()
        self._close_grammars()
