"""Settings of every service: frozen, units in names, read by one loader.

Order, later wins: defaults, TOML file, `PDSERVE_<NAME>` in the environment, flags. Unknown keys are refused everywhere.
In the TOML file top-level keys hold for every service and the tables [router], [prefill] and [decode] for one.
"""

from __future__ import annotations

import logging
import os
import ssl
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from pdserve.common.deployment_key import is_loopback, resolve_deployment_key
from pdserve.common.errors import ConfigError
from pdserve.common.host_address import is_wildcard, own_address
from pdserve.common.redis_url import parse_redis_url
from pdserve.common.registry import is_namespace, is_worker_id
from pdserve.common.tls import ServerTls, TlsFile, TlsIdentity, load_front, load_identity

log = logging.getLogger(__name__)

ENV_PREFIX = "PDSERVE_"
OTEL_VARIABLES = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "otlp",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "otlp_protocol",
    "OTEL_EXPORTER_OTLP_HEADERS": "otlp_headers",
    "OTEL_SERVICE_NAME": "otel_service_name",
    "OTEL_RESOURCE_ATTRIBUTES": "otel_resource_attributes",
    "OTEL_TRACES_SAMPLER": "otel_traces_sampler",
    "OTEL_TRACES_SAMPLER_ARG": "otel_traces_sampler_arg",
    "OTEL_BSP_SCHEDULE_DELAY": "otel_bsp_schedule_delay_ms",
    "OTEL_SDK_DISABLED": "otel_sdk_disabled",
}
"""OpenTelemetry's variables and the settings that they are; our own variable comes first."""
CLIENT_VARIABLES = ("api_key",)
"""Read by the client commands, so a service that meets them in its environment leaves them alone."""
SchedulingPolicy = Literal["fcfs", "priority"]
_SECRETS = ("deployment_key", "api_keys", "otlp_headers")


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every service has."""

    section: ClassVar[str] = ""

    model: str = "demo"
    """A folder with a Hugging Face checkpoint, or `demo` for the bundled model."""
    host: str = "127.0.0.1"
    """The address to listen on."""
    insecure: bool = False
    """Listen beyond loopback without TLS."""
    tls_cert_file: str | None = None
    """PEM certificate of this service, for its peers; with `tls_key_file` and `tls_ca_file`: mutual TLS between services."""
    tls_key_file: str | None = None
    """Its private key, not encrypted."""
    tls_ca_file: str | None = None
    """PEM certificates of the CA that signed those of all services, this one's too. Whom it signed may do all that a
    router or a worker may: clients need another CA."""
    tls_server_name: str | None = None
    """The name that workers' certificates are made out to, where that is not the host that peers connect to."""
    deployment_key: str | None = None
    """The secret all services share; at least 16 characters."""
    deployment_key_file: str | None = None
    redis: str | None = None
    """redis://[user:password@]host[:port][/db], or rediss:// for TLS: introduces workers and shares what they hold."""
    redis_namespace: str = "pdserve"
    """Begins every key in Redis; deployments that share one Redis need one each."""
    redis_ca_file: str | None = None
    """PEM certificates to trust for rediss://; default: the system's."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otlp: str | None = None
    """The collector for traces: grpc://host:port or http://host:port; None traces nothing."""
    otlp_protocol: Literal["grpc", "http/protobuf"] | None = None
    """What an http:// collector speaks; default: HTTP."""
    otlp_headers: str = ""
    """name=value,name=value: sent to the collector with each batch."""
    otel_service_name: str | None = None
    """This service in traces; default: pdserve- and its role."""
    otel_resource_attributes: str = ""
    """name=value,name=value: attributes of every span of this process."""
    otel_traces_sampler: Literal[
        "always_on",
        "always_off",
        "traceidratio",
        "parentbased_always_on",
        "parentbased_always_off",
        "parentbased_traceidratio",
    ] = "parentbased_always_on"
    otel_traces_sampler_arg: float = 1.0
    """The ratio, for samplers that take one."""
    otel_bsp_schedule_delay_ms: float = 2000.0
    """How long finished spans wait for others, to be exported together."""
    otel_sdk_disabled: bool = False
    """Trace nothing, whatever `otlp` says."""

    def addresses(self) -> list[str]:
        """Every host this service listens on or is told to connect to."""
        return [self.host]

    def key(self) -> tuple[bytes, bool]:
        """The deployment key, and whether it is the public development key. Raises: ConfigError."""
        key_file = Path(self.deployment_key_file) if self.deployment_key_file else None
        return resolve_deployment_key(
            self.deployment_key, key_file, self.addresses(), redis_given=self.redis is not None
        )

    def tls(self) -> TlsIdentity | None:
        """Who this service is to other services; None without TLS. Reads the files. Raises: ConfigError."""
        certificate, key, ca = (_tls_file(self, name) for name in ("tls_cert_file", "tls_key_file", "tls_ca_file"))
        if certificate and key and ca:
            return load_identity(certificate, key, ca, server_name=self.tls_server_name, own_host=self._own_host())
        _verify_none_given(self, "tls_cert_file", "tls_key_file", "tls_ca_file", "tls_server_name")
        return None

    def _own_host(self) -> str | None:
        """What other services connect to; None where they do not. Raises: ConfigError."""
        return None

    def verify(self) -> None:
        """Raises: ConfigError naming the setting, its value and what it should be."""
        self.tls()
        self._verify_listening()
        self._verify_redis()
        if not 1 <= self.otel_bsp_schedule_delay_ms <= 60_000:
            raise ConfigError(f"otel_bsp_schedule_delay_ms is {self.otel_bsp_schedule_delay_ms}, 1 to 60000 is needed")
        if not 0 <= self.otel_traces_sampler_arg <= 1:
            raise ConfigError(f"otel_traces_sampler_arg is {self.otel_traces_sampler_arg}, 0 to 1 is needed")

    def _verify_listening(self) -> None:
        if not is_loopback(self.host) and not self.insecure and self.tls_cert_file is None:
            raise ConfigError(
                f"host is {self.host!r}, which is not loopback: tls_cert_file, tls_key_file and tls_ca_file are needed, "
                "or --insecure"
            )

    def _verify_redis(self) -> None:
        if self.redis is not None:
            parse_redis_url(self.redis)
        if not is_namespace(self.redis_namespace):
            raise ConfigError(
                f"redis_namespace is {self.redis_namespace!r}, 1 to 64 letters, digits, `_`, `.` or `-` are needed"
            )
        if self.redis_ca_file is not None:
            try:
                ssl.create_default_context(cafile=self.redis_ca_file)
            except OSError as error:
                raise ConfigError(f"redis_ca_file {self.redis_ca_file}: {error.strerror or error}") from error


