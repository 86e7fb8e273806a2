"""`WorkerSettings`, and the additional settings of prefill and decode workers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from pdserve.common.address.host_address import is_wildcard, own_address
from pdserve.common.errors import ConfigError
from pdserve.common.kv_layout import CACHE_DTYPES, KvCacheDtype
from pdserve.common.registry.registry import is_worker_id
from pdserve.common.request.generation_request import LORA_NAME, LORA_NAME_RULE, MAX_DATA_PARALLEL_RANK
from pdserve.common.request.known_adapters import MAX_ADAPTERS
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.settings.kv_store_url import MooncakeUrl
from pdserve.common.settings.limits import WorkerLimits
from pdserve.common.settings.service_settings import ServiceSettings
from pdserve.common.settings.speculative_config import SpeculativeConfig

CPU_STEP_TOKENS = 512
"""On a CPU larger steps are no faster, and the blocks of one step move only when it has ended."""
GPU_STEP_TOKENS = 2048
"""Tokens per step on a GPU, which needs more to be busy."""
MAX_STREAM_INTERVAL = 1024
CPU_KV_CACHE_MIB = 256
"""Size of the KV pool in main memory, if no setting says another."""

_DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]?))?")
"""torch counts devices in eight bits."""

_MOST = {
    "block_size": 1 << 16, "max_num_seqs": 1 << 16, "max_num_batched_tokens": 1 << 22, "num_threads": 1 << 12,
    "tensor_parallel_size": 1 << 10,
}  # fmt: skip
"""Values beyond any machine's, for which memory or threads would be asked before anything is served. What pools take is compared
with the machine's memory when they are made."""

ModelImpl = Literal["auto", "native", "transformers"]
KvDigestName = Literal["auto", "xxh3_64", "gmac"]


