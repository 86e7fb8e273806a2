"""Settings of every service: frozen, units in names, read by one loader.

Order, later wins: defaults, TOML file, `PDSERVE_<NAME>` in the environment, flags. Unknown keys are refused everywhere.
In the TOML file top-level keys hold for every service and the tables [router], [prefill] and [decode] for one.
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from pdserve.common.deployment_key import is_loopback, resolve_deployment_key
from pdserve.common.errors import ConfigError

log = logging.getLogger(__name__)

ENV_PREFIX = "PDSERVE_"
CLIENT_VARIABLES = ("api_key",)
"""Read by the client commands, so a service that meets them in its environment leaves them alone."""
_SECRETS = ("deployment_key", "api_keys")


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every service has."""

    section: ClassVar[str] = ""

    model: str = "demo"
    """A folder with a Hugging Face checkpoint, or `demo` for the bundled model."""
    host: str = "127.0.0.1"
    """The address to listen on."""
    insecure: bool = False
    """Listen beyond loopback without TLS."""
    deployment_key: str | None = None
    """The secret all services share; at least 16 characters."""
    deployment_key_file: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def addresses(self) -> list[str]:
        """Every host this service listens on or is told to connect to."""
        return [self.host]

    def key(self) -> tuple[bytes, bool]:
        """The deployment key, and whether it is the public development key. Raises: ConfigError."""
        key_file = Path(self.deployment_key_file) if self.deployment_key_file else None
        return resolve_deployment_key(self.deployment_key, key_file, self.addresses())

    def verify(self) -> None:
        """Raises: ConfigError naming the setting, its value and what it should be."""
        if not is_loopback(self.host) and not self.insecure:
            raise ConfigError(
                f"host is {self.host!r}, which is not loopback: TLS is not configured, so --insecure is needed"
            )


class WorkerSettings(ServiceSettings, frozen=True, kw_only=True):
    """A prefill or decode worker."""

    port: int = 0
    """gRPC; 0 draws a free one."""
    data_port: int = 0
    """KV blocks over TCP; 0 draws a free one."""
    advertise_host: str | None = None
    """What peers should connect to, where it is not `host`."""
    worker_id: str | None = None
    """Names this worker; default: role and port."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
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
    num_threads: int = 1
    cpu_core: int | None = None
    """Pin the worker's computing threads to this core (and the following `num_threads - 1`)."""
    connector: Literal["auto", "tcp"] = "auto"
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
        return [self.host, *([self.advertise_host] if self.advertise_host else [])]

    def verify(self) -> None:
        super().verify()
        for name in ("block_size", "kv_cache_mib", "max_num_batched_tokens", "max_num_seqs", "num_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, at least 1 is needed")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError(f"num_blocks is {self.num_blocks}, at least 2 are needed")
        if not 0 < self.run_ahead_share <= 1:
            raise ConfigError(f"run_ahead_share is {self.run_ahead_share}, above 0 and at most 1 is needed")
        for name in ("attach_timeout_s", "lease_grace_s", "lease_max_s", "drain_s"):
            _verify_seconds(name, getattr(self, name))


class PrefillSettings(WorkerSettings, frozen=True, kw_only=True):
    section: ClassVar[str] = "prefill"


class DecodeSettings(WorkerSettings, frozen=True, kw_only=True):
    section: ClassVar[str] = "decode"


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
    """Whether decode may prefill at all; `auto`: when no prefill worker lives, or the transfer failed."""
    on_kv_failure: Literal["local", "remote", "fail"] = "local"
    """What the next attempt is after a transfer failed."""
    max_attempts: int = 3
    request_timeout_s: float = 600.0
    """Deadline of a request whose client gave none."""
    max_queued_requests: int = 1024
    """Requests in the router at once; more are refused."""
    max_unread_bytes: int = 1 << 20
    """Text that a client has not read, at most, before its request is cancelled."""
    api_keys: tuple[str, ...] = ()
    """When given, both front ends want one of them as bearer token."""
    drain_s: float = 30.0

    def addresses(self) -> list[str]:
        return [self.host, *self.prefill, *self.decode]

    def verify(self) -> None:
        super().verify()
        for name in ("max_attempts", "max_queued_requests", "max_unread_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, at least 1 is needed")
        for name in ("request_timeout_s", "drain_s"):
            _verify_seconds(name, getattr(self, name))
        for field in ("prefill", "decode"):
            for address in getattr(self, field):
                _verify_address(field, address)


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