class WorkerSettings(ServiceSettings, frozen=True, kw_only=True):
    """A prefill or decode worker."""

    port: int = 0
    """gRPC; 0 draws a free one."""
    data_port: int = 0
    """KV blocks over TCP; 0 draws a free one."""
    metrics_port: int = 0
    """HTTP for `/metrics` and `/health`; 0 draws a free one."""
    metrics_host: str | None = None
    """Where they are served, in the clear, where it is not `host`; with TLS and a host beyond loopback: 127.0.0.1."""
    advertise_host: str | None = None
    """What peers should connect to, where it is not `host`; default for a wildcard `host`: this machine's address."""
    worker_id: str | None = None
    """Names this worker; default: role, host beyond loopback, port."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`. On a GPU the pool needs as much host memory again: blocks are staged there."""
    block_size: int = 16
    """Tokens in a KV block; equal on all workers."""
    num_blocks: int | None = None
    """KV blocks in the pool; default: what `kv_cache_mib` holds."""
    kv_cache_mib: int = 256
    max_model_len: int | None = None
    """Tokens of prompt and output together; default: the model's own limit."""
    max_num_batched_tokens: int = 1024
    """Tokens computed in one step, at most."""
    max_num_seqs: int = 64
    """Sequences in one step, at most."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """`priority`: requests with a lower `priority` first, equals in order of arrival; `fcfs`: order of arrival alone."""
    long_prefill_token_threshold: int = 0
    """Tokens of one prompt computed in a step, at most; 0: no limit but `max_num_batched_tokens`."""
    num_threads: int = 1
    cpu_core: int | None = None
    """Pin the worker's computing threads to this core (and the following `num_threads - 1`)."""
    connector: Literal["auto", "nixl", "tcp"] = "auto"
    """How KV blocks move: `auto` and `nixl` fall back to TCP at run time, `nixl` refuses to start without NIXL."""
    nixl_plaintext: bool = False
    """With TLS: KV blocks may move over NIXL, which encrypts nothing. For fabrics that nobody else reaches."""
    max_local_prefill_tokens: int | None = None
    """Longest uncached prompt that decode prefills itself; default: no limit."""
    run_ahead_share: float = 0.5
    """Part of the pool in which prefill may compute transfers that nobody wants yet."""
    attach_timeout_s: float = 10.0
    lease_grace_s: float = 3.0
    """How long a source keeps blocks after the control stream broke."""
    lease_max_s: float = 600.0
    drain_s: float = 30.0

    def addresses(self) -> list[str]:
        return [self.host, *(host for host in (self.advertise_host, self.metrics_host) if host)]

    @property
    def peers_host(self) -> str:
        """What peers should connect to. Raises: ConfigError when a wildcard host leaves that open."""
        return self.advertise_host or (own_address() if is_wildcard(self.host) else self.host)

    @property
    def metrics_at(self) -> str:
        """The host for `/metrics` and `/health`, which know no TLS: beyond loopback only where a setting says so."""
        hides = self.tls_cert_file is not None and not self.insecure and not is_loopback(self.host)
        return self.metrics_host or ("127.0.0.1" if hides else self.host)

    def _own_host(self) -> str | None:
        return self.peers_host

    def name(self, port: int) -> str:
        """The id of a worker that listens on `port`: the one given, else one that no other machine draws."""
        if self.worker_id is not None:
            return self.worker_id
        host = self.peers_host
        return f"{self.section}-{port}" if is_loopback(host) else f"{self.section}-{host.replace(':', '-')}-{port}"

    def verify(self) -> None:
        super().verify()
        if not 0 <= self.metrics_port < 65536:
            raise ConfigError(f"metrics_port is {self.metrics_port}, 0 to 65535 is needed")
        may_listen = self.insecure or self.tls_cert_file is not None
        if self.metrics_host is not None and not is_loopback(self.metrics_host) and not may_listen:
            raise ConfigError(f"metrics_host is {self.metrics_host!r}, which is not loopback: --insecure is needed")
        if self.connector == "nixl" and self.tls_cert_file is not None and not self.nixl_plaintext:
            raise ConfigError(
                "connector is 'nixl', which encrypts nothing, and TLS is configured: nixl_plaintext=true allows it"
            )
        if self.redis is not None and self.worker_id is not None and not is_worker_id(self.worker_id):
            raise ConfigError(
                f"worker_id is {self.worker_id!r}, with redis 1 to 128 letters, digits, `_`, `.` or `-` are needed"
            )
        for name in ("block_size", "kv_cache_mib", "max_num_batched_tokens", "max_num_seqs", "num_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, at least 1 is needed")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError(f"num_blocks is {self.num_blocks}, at least 2 are needed")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}, at least 2 are needed: prompt and output")
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold}, at least 0 is needed"
            )
        if not 0 < self.run_ahead_share <= 1:
            raise ConfigError(f"run_ahead_share is {self.run_ahead_share}, above 0 and at most 1 is needed")
        for name in ("attach_timeout_s", "lease_grace_s", "lease_max_s", "drain_s"):
            _verify_seconds(name, getattr(self, name))


