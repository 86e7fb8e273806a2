"""`RouterSettings`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from pdserve.common.address.media_domains import MediaDomains
from pdserve.common.errors import ConfigError
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.security.tls import ServerTls, load_front
from pdserve.common.settings.api_key_file import is_name, read_keys, verify_plain_keys
from pdserve.common.settings.limits import MOST_MIB, RouterLimits
from pdserve.common.settings.service_settings import ServiceSettings

_MAX_FLUSH_MS = 1000
_MAX_NAME_CHARS = 256
_REASONING_PARSER = re.compile(r"[a-z0-9_]{1,64}|<[^<>\s]{1,64}>|\[[^\[\]\s]{1,64}\]")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]+")


class RouterSettings(ServiceSettings, frozen=True, kw_only=True):
    """The router and its two front ends."""

    section: ClassVar[str] = "router"
    group: ClassVar[str] = "Router"

    port: int = 8000
    """OpenAI HTTP."""
    grpc_port: int = 50051
    """gRPC for clients."""
    reuse_port: bool = False
    """Let other routers of this host listen on `port` and `grpc_port`, too: the kernel divides new connections among them. See
    docs/deploy.md#several-routers-on-one-host."""
    prefill: tuple[str, ...] = ()
    """host:port of prefill workers."""
    decode: tuple[str, ...] = ()
    """host:port of decode workers."""
    served_model_name: tuple[str, ...] | None = None
    """Names of the model for clients, of which responses have the first; default: `ORG/NAME` of the hub, or the folder's name."""
    local_prefill: Literal["never", "auto", "always"] = "auto"
    """When decode may prefill; `auto`: when it is faster, without a prefill worker, or after a failed transfer."""
    policy: Literal["kv_aware", "least_loaded", "round_robin"] = "kv_aware"
    """The rule that chooses among the workers that can serve a request: `kv_aware` by cached prefix and load."""
    block_moves: Literal["never", "auto", "always"] = "auto"
    """When the worker that computes a prompt reads cached blocks from another one; `auto`: when that is faster."""
    rebalance: Literal["never", "auto", "always"] = "never"
    """When running sequences move to another decode worker that does not drain; `auto`: when that makes the slowest streams faster;
    `always`: one of them every 20 ms, for tests."""
    role_switch: Literal["never", "auto"] = "never"
    """When a router has a worker take the other role; `auto`: when prompts wait for long and decode has room, or the other way
    round. See docs/architecture.md#changes-of-role."""
    on_kv_failure: Literal["local", "remote", "fail"] = "local"
    """After a failed transfer: prefill on decode, on another prefill worker (`remote`), or `fail`."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts from which images of chats are fetched by URL: `host`, `host:port`, or an IP address with a port, which alone may be
    a private one; default: none, and only data URLs are taken. See docs/images.md#images-by-url."""
    trust_client_trace_headers: bool | None = None
    """Adopt clients' `traceparent`, with its sampling, or only link to it; default: adopt that of clients that show an
    API key or a certificate, and of all where neither is asked for on loopback."""
    stream_flush_ms: int = 0
    """Least milliseconds between two writes to a client's stream, 1000 at most: output of the meantime is written together. The
    first output and the end of a stream are not delayed."""
    api_keys: tuple[str, ...] | None = None
    """If given, both front ends require one as bearer token; at least 16 characters each; each is a tenant of its own."""
    api_keys_file: str | None = None
    """TOML file with the hashes of API keys, their tenants, roles and limits, in place of `api_keys`; read again when it
    changes. See docs/tenants.md."""
    no_auth: bool = False
    """Listen beyond loopback though clients need neither an API key nor a certificate."""
    audit_log: str | None = None
    """Target of one JSON line per client request: a path, or `stderr`; default: none."""
    record: str | None = None
    """File for a record of the traffic without content: one JSON line per prompt, which `pdserve bench --trace` replays; default:
    none. See docs/capacity.md."""
    record_mib: int = 64
    """Size at which the file of `record` becomes FILE.1, and that FILE.2 and so on (`max_record_files`), MiB."""
    shared_prefix_cache: tuple[str, ...] = ()
    """Tenants that share cached prefixes: groups of their names, joined by `+`, or `*` for all; default: none do. See
    docs/tenants.md."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the HTTP API from a browser, `scheme://host[:port]`, or `*` for all; default: none."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """Fields of requests that the router does not know, which may ask for another text: `refuse` them by name, or `ignore` them
    with one log line per name."""
    parse_special: bool = True
    """Parse special tokens in clients' chat messages; False: they are plain text."""
    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral", "pythonic"] = "auto"
    """Form of calls of tools in answers; `auto`: by the chat template; `none`: they remain text. See
    docs/parameters.md#tools."""
    reasoning_parser: str = "auto"
    """Tags of reasoning in answers: a family's name, or the opening tag itself, as `<think>`; `auto`: by the chat template;
    `none`: reasoning remains text. See docs/openai.md#reasoning."""
    front_tls_cert_file: str | None = None
    """PEM certificate of both front ends, for clients; needs `front_tls_key_file`."""
    front_tls_key_file: str | None = None
    """The private key of `front_tls_cert_file`, not encrypted."""
    front_tls_client_ca_file: str | None = None
    """PEM certificates of the CA that signed those of clients; when given, clients must show one."""
    limits: RouterLimits = RouterLimits()

    def addresses(self) -> list[str]:
        return [self.host, *self.prefill, *self.decode]

    @property
    def asks_for_keys(self) -> bool:
        """True if clients need an API key."""
        return self.api_keys is not None or self.api_keys_file is not None

    def cache_groups(self) -> dict[str, str]:
        """Tenant -> name of the group that shares its cached prefixes; "*" for all tenants. Raises: ConfigError."""
        groups: dict[str, str] = {}
        for group in self.shared_prefix_cache:
            for tenant in group.split("+"):
                if group != "*" and not is_name(tenant):
                    raise ConfigError(
                        f"shared_prefix_cache has {group!r}: names of tenants, joined by +, or * for all are needed"
                    )
                if tenant in groups:
                    raise ConfigError(f"shared_prefix_cache names {tenant!r} more than once")
                groups[tenant] = group
        if "*" in groups and len(groups) > 1:
            raise ConfigError("shared_prefix_cache has *, which is all tenants, next to other groups")
        return groups

    def front_tls(self) -> ServerTls | None:
        """Certificate of both front ends; None without TLS. Reads the files. Raises: ConfigError."""
        certificate, key = (self._tls_file(name) for name in ("front_tls_cert_file", "front_tls_key_file"))
        if certificate and key:
            return load_front(certificate, key, self._tls_file("front_tls_client_ca_file"))
        self._verify_none_given("front_tls_cert_file", "front_tls_key_file", "front_tls_client_ca_file")
        return None

    def trusts_trace_headers(self) -> bool | None:
        """True if every client's trace context is trusted; None: that of clients with an API key."""
        if self.trust_client_trace_headers is not None:
            return self.trust_client_trace_headers
        if self.front_tls_client_ca_file is not None:
            return True
        return None if self.asks_for_keys else is_loopback(self.host)

    @property
    def _listens_with_tls(self) -> bool:
        return self.front_tls_cert_file is not None

    def _verify_listening(self) -> None:
        self.front_tls()
        if not is_loopback(self.host) and not self.insecure and not self._listens_with_tls:
            raise ConfigError(
                f"host is {self.host!r}, which is not loopback: front_tls_cert_file and front_tls_key_file are needed, "
                "or --insecure, behind a proxy with TLS"
            )
        authenticates = self.asks_for_keys or self.front_tls_client_ca_file is not None
        if not is_loopback(self.host) and not authenticates and not self.no_auth:
            raise ConfigError(
                f"host is {self.host!r}, which is not loopback, and clients need no API key: api_keys_file or api_keys "
                "is needed, or --no-auth, with which every client that reaches the router is served"
            )

    def _clear_text_addresses(self) -> Iterator[tuple[str, str, str]]:
        yield from super()._clear_text_addresses()
        if self.tls_cert_file is None:
            for setting in ("prefill", "decode"):
                for address in getattr(self, setting):
                    yield setting, address, "tls_cert_file with tls_key_file and tls_ca_file"

    def verify(self) -> None:
        super().verify()
        self._verify_ports("port", "grpc_port")
        self._verify_least(0, "stream_flush_ms")
        if self.stream_flush_ms > _MAX_FLUSH_MS:
            raise ConfigError(f"stream_flush_ms is {self.stream_flush_ms}, at most {_MAX_FLUSH_MS} is possible")
        self.media_domains()
        self._verify_keys()
        self._verify_names()
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins has {origin[:200]!r}, scheme://host[:port] in lower case or * is needed"
                )
        if not _REASONING_PARSER.fullmatch(self.reasoning_parser):
            raise ConfigError(
                f"reasoning_parser is {self.reasoning_parser!r:.80}: auto, none, a family's name, or an opening tag of at "
                "most 64 characters in angle or square brackets is needed"
            )
        if self.audit_log is not None and not self.audit_log.strip():
            raise ConfigError("audit_log is given but empty: a path or stderr is needed, or leave the setting out")
        self._verify_record()
        self.cache_groups()
        for field in ("prefill", "decode"):
            for address in getattr(self, field):
                _verify_address(field, address)

    def _verify_record(self) -> None:
        """Raises: ConfigError."""
        self._verify_between(1, MOST_MIB, "record_mib")
        if self.record is None:
            return
        if not self.record.strip():
            raise ConfigError("record is given but empty: a path is needed, or leave the setting out")
        if self.audit_log is not None and Path(self.record).absolute() == Path(self.audit_log).absolute():
            raise ConfigError(f"record and audit_log are both {self.record}: each needs a file of its own")

    def _verify_names(self) -> None:
        """Raises: ConfigError."""
        if self.served_model_name == ():
            raise ConfigError("served_model_name is given but empty: give a name, or leave the setting out")
        names = self.served_model_name or ()
        for name in names:
            if not name.strip() or not name.isprintable() or len(name) > _MAX_NAME_CHARS:
                raise ConfigError(
                    f"served_model_name has {name[:_MAX_NAME_CHARS]!r}, 1 to {_MAX_NAME_CHARS} printable characters are needed"
                )
            if names.count(name) > 1:
                raise ConfigError(f"served_model_name has {name!r} more than once")

    def _verify_keys(self) -> None:
        """Raises: ConfigError. Keys that are given but cannot be used must never read as none."""
        if self.api_keys is not None:
            verify_plain_keys("api_keys", self.api_keys)
        if self.api_keys_file is not None:
            if not self.api_keys_file.strip():
                raise ConfigError("api_keys_file is given but empty: name a file, or leave the setting out")
            if self.api_keys is not None:
                raise ConfigError("api_keys and api_keys_file are both given: put the hashes of all keys into the file")
            read_keys(Path(self.api_keys_file))
        if self.no_auth and self.asks_for_keys:
            raise ConfigError("no_auth is true, and API keys are given: one or the other is meant")

    def media_domains(self) -> MediaDomains:
        """Raises: ConfigError."""
        return MediaDomains(self.allowed_media_domains, "allowed_media_domains")


def _verify_address(field: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(f"{field} is {address!r}, host:port is needed")
