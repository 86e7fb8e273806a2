"""`ServiceSettings`: settings that workers and router share. Frozen, units in names; `common/settings/settings.py` reads them."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from pdserve.common.errors import ConfigError
from pdserve.common.registry.redis_url import parse_redis_url
from pdserve.common.registry.registry import is_namespace
from pdserve.common.security.deployment_key import DeploymentKey, is_loopback, resolve_deployment_key
from pdserve.common.security.tls import TlsFile, TlsIdentity, load_identity
from pdserve.common.security.tls_roles import ServiceRole
from pdserve.common.settings.checked import Checked
from pdserve.common.settings.limits import ServiceLimits

SchedulingPolicy = Literal["fcfs", "priority"]


class ServiceSettings(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of every service."""

    section: ClassVar[str] = ""
    """The service's table in a file; empty for settings that several services share."""
    group: ClassVar[str] = "Every service"
    """Heading of the struct's own settings in documents and help."""

    model: str = "demo"
    """A folder with a Hugging Face checkpoint, a GGUF file, `ORG/NAME` of the hub, or one that comes with pdserve: `demo`,
    `demo-image` for pictures, or `smollm2` where its package is installed."""
    host: str = "127.0.0.1"
    """The address to listen on."""
    metrics_port: int = 0
    """HTTP for `/metrics`, and a worker's `/health`; 0 draws a free one."""
    metrics_host: str | None = None
    """Address of `metrics_port`, unencrypted, if it is not `host`; with TLS and a host beyond loopback: 127.0.0.1."""
    insecure: bool = False
    """Listen and connect beyond loopback without TLS."""
    tls_cert_file: str | None = None
    """PEM certificate of this service, for its peers; with `tls_key_file` and `tls_ca_file`: mutual TLS between services."""
    tls_key_file: str | None = None
    """The certificate's private key, not encrypted."""
    tls_ca_file: str | None = None
    """PEM certificates of the CA that signed those of all services, this one's too; clients need another CA."""
    tls_roles: Literal["required", "ignore"] = "required"
    """`required`: certificates name the role of a service; `ignore`: any certificate allows all that a router or a worker
    may."""
    tls_server_name: str | None = None
    """The name that workers' certificates are made out to, where that is not the host that peers connect to."""
    deployment_key: str | None = None
    """The secret all services share; at least 16 characters, 6 of them different."""
    deployment_key_file: str | None = None
    """File with `deployment_key`; mode 0600."""
    redis: str | None = None
    """`redis://[user:password@]host[:port][/db]`, or `rediss://` for TLS: registry of workers and of their cached blocks."""
    redis_namespace: str = "pdserve"
    """Begins every key in Redis; deployments that share one Redis need one each."""
    redis_ca_file: str | None = None
    """PEM certificates to trust for rediss://; default: the system's."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """Order of requests: `fcfs` by arrival; `priority` lower `priority` first, equals by arrival. Routers grant places by it,
    workers fill steps."""
    enable_prompt_embeds: bool = False
    """Take prompts as embeddings in place of token ids, which any client may then choose freely. See
    docs/parameters.md#prompt-embeddings."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of the lines that are logged."""
    log_format: Literal["text", "json"] = "text"
    """`json`: one JSON object per line of the log."""
    drain_s: float = 30.0
    """Time that running streams get to end when the service stops, seconds."""
    limits: ServiceLimits = ServiceLimits()

    def addresses(self) -> list[str]:
        """Every host that this service listens on or connects to by its settings."""
        return [self.host]

    def key(self) -> tuple[DeploymentKey, bool]:
        """The deployment key, and whether it is the public development key. Raises: ConfigError."""
        key_file = None if self.deployment_key_file is None else Path(self.deployment_key_file)
        return resolve_deployment_key(
            self.deployment_key, key_file, self.addresses(), redis_given=self.redis is not None
        )

    def tls(self) -> TlsIdentity | None:
        """The identity of this service towards others; None without TLS. Reads the files. Raises: ConfigError."""
        certificate, key, ca = (self._tls_file(name) for name in ("tls_cert_file", "tls_key_file", "tls_ca_file"))
        if certificate and key and ca:
            return load_identity(
                certificate,
                key,
                ca,
                server_name=self.tls_server_name,
                own_host=self._own_host(),
                role=ServiceRole(self.section) if self.tls_roles == "required" else None,
                worker_id=self._own_worker_id(),
            )
        self._verify_none_given("tls_cert_file", "tls_key_file", "tls_ca_file", "tls_server_name")
        return None

    def _own_worker_id(self) -> str | None:
        """The worker id that a certificate for one worker must name; None: it must name none."""
        return None

    def _own_host(self) -> str | None:
        """The host that other services connect to; None if they do not. Raises: ConfigError."""
        return None

    def verify(self) -> None:
        """Raises: ConfigError naming the setting, its value and the allowed values."""
        self.tls()
        self._verify_listening()
        self._verify_metrics()
        self._verify_redis()
        self._verify_connecting()
        self._verify_seconds("drain_s")
        self.limits.verify()

    def _verify_listening(self) -> None:
        if not is_loopback(self.host) and not self.insecure and self.tls_cert_file is None:
            raise ConfigError(
                f"host is {self.host!r}, which is not loopback: tls_cert_file, tls_key_file and tls_ca_file are needed, "
                "or --insecure"
            )

    @property
    def _listens_with_tls(self) -> bool:
        """True if `host` is listened on with TLS."""
        return self.tls_cert_file is not None

    @property
    def metrics_at(self) -> str:
        """Host for `metrics_port`, which has no TLS: beyond loopback only if a setting allows it."""
        hides = self._listens_with_tls and not self.insecure and not is_loopback(self.host)
        return self.metrics_host or ("127.0.0.1" if hides else self.host)

    def _verify_metrics(self) -> None:
        """Raises: ConfigError."""
        self._verify_ports("metrics_port")
        may_listen = self.insecure or self._listens_with_tls
        if self.metrics_host is not None and not is_loopback(self.metrics_host) and not may_listen:
            raise ConfigError(f"metrics_host is {self.metrics_host!r}, which is not loopback: --insecure is needed")

    def _verify_connecting(self) -> None:
        """Require TLS for connections to other machines, unless `insecure` is set. Raises: ConfigError."""
        if self.insecure:
            return
        for setting, address, remedy in self._clear_text_addresses():
            if not is_loopback(address):
                raise ConfigError(
                    f"{setting} names {address}, which is not loopback, without TLS: {remedy} is needed, or --insecure"
                )

    def _clear_text_addresses(self) -> Iterator[tuple[str, str, str]]:
        """(setting, host or host:port, what would bring TLS) of everything this service connects to without TLS."""
        if self.redis is not None and not (redis := parse_redis_url(self.redis)).tls:
            yield "redis", redis.host, "rediss://"

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

    def _tls_file(self, name: str) -> TlsFile | None:
        """The file that this setting names, if it is given."""
        path: str | None = getattr(self, name)
        return TlsFile(name, path) if path is not None else None

    def _verify_none_given(self, *names: str) -> None:
        """For settings that work only together, when not all that are needed were given. Raises: ConfigError."""
        given = [name for name in names if getattr(self, name) is not None]
        missing = [
            name for name in names if name not in given and name.endswith(("_cert_file", "_key_file", "tls_ca_file"))
        ]
        if given:
            raise ConfigError(f"{given[0]} is given, so {' and '.join(missing)} must be, too")