class PrefillSettings(WorkerSettings, frozen=True, kw_only=True):
    section: ClassVar[str] = "prefill"


class DecodeSettings(WorkerSettings, frozen=True, kw_only=True):
    section: ClassVar[str] = "decode"

    max_sessions: int = 64
    """Streaming sessions open at once; more are refused."""
    session_idle_timeout_s: float = 60.0
    """How long a session waits for its client's next turn before it ends."""

    def verify(self) -> None:
        super().verify()
        if self.max_sessions < 0:
            raise ConfigError(f"max_sessions is {self.max_sessions}, at least 0 is needed")
        if not 0 < self.session_idle_timeout_s < float("inf"):
            raise ConfigError(
                f"session_idle_timeout_s is {self.session_idle_timeout_s}, a number of seconds above 0 is needed"
            )


class RouterSettings(ServiceSettings, frozen=True, kw_only=True):
    """The router and its two front ends."""

    section: ClassVar[str] = "router"

    port: int = 8000
    """OpenAI HTTP."""
    grpc_port: int = 50051
    prefill: tuple[str, ...] = ()
    """host:port of prefill workers."""
    decode: tuple[str, ...] = ()
    """host:port of decode workers."""
    model_name: str | None = None
    """What clients call the model; default: the folder's name."""
    local_prefill: Literal["never", "auto", "always"] = "auto"
    """Whether decode may prefill at all; `auto`: when it is sooner, no prefill worker lives, or the transfer failed."""
    policy: Literal["kv_aware", "least_loaded", "round_robin"] = "kv_aware"
    """How a worker is chosen among those that can serve a request."""
    on_kv_failure: Literal["local", "remote", "fail"] = "local"
    """What the next attempt is after a transfer failed."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """In what order requests get a place, as on the workers: by `priority`, or by arrival alone."""
    max_attempts: int = 3
    request_timeout_s: float = 600.0
    """Deadline of a request whose client gave none."""
    max_queued_requests: int = 1024
    """Requests that wait in the router for a place; more are refused at once."""
    max_running_requests: int | None = None
    """Requests that workers serve at once; default: the sequences and prompt blocks that the live ones can hold."""
    queue_timeout_s: float = 30.0
    """How long a request waits for a place; refused at once when it would be longer."""
    max_requests_per_key: int | None = None
    """Requests of one API key in the router at once; default: no limit."""
    max_unread_bytes: int = 1 << 20
    """Text that a client has not read, at most, before its request is cancelled."""
    api_keys: tuple[str, ...] = ()
    """When given, both front ends want one of them as bearer token."""
    front_tls_cert_file: str | None = None
    """PEM certificate of both front ends, for clients; needs `front_tls_key_file`."""
    front_tls_key_file: str | None = None
    front_tls_client_ca_file: str | None = None
    """PEM certificates of the CA that signed those of clients; when given, clients must show one."""
    drain_s: float = 30.0

    def addresses(self) -> list[str]:
        return [self.host, *self.prefill, *self.decode]

    def front_tls(self) -> ServerTls | None:
        """What both front ends show to clients; None without TLS. Reads the files. Raises: ConfigError."""
        certificate, key = (_tls_file(self, name) for name in ("front_tls_cert_file", "front_tls_key_file"))
        if certificate and key:
            return load_front(certificate, key, _tls_file(self, "front_tls_client_ca_file"))
        _verify_none_given(self, "front_tls_cert_file", "front_tls_key_file", "front_tls_client_ca_file")
        return None

    def _verify_listening(self) -> None:
        self.front_tls()
        if not is_loopback(self.host) and not self.insecure and self.front_tls_cert_file is None:
            raise ConfigError(
                f"host is {self.host!r}, which is not loopback: front_tls_cert_file and front_tls_key_file are needed, "
                "or --insecure, behind a proxy with TLS"
            )

    def verify(self) -> None:
        super().verify()
        for name in ("max_attempts", "max_queued_requests", "max_unread_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, at least 1 is needed")
        for name in ("max_running_requests", "max_requests_per_key"):
            if (limit := getattr(self, name)) is not None and limit < 1:
                raise ConfigError(f"{name} is {limit}, at least 1 is needed")
        for name in ("request_timeout_s", "queue_timeout_s", "drain_s"):
            _verify_seconds(name, getattr(self, name))
        for field in ("prefill", "decode"):
            for address in getattr(self, field):
                _verify_address(field, address)


def _tls_file(settings: ServiceSettings, name: str) -> TlsFile | None:
    path: str | None = getattr(settings, name)
    return TlsFile(name, path) if path is not None else None


def _verify_none_given(settings: ServiceSettings, *names: str) -> None:
    """For settings that work only together, when not all that are needed were given."""
    given = [name for name in names if getattr(settings, name) is not None]
    missing = [
        name for name in names if name not in given and name.endswith(("_cert_file", "_key_file", "tls_ca_file"))
    ]
    if given:
        raise ConfigError(f"{given[0]} is given, so {' and '.join(missing)} must be, too")


def _verify_seconds(field: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{field} is {value}, a number of seconds from 0 on is needed")


def _verify_address(field: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(f"{field} is {address!r}, host:port is needed")


SERVICES: tuple[type[ServiceSettings], ...] = (RouterSettings, PrefillSettings, DecodeSettings)
S = TypeVar("S", bound=ServiceSettings)


def load_settings(
    kind: type[S],
    *,
    flags: Mapping[str, Any] | None = None,
    toml: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> S:
    """Settings of one service. flags: those given; None values count as not given.

    Raises: ConfigError naming the key, its source and what is wrong.
    """
    merged: dict[str, Any] = {}
    for source, values in (
        (f"{toml}", _from_toml(kind, toml)),
        ("environment", _from_environ(kind, os.environ if environ is None else environ)),
        ("flags", {name: value for name, value in (flags or {}).items() if value is not None}),
    ):
        try:
            msgspec.convert(values, kind, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"settings from {source}: {error}") from error
        merged |= values
    settings = msgspec.convert(merged, kind, strict=False)
    settings.verify()
    return settings


def describe(settings: ServiceSettings) -> str:
    """The resolved settings for the log, one line, secrets left out."""
    shown = msgspec.structs.asdict(settings)
    if settings.redis is not None:
        shown["redis"] = parse_redis_url(settings.redis)
    return " ".join(f"{name}={'***' if name in _SECRETS and value else value}" for name, value in shown.items())


def _from_toml(kind: type[ServiceSettings], path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    sections = {service.section: service for service in SERVICES}
    known = {name for service in SERVICES for name in service.__struct_fields__}
    for key, value in content.items():
        if key not in known and not (key in sections and isinstance(value, dict)):
            raise ConfigError(f"{path}: unknown key {key!r}")
        if key in sections and isinstance(value, dict):
            for name in value:
                if name not in sections[key].__struct_fields__:
                    raise ConfigError(f"{path}: unknown key {name!r} in [{key}]")
    common = {
        key: value
        for key, value in content.items()
        if key in kind.__struct_fields__ and not (key in sections and isinstance(value, dict))
    }
    own = content.get(kind.section, {})
    return common | (own if isinstance(own, dict) else {})


def _from_environ(kind: type[ServiceSettings], environ: Mapping[str, str]) -> dict[str, Any]:
    known = {name for service in SERVICES for name in service.__struct_fields__}
    values: dict[str, Any] = {}
    for variable, name in OTEL_VARIABLES.items():
        # set but empty means unset, and any word but "true" means false: OpenTelemetry's rules
        if text := environ.get(variable, "").strip():
            values[name] = text.lower() == "true" if name == "otel_sdk_disabled" else text
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in CLIENT_VARIABLES:
            continue
        if name not in known:
            raise ConfigError(f"environment: unknown setting {variable}")
        if name in kind.__struct_fields__:
            is_list = name in ("prefill", "decode", "api_keys")
            values[name] = [part for part in map(str.strip, text.split(",")) if part] if is_list else text
    return values
