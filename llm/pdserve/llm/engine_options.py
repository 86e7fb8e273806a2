"""`EngineOptions` and `EngineArgs`: the options of an engine in Python, and how they become `WorkerSettings`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypedDict, Unpack

import msgspec

from pdserve.common.errors import ConfigError
from pdserve.common.kv_layout import KvCacheDtype
from pdserve.common.request.sampling_params import MAX_LOGPROBS
from pdserve.common.settings.service_settings import SchedulingPolicy
from pdserve.common.settings.settings import with_limits
from pdserve.common.settings.worker_settings import ModelImpl, WorkerSettings
from pdserve.engine.stats.stat_logger import StatLoggerFactory


class EngineOptions(TypedDict, total=False):
    """Options of `LLM`, `AsyncLLM` and `LLMEngine`, with the meanings and defaults of `WorkerSettings`. None is the default."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    load_format: Literal["auto", "dummy"]
    model_impl: ModelImpl
    """`native` or `transformers`: code that computes the model; default: native where there is its family."""
    quantization: Literal["auto", "none", "int8", "int4", "fp8"] | None
    kv_cache_dtype: KvCacheDtype
    """Dtype of keys and values in the KV cache: `int8`, `fp8`; default: the model's."""
    device: str
    """`cpu`, the default, `cuda` or `cuda:N`."""
    gpu_memory_utilization: float
    """Part of a GPU's memory that weights, the largest step and the KV pool may take; default 0.9."""
    tensor_parallel_size: int
    """Processes that share the model; default 1."""
    block_size: int
    """Tokens in a KV block."""
    num_blocks: int | None
    """KV blocks of all layers in the pool, or as much memory in blocks of a KV cache group's layers; default: what `kv_cache_mib`
    holds."""
    disable_hybrid_kv_cache_manager: bool
    """True: layers with a window keep all blocks where other layers have none, in one KV cache group."""
    kv_cache_mib: int
    kv_host_mib: int
    """Main memory for cached blocks that the pool reuses, MiB; default 0. vLLM's `kv_offloading_size` is in GiB."""
    kv_disk_path: str | None
    """Folder for cached blocks that have been in main memory, also of earlier processes; default: none."""
    kv_disk_gib: float
    """Size of what this engine keeps there, GiB."""
    kv_store: str | None
    """In place of that folder, a Mooncake Store that engines share; default: none."""
    max_model_len: int | None
    """Tokens of prompt and output together; default: the model's own limit, or what the pool holds."""
    max_num_seqs: int
    """Sequences in one step, at most."""
    max_num_batched_tokens: int | None
    """Tokens computed in one step, at most."""
    max_logprobs: int
    """Log-probabilities per token that a request may ask for; default 20, -1: as many as the vocabulary has."""
    long_prefill_token_threshold: int
    """Tokens of one prompt computed in a step, at most; 0: no limit but the step's."""
    enable_prefix_caching: bool
    """Default true: blocks of earlier prompts are found again."""
    scheduling_policy: SchedulingPolicy
    """`fcfs`, the default: by arrival; `priority`: by the requests' `priority`, then by arrival."""
    num_threads: int
    """Threads that compute."""
    attention_backend: str
    """Attention back end; default: the fastest on the device."""
    kernels: str
    """`torch` or `triton`; default: the fastest on the device."""
    enforce_eager: bool
    """True: steps on a GPU replay no captured graphs."""
    async_scheduling: bool | None
    """Schedule a step while the one before is computed; default: on a GPU."""
    enable_prompt_embeds: bool
    """Default false: prompts may be embeddings (`EmbedsPrompt`)."""
    enable_lora: bool
    """True: requests may have a `lora_request`."""
    max_loras: int
    """Different adapters in one step, at most."""
    max_lora_rank: int
    """Largest rank of an adapter."""
    max_cpu_loras: int | None
    """Adapters kept in main memory; default: `max_loras`."""
    collect_layer_times: bool
    """Time each layer of each step, for stat loggers and the profile."""
    profile_interval_s: float
    """Log the mean stages of the last steps, at most once per this number of seconds; 0: not by time."""
    profile_steps: int
    """End this log after this number of steps, with a last line; 0: never."""
    speculative_config: Mapping[str, Any] | None
    """How tokens are drafted, by vLLM's names: `method`, `num_speculative_tokens`, and others; default: not at all."""
    logits_processors: Sequence[str]
    """Installed logits processors that requests may name; default: none."""
    grammar_timeout_s: float
    """Seconds for a grammar of `structured_outputs` to be compiled, and before that to get its turn."""
    grammar_token_s: float
    """CPU time for a grammar to accept a token and find the next mask, seconds."""
    grammar_request_s: float
    """The same for all tokens of a request, seconds, plus 5 ms per token."""
    grammar_memory_mib: int
    """Address space that the process of a grammar may take in addition to its initial one."""
    grammar_whitespace_chars: int
    """White space characters in a row that JSON of a grammar may have; 0: no limit."""
    grammar_string_chars: int | None
    """Characters of a string in JSON of a grammar whose schema has no limit; 0: no limit."""


