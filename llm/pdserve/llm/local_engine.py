"""`LocalEngine`: a loaded model folder, with all parts that serve a prompt without services."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

import msgspec

from pdserve.common.errors import ConfigError
from pdserve.common.settings.service_settings import SchedulingPolicy
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.clients.engine_core_client import EngineCoreClient
from pdserve.engine.clients.inproc_client import InprocClient
from pdserve.engine.clients.loaded_engine import LoadedEngine, local_hasher
from pdserve.engine.clients.process_client import ProcessClient
from pdserve.engine.runner.loaded_model import model_folder
from pdserve.engine.sampling.logits_processors import LogitsProcessors
from pdserve.text.tokenization.tokenizer import Tokenizer


class EngineOptions(TypedDict, total=False):
    """Options of `LLM` and `AsyncLLM`; they mean and default to what they do in `WorkerSettings`."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    load_format: Literal["auto", "dummy"]
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
    scheduling_policy: SchedulingPolicy
    """`fcfs`, the default: by arrival; `priority`: by the requests' `priority`, then by arrival."""
    num_threads: int
    """Threads that compute."""
    attention_backend: str
    """Attention back end; default: the fastest on the device."""
    kernels: str
    """`torch` or `triton`; default: the fastest on the device."""
    logits_processors: Sequence[str]
    """Installed logits processors that requests may name; default: none."""


class LocalEngine:
    """The client of an engine, and what prepares its requests."""

    def __init__(self, model: str | Path, options: EngineOptions, *, engine_process: bool = False) -> None:
        """model: a checkpoint's folder, or `demo`. engine_process: run the engine in a process of its own.

        Raises: ConfigError naming the option, its value and its limit; UnsupportedModel.
        """
        settings = _settings(options)
        folder = model_folder(str(model))
        self.tokenizer = Tokenizer.from_folder(folder)
        self.hasher = local_hasher(settings.block_size)
        # loaded here too for the engine's process, since `check` is called before anything is computed
        self.logits_processors = LogitsProcessors.from_entry_points(settings.logits_processors)
        self.client: EngineCoreClient = (
            ProcessClient(folder, settings)
            if engine_process
            else InprocClient(LoadedEngine(folder, settings, self.logits_processors))
        )
        self.info = self.client.info


def _settings(options: EngineOptions) -> WorkerSettings:
    if unknown := options.keys() - EngineOptions.__annotations__.keys():
        raise ConfigError(
            f"unknown option {min(unknown)!r}; there are model, seed, engine_process, {', '.join(EngineOptions.__annotations__)}"
        )
    try:
        settings = msgspec.convert(dict(options), WorkerSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"options: {error}") from error
    settings.verify()
    return settings