class WorkerSettings(ServiceSettings, frozen=True, kw_only=True):
    """A prefill or decode worker."""

    group: ClassVar[str] = "Workers"

    port: int = 0
    """gRPC; 0 draws a free one."""
    data_port: int = 0
    """KV blocks over TCP; 0 draws a free one. Each rank of `tensor_parallel_size` listens at the port after the one before."""
    advertise_host: str | None = None
    """Host that peers connect to, if it is not `host`; default for a wildcard `host`: this machine's address."""
    worker_id: str | None = None
    """Names this worker; default: role, host beyond loopback, port."""
    data_parallel_rank: int | None = None
    """On a decode worker: requests that prefer this rank are placed on it while it is ready; several workers may have one rank.
    See docs/parameters.md#scheduling."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and activations; `auto`: the checkpoint's."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` draws weights instead of reading them, for measurements with a config.json alone."""
    model_impl: ModelImpl = "auto"
    """Code that computes the model: `native`, our own of its family; `transformers`, the model's own in that library, with our
    attention; `auto`, native where there is the family. Equal on all workers of a model. See
    docs/models.md#any-other-family."""
    quantization: Literal["auto", "none", "int8", "int4", "fp8"] = "auto"
    """What matrices of attention and MLP are in memory. `auto`: numbers of 4 or 8 bits as the checkpoint stores them where there is
    a product for them, else numbers of `dtype`; `none`: always these. The others round them at loading: `int8`, on a CPU only, and
    `fp8`, on a GPU from sm_89 on, also their inputs, and `int4`. See docs/checkpoints.md#quantized-weights."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """Dtype of keys and values in the KV cache: `auto` the model's; `int8` or `fp8` (e4m3) with a scale per token and head, on a
    CPU only; other names of these: `CACHE_DTYPES`. See docs/checkpoints.md#quantized-kv-cache."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    tensor_parallel_size: int = 1
    """Processes that share the model's heads and matrices, each with a part of the weights and of the KV cache; with `cuda` each
    has a GPU of its own. See docs/deploy.md#tensor-parallelism."""
    block_size: int = 16
    """Tokens in a KV block; equal on all workers."""
    num_blocks: int | None = None
    """KV blocks of all layers in the pool, or as much memory in blocks of a KV cache group's layers; default: what `kv_cache_mib`
    holds."""
    disable_hybrid_kv_cache_manager: bool = False
    """True: layers with a window keep all blocks where other layers have none, in one KV cache group; equal on all workers. See
    docs/architecture.md#kv-cache-groups."""
    kv_cache_mib: int | None = None
    """Size of the KV pool, per rank of `tensor_parallel_size`; default: 256 on a CPU, on a GPU what
    `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = 0.9
    """Part of a GPU's memory that weights, the largest step and the KV pool may take, other processes included."""
    kv_host_mib: int = 0
    """Main memory for cached blocks that the KV pool reuses, from which they are loaded when they are needed again, per rank of
    `tensor_parallel_size`; 0: none. Blocks of several shapes share it as they share the pool."""
    kv_disk_path: str | None = None
    """Folder of a disk for cached blocks that have been in host memory (`kv_host_mib`), from which they are loaded when they are
    needed again, also after a restart. Workers may share it: each uses a folder of its own in it."""
    kv_disk_gib: float = 0.0
    """Bytes of this folder that the worker may use, in GiB, per rank of `tensor_parallel_size`."""
    kv_store: str | None = None
    """In place of a disk, a Mooncake Store for cached blocks that have been in host memory (`kv_host_mib`), which workers share:
    `mooncake://HOST:PORT?segment_mib=N` with its master, and the main memory that each rank adds. Needs the extra `mooncake`. See
    docs/deploy.md#a-store-that-workers-share."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; default: the model's own limit. See docs/checkpoints.md#length."""
    max_num_batched_tokens: int | None = None
    """Tokens computed in one step, at most; default: `CPU_STEP_TOKENS` or `GPU_STEP_TOKENS`."""
    max_num_seqs: int = 64
    """Sequences in one step, at most."""
    enable_prefix_caching: bool = True
    """Find blocks of earlier prompts again; without it every prompt is computed or received as a whole."""
    num_threads: int = 1
    """Computing threads."""
    cpu_core: int | None = None
    """Pin the worker's computing threads to this core (and the following `num_threads - 1`)."""
    logits_processors: tuple[str, ...] = ()
    """Entry points of the group `pdserve.logits_processors` that are loaded at start; no other plug-in is imported."""
    enable_lora: bool = False
    """Serve LoRA adapters. See docs/lora.md."""
    lora_modules: dict[str, str] | None = None
    """Adapter's name for clients -> its PEFT folder; as text `name=folder`, with commas between several."""
    lora_dir: str | None = None
    """Folder whose subfolders are adapters, each by its name; looked at every second, so that they come and go at run time."""
    attention_backend: str = "auto"
    """Implementation of attention: `auto` chooses by the device, `torch` runs on every device, `native` on
    CPUs, with attention and states in C++ where that is built, `triton` on GPUs, as `sdpa`, which is `triton` with torch's fused
    attention within full prompt chunks; any other name is an entry point of the group `pdserve.attention_backends`, imported only
    when this setting names it."""
    kernels: Literal["auto", "torch", "native", "triton"] = "auto"
    """Implementation of norms, rotary embedding, activations, sampling and block copies: `torch`, `native` (C++) on a CPU, or
    `triton` on a GPU; `auto`: `native` or `triton`, where it is there."""
    enforce_eager: bool = False
    """On a GPU: launch each kernel of a decode step by itself, instead of replaying captured graphs."""
    async_scheduling: bool | None = None
    """Launch the next step of decoding sequences before the tokens of the last one are read; default: on a GPU alone."""
    collect_layer_times: bool = False
    """Time each layer of each step, for `/metrics`, stat loggers and the profile; a step costs more for it."""
    stat_loggers: tuple[str, ...] = ()
    """`logging`, and entry points of the group `pdserve.stat_loggers`, which get statistics of each step; no other is imported."""
    profile_interval_s: float = 0.0
    """Log the mean stages of the last steps, at most once per this number of seconds; 0: not by time."""
    profile_steps: int = 0
    """End this log after this number of steps, with a last line; 0: never."""
    speculative_config: SpeculativeConfig | None = None
    """How tokens are drafted, as a table, or as JSON; default: not at all. Prefill workers only compute keys and values for decode
    workers' draft heads. See docs/parameters.md#speculation."""
    connector: Literal["auto", "nixl", "tcp"] = "auto"
    """How KV blocks move: `auto` and `nixl` fall back to TCP at run time, `nixl` refuses to start without NIXL."""
    nixl_plaintext: bool = False
    """With TLS: allow KV blocks over NIXL, which encrypts nothing. For fabrics that no other host reaches."""
    kv_digest: KvDigestName = "auto"
    """How a block's bytes are verified: `xxh3_64` detects damage, `gmac` also forgery; `auto`: `gmac` with peers beyond loopback
    to which blocks may travel without TLS, else `xxh3_64`."""
    engine_process: bool = False
    """Run the engine, its KV pool and its transfers in a process of their own, which ends with the worker's. See
    docs/architecture.md#the-door-to-an-engine."""
    attach_port: int = 0
    """gRPC port of a prefill worker's `engine_process`, at which decode workers ask for KV blocks; 0 draws a free one."""
    limits: WorkerLimits = WorkerLimits()

    def addresses(self) -> list[str]:
        return [self.host, *(host for host in (self.advertise_host, self.metrics_host) if host)]

    @property
    def rounded_weights(self) -> Literal["int8", "int4", "fp8"] | None:
        """To what matrices are rounded at loading."""
        return None if self.quantization == "auto" or self.quantization == "none" else self.quantization

    @property
    def weight_form(self) -> Literal["stored", "int8", "int4", "fp8"] | None:
        """What matrices are in memory: few bits as they are stored where there is a product for them, or rounded ones; None:
        numbers of the model's dtype."""
        return "stored" if self.quantization == "auto" else self.rounded_weights

    @property
    def step_tokens(self) -> int:
        """Tokens computed in one step, at most."""
        return self.max_num_batched_tokens or (CPU_STEP_TOKENS if self.device == "cpu" else GPU_STEP_TOKENS)

    @property
    def step_drafts(self) -> int:
        """Drafts of one step, at most."""
        if self.speculative_config is None:
            return 0
        return self.speculative_config.num_drafts(self.max_num_seqs, self.step_tokens)

    @property
    def drafts_with_model(self) -> bool:
        """True if a decode worker loads a model that drafts."""
        return self.speculative_config is not None and self.speculative_config.draft_model is not None

    @property
    def pool_mib(self) -> int | None:
        """`kv_cache_mib`, or its default; None: what a GPU has left."""
        return CPU_KV_CACHE_MIB if self.kv_cache_mib is None and self.device == "cpu" else self.kv_cache_mib

    @property
    def runs_ahead(self) -> bool:
        """`async_scheduling`, or its default."""
        return self.device != "cpu" if self.async_scheduling is None else self.async_scheduling

    @property
    def cpu_loras(self) -> int:
        """`max_cpu_loras`, or its default."""
        return self.limits.max_loras if self.limits.max_cpu_loras is None else self.limits.max_cpu_loras

    @property
    def cache_dtype(self) -> str | None:
        """Dtype of a quantised KV cache; None: the model's."""
        return CACHE_DTYPES[self.kv_cache_dtype]

    @property
    def waiting_limit(self) -> int:
        """Requests that may wait."""
        return 4 * self.max_num_seqs if self.limits.max_waiting is None else self.limits.max_waiting

    @property
    def session_limit(self) -> int:
        """Streaming sessions that may be open."""
        return 0

    @property
    def peers_host(self) -> str:
        """Host that peers connect to. Raises: ConfigError when a wildcard host leaves that open."""
        return self.advertise_host or (own_address() if is_wildcard(self.host) else self.host)

    def _own_host(self) -> str | None:
        return self.peers_host

    def _own_worker_id(self) -> str | None:
        return self.worker_id

    def name(self, port: int) -> str:
        """The id of a worker that listens on `port`: the one given, else one that no other machine draws."""
        if self.worker_id is not None:
            return self.worker_id
        host = self.peers_host
        return f"{self.section}-{port}" if is_loopback(host) else f"{self.section}-{host.replace(':', '-')}-{port}"

    def _verify_ranks(self) -> None:
        if self.data_port and self.data_port + self.tensor_parallel_size > 1 << 16:
            raise ConfigError(
                f"data_port is {self.data_port} and tensor_parallel_size is {self.tensor_parallel_size}: each rank listens at "
                "the port after the one before, and 65535 is the last"
            )

    def verify(self) -> None:
        super().verify()
        if self.connector == "nixl" and self.tls_cert_file is not None and not self.nixl_plaintext:
            raise ConfigError(
                "connector is 'nixl', which encrypts nothing, and TLS is configured: nixl_plaintext=true allows it"
            )
        if self.worker_id is not None and not is_worker_id(self.worker_id):
            raise ConfigError(
                f"worker_id is {self.worker_id[:200]!r}, 1 to 128 letters, digits, `_`, `.` or `-` are needed"
            )
        if self.data_parallel_rank is not None and not 0 <= self.data_parallel_rank <= MAX_DATA_PARALLEL_RANK:
            raise ConfigError(
                f"data_parallel_rank is {self.data_parallel_rank}, 0 to {MAX_DATA_PARALLEL_RANK} is needed"
            )
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device is {self.device[:200]!r}, it must be cpu, cuda or cuda:N")
        self._verify_ports("port", "data_port", "attach_port")
        self._verify_least(1, "block_size", "kv_cache_mib", "max_num_batched_tokens", "max_num_seqs")
        self._verify_least(1, "num_threads", "tensor_parallel_size")
        for name, most in _MOST.items():
            self._verify_most(most, name)
        self._verify_lora()
        self._verify_ranks()
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError(f"num_blocks is {self.num_blocks}, at least 2 are needed")
        if self.kv_host_mib and not self.enable_prefix_caching:
            raise ConfigError(
                f"kv_host_mib is {self.kv_host_mib} and enable_prefix_caching is false: without it no block is found again"
            )
        self._verify_disk()
        self._verify_store()
        if self.quantization == "int8" and self.device != "cpu":
            raise ConfigError(
                f"quantization is {self.quantization!r}, which runs on a CPU only, and device is {self.device!r}"
            )
        if self.quantization == "fp8" and self.device == "cpu":
            raise ConfigError(f"quantization is {self.quantization!r}, which runs on a GPU only, and device is 'cpu'")
        self._verify_cache_dtype()
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}, at least 2 are needed: prompt and output")
        for name in self.logits_processors:
            if not name.strip() or self.logits_processors.count(name) > 1:
                raise ConfigError(f"logits_processors has {name!r}, each entry must be a name and stand there once")
        if not self.attention_backend.strip():
            raise ConfigError(
                f"attention_backend is {self.attention_backend!r}, a name is needed: "
                "auto, torch, native, triton, sdpa, or a plug-in's"
            )
        self._verify_seconds("profile_interval_s")
        if self.speculative_config is not None:
            self.speculative_config.verify()
        self._verify_least(0, "kv_host_mib", "profile_steps")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, above 0 and at most 1 is needed"
            )

    def _verify_disk(self) -> None:
        if not self.kv_disk_gib >= 0:
            raise ConfigError(f"kv_disk_gib is {self.kv_disk_gib}, at least 0 is needed")
        if self.kv_disk_path is None and self.kv_disk_gib:
            raise ConfigError(f"kv_disk_gib is {self.kv_disk_gib}, and kv_disk_path is missing: the folder")
        if self.kv_disk_path is None:
            return
        if not self.kv_disk_path.strip():
            raise ConfigError("kv_disk_path is given, but blank")
        if not self.kv_disk_gib:
            raise ConfigError(f"kv_disk_path is {self.kv_disk_path!r}, and kv_disk_gib is missing: its size")
        if not self.kv_host_mib:
            raise ConfigError(
                f"kv_disk_path is {self.kv_disk_path!r}, and kv_host_mib is 0: blocks get to the disk through host memory"
            )

    def _verify_store(self) -> None:
        if self.kv_store is None:
            return
        url = MooncakeUrl.parse(self.kv_store)
        if not (is_loopback(url.master_host) or url.plaintext or self.insecure):
            raise ConfigError(
                f"kv_store names {url.master_host}, which is not loopback, and Mooncake encrypts nothing: plaintext=true in it "
                "is needed, or --insecure"
            )
        if self.kv_disk_path is not None:
            raise ConfigError(
                f"kv_store is {self.kv_store!r} and kv_disk_path is {self.kv_disk_path!r}: blocks are kept in one of them"
            )
        if not self.kv_host_mib:
            raise ConfigError(
                f"kv_store is {self.kv_store!r}, and kv_host_mib is 0: blocks get to the store through host memory"
            )

    @property
    def has_block_store(self) -> bool:
        """True if there is a store of blocks below host memory."""
        return self.kv_disk_path is not None or self.kv_store is not None

    def _verify_cache_dtype(self) -> None:
        if self.kv_cache_dtype == "auto":
            return
        possible = {"device": ("cpu",), "attention_backend": ("auto", "torch"), "kernels": ("auto", "torch")}
        for name, values in possible.items():
            if (value := getattr(self, name)) not in values:
                raise ConfigError(
                    f"kv_cache_dtype is {self.kv_cache_dtype!r} and {name} is {value[:200]!r}: only torch's operations on a "
                    f"CPU read such a cache, {name} must be {' or '.join(values)}"
                )

    def _verify_lora(self) -> None:
        for name, value in (("lora_modules", self.lora_modules), ("lora_dir", self.lora_dir)):
            if value and not self.enable_lora:
                raise ConfigError(f"{name} is {value!s:.200} and enable_lora is false: set enable_lora=true")
        modules = self.lora_modules or {}
        if len(modules) > MAX_ADAPTERS:
            raise ConfigError(f"lora_modules has {len(modules)} adapters, at most {MAX_ADAPTERS} are possible")
        for name, folder in modules.items():
            if not LORA_NAME.fullmatch(name):
                raise ConfigError(f"lora_modules has the name {name[:200]!r}, {LORA_NAME_RULE} are needed")
            if not folder.strip():
                raise ConfigError(f"lora_modules[{name}] is {folder!r}, the adapter's folder is needed")
        if self.lora_dir is not None and not self.lora_dir.strip():
            raise ConfigError(f"lora_dir is {self.lora_dir!r}, a folder is needed")


class PrefillSettings(WorkerSettings, frozen=True, kw_only=True):
    """A prefill worker."""

    section: ClassVar[str] = "prefill"


class DecodeSettings(WorkerSettings, frozen=True, kw_only=True):
    """A decode worker."""

    section: ClassVar[str] = "decode"
    group: ClassVar[str] = "Decode workers"

    stream_interval: int = 1
    """Tokens of a sequence per message to the router, after its first; a message costs both sides more than its tokens do."""

    @property
    def session_limit(self) -> int:
        return self.limits.max_sessions

    def verify(self) -> None:
        super().verify()
        if not 1 <= self.stream_interval <= MAX_STREAM_INTERVAL:
            raise ConfigError(
                f"stream_interval is {self.stream_interval}, 1 to {MAX_STREAM_INTERVAL} tokens are possible"
            )


WORKER_SETTINGS: Mapping[str, type[PrefillSettings] | type[DecodeSettings]] = MappingProxyType(
    {kind.section: kind for kind in (PrefillSettings, DecodeSettings)}
)
"""Role -> the settings of its workers."""
