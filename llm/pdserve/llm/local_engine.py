"""`LocalEngine`: a loaded model folder, with all parts that serve a prompt in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

import msgspec

from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import ConfigError
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.make_engine_core import make_engine_core
from pdserve.engine.runner.loaded_model import load_model, model_folder
from pdserve.engine.sampling.logits_processors import LogitsProcessors
from pdserve.engine.structured_outputs.grammar_compiler import GrammarCompiler
from pdserve.text.tokenizer import Tokenizer


class EngineOptions(TypedDict, total=False):
    """Options of `LLM` and `AsyncLLM`; they mean and default to what they do in `WorkerSettings`."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    block_size: int
    """Tokens in a KV block."""
    num_blocks: int | None
    """KV blocks in the pool; default: what `kv_cache_mib` holds."""
    kv_cache_mib: int
    max_model_len: int | None
    """Tokens of prompt and output together; default: the model's own limit, or what the pool holds."""
    max_num_seqs: int
    """Sequences in one step, at most."""
    max_num_batched_tokens: int
    """Tokens computed in one step, at most."""
    num_threads: int
    """Threads that compute."""
    attention_backend: str
    """What computes attention; default: the fastest on the device."""
    logits_processors: Sequence[str]
    """Installed logits processors that requests may name; default: none."""


class LocalEngine:
    """The parts of an engine; the caller that runs the engine makes it with `make_core`."""

    def __init__(self, model: str | Path, options: EngineOptions) -> None:
        """model: a checkpoint's folder, or `demo`. Raises: ConfigError naming the option, its value and its limit."""
        self._settings = _settings(options)
        folder = model_folder(str(model))
        self.tokenizer = Tokenizer.from_folder(folder)
        self.model = load_model(folder, self._settings)
        self._grammars: GrammarCompiler | None = None
        # no hash leaves this process, so a public key is enough
        self.hasher = BlockHasher(DEVELOPMENT_KEY, self._settings.block_size)
        self.logits_processors = LogitsProcessors.from_entry_points(self._settings.logits_processors)

    @property
    def num_threads(self) -> int:
        return self._settings.num_threads

    @property
    def max_num_seqs(self) -> int:
        return self._settings.max_num_seqs

    @property
    def vocab_size(self) -> int:
        return self.model.decoder.config.vocab_size

    def close(self) -> None:
        """End what an engine has started beside itself; the engine must have ended. May be called again."""
        if self._grammars is not None:
            self._grammars.close()

    def make_core(self) -> EngineCore:
        """An engine with an empty cache over the one pool: the last one made owns it."""
        config = self.model.engine_config(self._settings)
        model = self.model
        # the last engine may have left sequences in their grammars
        self.close()
        self._grammars = model.grammar_compiler(self._settings)
        return make_engine_core(
            config,
            model.decoder,
            model.kv_cache,
            self.hasher,
            self.vocab_size,
            grammars=self._grammars,
            logits_processors=self.logits_processors,
        )


def _settings(options: EngineOptions) -> WorkerSettings:
    if unknown := options.keys() - EngineOptions.__annotations__.keys():
        raise ConfigError(
            f"unknown option {min(unknown)!r}; there are model, seed, {', '.join(EngineOptions.__annotations__)}"
        )
    try:
        settings = msgspec.convert(dict(options), WorkerSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"options: {error}") from error
    settings.verify()
    return settings
