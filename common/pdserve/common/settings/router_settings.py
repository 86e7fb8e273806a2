"""`RouterSettings`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from pdserve.common.address.media_domains import MediaDomains
from pdserve.common.errors import ConfigError
from pdserve.common.image_processor_config import ImageLimits
from pdserve.common.protocol import MAX_MESSAGE_BYTES
from pdserve.common.request.multimodal import MAX_IMAGE_BYTES, MAX_IMAGES
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.security.tls import ServerTls, load_front
from pdserve.common.settings.api_key_file import is_name, read_keys, verify_plain_keys
from pdserve.common.settings.service_settings import SchedulingPolicy, ServiceSettings

_LEAST_REQUEST_BYTES = 1024
_MAX_FLUSH_MS = 1000
_MAX_NAME_CHARS = 256
_MAX_PROCESSES = 64
_MOST_SHARED_RESPONSE_BYTES = 48 << 20
_REASONING_PARSER = re.compile(r"[a-z0-9_]{1,64}|<[^<>\s]{1,64}>|\[[^\[\]\s]{1,64}\]")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]+")


class RouterSettings(ServiceSettings, frozen=True, kw_only=True):
    """The router and its two front ends."""

    section: ClassVar[str] = "router"

    port: int = 8000
    """OpenAI HTTP."""
    grpc_port: int = 50051
    router_processes: int = 1
    """Processes that serve clients behind `port` and `grpc_port`; limits of tenants and of the queue hold over all of them, limits
    of connections and bytes in each."""
    prefill: tuple[str, ...] = ()
    """host:port of prefill workers."""
    decode: tuple[str, ...] = ()
    """host:port of decode workers."""
    served_model_name: tuple[str, ...] | None = None
    """Names of the model for clients, of which responses have the first; default: `ORG/NAME` of the hub, or the folder's name."""
    local_prefill: Literal["never", "auto", "always"] = "auto"
    """When decode may prefill; `auto`: when it is faster, without a prefill worker, or after a failed transfer."""
    policy: Literal["kv_aware", "least_loaded", "round_robin"] = "kv_aware"
    """The rule that chooses among the workers that can serve a request."""
    on_kv_failure: Literal["local", "remote", "fail"] = "local"
    """The kind of the next attempt after a failed transfer."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """Order in which requests get a place, as on the workers: by `priority`, or only by arrival."""
    max_attempts: int = 3
    request_timeout_s: float = 600.0
    """Longest deadline of a request, seconds; default of a request without one."""
    max_queued_requests: int = 1024
    """Requests that wait in the router for a place; more are refused at once."""
    max_running_requests: int | None = None
    """Requests that workers serve at once; default: the sequences and prompt blocks that the live ones can hold."""
    starting_worker_timeout_s: float = 300.0
    """Longest wait of a request for a worker while `up` starts one again, seconds; it is 5 s for any other worker."""
    queue_timeout_s: float = 30.0
    """Longest wait for a place, seconds; refused at once when the expected wait is longer."""
    max_requests_per_key: int | None = None
    """Sequences of one tenant in the router at once, where its key has no `max_sequences`; default: no limit."""
    max_request_bytes: int | None = None
    """Bytes of one request, a JSON body or a gRPC message; default: 1 MiB, and 8 bytes per token of the model's length;
    with `enable_prompt_embeds`, and for a model with images, 16 MiB."""
    max_image_pixels: int = 1 << 25
    """Pixels of an image before it is resized, at most: decoded, it has 3 or 4 bytes per pixel, in each of two threads."""
    max_images_per_prompt: int = 16
    max_held_image_bytes: int = 256 << 20
    """Bytes of resized images, 3 per pixel, of all requests under way; more are refused (429)."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts from which images of chats are fetched by URL: `host`, `host:port`, or an IP address with a port, which alone may be
    a private one; default: none, and only data URLs are taken."""
    image_fetch_timeout_s: float = 5.0
    """Seconds for fetching all images of a prompt."""
    max_body_bytes_in_flight: int | None = None
    """Bytes of requests in reading at the same time, outside of admission; default: 64 MiB, or 16 requests at the limit."""
    max_connections: int | None = None
    """Connections of each front end at a time; default: half of the descriptors beyond 128, at most 8192."""
    max_connections_per_address: int | None = None
    """Connections of each front end from one IPv4 address or one /64 of IPv6; default: half of `max_connections`."""
    max_answer_bytes: int = 32 << 20
    """Bytes of a response that is not streamed: 256 per log-probability and 4 per token beside its text."""
    max_stored_responses_per_tenant: int = 1024
    """Responses of `/v1/responses` that are kept for `previous_response_id`, the newest; 0 keeps none."""
    max_stored_bytes_per_tenant: int = 64 << 20
    """Bytes of one tenant's stored responses; each has its whole conversation."""
    max_stored_response_bytes: int = 8 << 20
    """Bytes of one stored response with its conversation; a larger one is not stored."""
    max_stored_bytes: int = 512 << 20
    """Bytes of stored responses in this router's memory, of all tenants; with `redis` they are there instead."""
    max_stored_response_age_s: float = 86_400.0
    """Seconds after which a stored response is dropped."""
    trust_client_trace_headers: bool | None = None
    """Adopt clients' `traceparent`, with its sampling, or only link to it; default: adopt that of clients that show an
    API key or a certificate, and of all where neither is asked for on loopback."""
    stream_flush_ms: int = 0
    """Least milliseconds between two writes to a client's stream, 1000 at most: output of the meantime is written together. The
    first output and the end of a stream are not delayed."""
    max_unread_bytes: int = 1 << 20
    """Text that a client has not read, at most, before its request is cancelled."""
    api_keys: tuple[str, ...] | None = None
    """If given, both front ends require one as bearer token; at least 16 characters each; each is a tenant of its own."""
    api_keys_file: str | None = None
    """TOML file with the hashes of API keys, their tenants, roles and limits, in place of `api_keys`; read again when it
    changes."""
    no_auth: bool = False
    """Listen beyond loopback though clients need neither an API key nor a certificate."""
    audit_log: str | None = None
    """Target of one JSON line per client request: a path, or `stderr`; default: none."""
    shared_prefix_cache: tuple[str, ...] = ()
    """Tenants that share cached prefixes: groups of their names, joined by `+`, or `*` for all; default: none do."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the HTTP API from a browser, `scheme://host[:port]`, or `*` for all; default: none."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """Fields of requests that the router does not know, which may ask for another text: `refuse` them by name, or `ignore` them
    with one log line per name."""
    parse_special: bool = True
    """Parse special tokens in clients' chat messages; False: they are plain text."""
    enable_prompt_embeds: bool = False
    """Take prompts as embeddings; workers have a setting of the same name."""
    max_prompt_embeds_bytes: int = 64 << 20
    """Bytes of prompt embeddings in the router at once, at most; more are refused as overload."""
    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral", "pythonic"] = "auto"
    """Form of calls of tools in answers; `auto`: by the chat template; `none`: they remain text."""
    reasoning_parser: str = "auto"
    """Tags of reasoning in answers: a family's name, or the opening tag itself, as `<think>`; `auto`: by the chat template;
    `none`: reasoning remains text."""
    front_tls_cert_file: str | None = None
    """PEM certificate of both front ends, for clients; needs `front_tls_key_file`."""
    front_tls_key_file: str | None = None
    front_tls_client_ca_file: str | None = None
    """PEM certificates of the CA that signed those of clients; when given, clients must show one."""
    drain_s: float = 30.0

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
            raise ConfigError("shared_prefix_cache has *, which is all tenants, beside other groups")
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
        self._verify_least(1, "max_attempts", "max_queued_requests", "max_unread_bytes", "max_answer_bytes")
        self._verify_least(1, "max_running_requests", "max_requests_per_key")
        self._verify_least(1, "max_connections", "max_connections_per_address")
        self._verify_bytes()
        self._verify_processes()
        self._verify_least(0, "max_stored_responses_per_tenant", "max_stored_bytes_per_tenant", "max_stored_bytes")
        self._verify_least(0, "max_stored_response_bytes", "stream_flush_ms")
        if self.stream_flush_ms > _MAX_FLUSH_MS:
            raise ConfigError(f"stream_flush_ms is {self.stream_flush_ms}, at most {_MAX_FLUSH_MS} is possible")
        self._verify_seconds("request_timeout_s", "queue_timeout_s", "drain_s", "max_stored_response_age_s")
        self._verify_seconds("image_fetch_timeout_s", "starting_worker_timeout_s")
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
        self.cache_groups()
        for field in ("prefill", "decode"):
            for address in getattr(self, field):
                _verify_address(field, address)

    def _verify_processes(self) -> None:
        """Raises: ConfigError."""
        if not 1 <= self.router_processes <= _MAX_PROCESSES:
            raise ConfigError(f"router_processes is {self.router_processes}, 1 to {_MAX_PROCESSES} are possible")
        most = self.max_stored_response_bytes
        if self.router_processes > 1 and self.redis is None and most > _MOST_SHARED_RESPONSE_BYTES:
            raise ConfigError(
                f"max_stored_response_bytes is {most} and router_processes {self.router_processes}: without redis, a response "
                f"of at most {_MOST_SHARED_RESPONSE_BYTES} bytes is stored for all processes"
            )

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

    def image_limits(self) -> ImageLimits:
        """Limits of a prompt's images, which travel in one message to a worker."""
        return ImageLimits(self.max_image_pixels, self.max_images_per_prompt, MAX_IMAGE_BYTES)

    def media_domains(self) -> MediaDomains:
        """Raises: ConfigError."""
        return MediaDomains(self.allowed_media_domains, "allowed_media_domains")

    def _verify_bytes(self) -> None:
        """Raises: ConfigError."""
        if (limit := self.max_request_bytes) is not None and not _LEAST_REQUEST_BYTES <= limit <= MAX_MESSAGE_BYTES:
            raise ConfigError(
                f"max_request_bytes is {limit}, {_LEAST_REQUEST_BYTES} to {MAX_MESSAGE_BYTES} bytes are possible"
            )
        if self.max_prompt_embeds_bytes < 1:
            raise ConfigError(f"max_prompt_embeds_bytes is {self.max_prompt_embeds_bytes}, at least 1 is needed")
        for name, most in (("max_image_pixels", 1 << 28), ("max_images_per_prompt", MAX_IMAGES)):
            if not 0 < getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}, 1 to {most} are possible")
        if self.max_held_image_bytes < 0:
            raise ConfigError(f"max_held_image_bytes is {self.max_held_image_bytes}, at least 0 is needed")
        in_flight, least = self.max_body_bytes_in_flight, self.max_request_bytes or _LEAST_REQUEST_BYTES
        if in_flight is not None and in_flight < least:
            raise ConfigError(
                f"max_body_bytes_in_flight is {in_flight}, at least one request ({least} bytes) is needed"
            )


def _verify_address(field: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(f"{field} is {address!r}, host:port is needed")