_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "pipeline_parallel_size": (1,),
        "data_parallel_size": (1,),
        "tokenizer": (None,),
        "tokenizer_mode": ("auto",),
        "skip_tokenizer_init": (False,),
        "trust_remote_code": (False, True),
        "revision": (None,),
        "tokenizer_revision": (None,),
        "enable_chunked_prefill": (None, True),
        "runner": ("auto", "generate", "pooling"),
        "task": ("auto", "generate", "embed"),
        "convert": ("auto", "none", "embed"),
        "cpu_offload_gb": (0,),
        "disable_custom_all_reduce": (False, True),
        "hf_token": (None,),
        "hf_overrides": (None, {}),
        "config_format": ("auto", "hf"),
    }
)
"""Options of vLLM that change nothing here -> their values that may be given; no code of a checkpoint is ever run."""


class EngineArgs:
    """Arguments of an engine, by vLLM's name: `LLMEngine.from_engine_args(EngineArgs(model="demo", max_num_seqs=8))`."""

    def __init__(
        self,
        model: str | Path,
        *,
        seed: int | None = 0,
        engine_process: bool = False,
        disable_log_stats: bool = False,
        stat_loggers: Sequence[str | StatLoggerFactory] = (),
        **options: Unpack[EngineOptions],
    ) -> None:
        """Arguments: those of `LLM`, which checks them."""
        self.model = model
        self.arguments: dict[str, Any] = {
            "seed": seed,
            "engine_process": engine_process,
            "disable_log_stats": disable_log_stats,
            "stat_loggers": stat_loggers,
            **options,
        }


def worker_settings(options: Mapping[str, Any]) -> WorkerSettings:
    """Settings of an engine with these options. Raises: ConfigError naming the option, its value and its limit."""
    known = EngineOptions.__annotations__
    if unknown := options.keys() - known.keys() - _WITHOUT_EFFECT.keys():
        own = "model, seed, engine_process, disable_log_stats, stat_loggers"
        raise ConfigError(f"unknown option {min(unknown)!r}; there are {own}, {', '.join(known)}")
    options = {name: value for name, value in options.items() if value is not None}
    for name, values in _WITHOUT_EFFECT.items():
        if name in options and not any(options[name] is value or options[name] == value for value in values):
            possible = " or ".join(map(repr, values))
            raise ConfigError(f"{name} is {options[name]!r:.60}, only {possible} is supported")
    try:
        given = {name: value for name, value in options.items() if name in known and name != "max_logprobs"}
        settings = msgspec.convert(with_limits(WorkerSettings, given), WorkerSettings)
    except msgspec.ValidationError as error:
        # callers have no table of limits
        raise ConfigError(f"options: {error}".replace("$.limits.", "$.")) from error
    settings.verify()
    return settings


def max_logprobs(options: Mapping[str, Any], vocab_size: int) -> int:
    """Log-probabilities per token that a request may ask for. Raises: ConfigError naming the option's value and limit."""
    most: object = options.get("max_logprobs")
    if most is None:
        return MAX_LOGPROBS
    if type(most) is not int or not -1 <= most <= vocab_size:
        raise ConfigError(f"max_logprobs is {most!r:.60}, -1 to {vocab_size}, the size of the vocabulary, are possible")
    return vocab_size if most == -1 else most
