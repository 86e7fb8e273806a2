"""Settings of the TCP connector, and its address for peers."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

import msgspec

from pdserve.common.address.host_address import host_and_port
from pdserve.common.errors import ConfigError, TransferFailed
from pdserve.common.security.tls import TlsIdentity
from pdserve.kv_transfer.pull.block_reader import ReadSettings

METADATA_VERSION = 1
MAX_METADATA_BYTES = 1024

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")
_LOOKS_NUMERIC = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSettings(ReadSettings):
    """`connect_timeout_s` limits the connection, and with TLS again the handshake."""

    host: str = "127.0.0.1"
    """Address of this machine to listen on."""
    port: int = 0
    """Port to listen on; 0 for a free port."""
    advertise_host: str | None = None
    """The host that peers connect to; required if `host` is a wildcard. Peers resolve names."""
    sockets_per_peer: int = 2
    """Most connections that reads from one peer use at once; they are kept open and reused."""
    max_request_bytes: int = 64 << 20
    """Largest answer of this source to a request for more than one block."""
    send_stall_s: float = 10.0
    """Seconds without a sent byte after which a peer's connection is closed."""
    first_request_s: float = 5.0
    """Seconds after which a new connection without a granted read is closed, including the TLS handshake."""
    idle_close_s: float = 60.0
    """Seconds after which the reader closes a connection without reads; the source closes it after twice this time."""
    fence_after_s: float = 1.0
    """Seconds after which sends are interrupted when their grant was closed."""
    max_connections: int = 512
    """Most settled connections; a further one is closed at its first read."""
    max_connections_per_host: int = 128
    """Part of these for one address, or one IPv6 network of 64 bits."""
    max_newcomers: int = 128
    """Most connections without a valid token so far; a further one replaces the oldest."""
    max_newcomers_per_host: int = 64
    """Part of these for one address, or one IPv6 network of 64 bits."""
    tls: TlsIdentity | None = None
    """This process's TLS identity; peers must have certificates, too. None: no encryption."""

    def __post_init__(self) -> None:
        # not super(): a dataclass with slots is another class than the one that this function was defined in
        ReadSettings.__post_init__(self)
        places = (self.max_connections, self.max_connections_per_host, self.max_newcomers, self.max_newcomers_per_host)
        if min(self.sockets_per_peer, *places) < 1:
            raise ConfigError("sockets_per_peer and the limits of connections must be at least 1 each")
        if self.max_request_bytes < self.longest_request_bytes:
            raise ConfigError("max_request_bytes must be at least longest_request_bytes")
        if min(self.send_stall_s, self.first_request_s) <= 0:
            raise ConfigError("send_stall_s and first_request_s must be above 0")

    @property
    def peers_host(self) -> str:
        """The host in the metadata."""
        return self.advertise_host or self.host

    def check_peers_host(self) -> None:
        """Raises: ConfigError if peers could not connect to `peers_host`."""
        if not is_plain_host(self.peers_host):
            raise ConfigError(f"peers cannot connect to {self.peers_host!r}: set advertise_host")


class TcpAddress(msgspec.Struct, frozen=True):
    """The address of a source; the metadata of the TCP connector, as JSON."""

    host: str
    port: int
    version: int = METADATA_VERSION

    def __str__(self) -> str:
        return host_and_port(self.host, self.port)

    def to_metadata(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_metadata(metadata: bytes) -> TcpAddress:
        """Decode and check a peer's metadata. Raises: TransferFailed unless it is a plain host and a port."""
        if len(metadata) > MAX_METADATA_BYTES:
            raise TransferFailed(f"the source's TCP metadata has {len(metadata)} bytes")
        try:
            address = msgspec.json.decode(metadata, type=TcpAddress, strict=True)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TransferFailed(f"the source's TCP metadata cannot be read: {error}") from error
        if address.version != METADATA_VERSION:
            raise TransferFailed(f"the source has version {address.version} of the TCP connector's metadata")
        if not is_plain_host(address.host) or not 1 <= address.port <= 65535:
            raise TransferFailed(f"the source's TCP metadata names no usable address: {address.host!r}, {address.port}")
        return address


def is_plain_host(host: str) -> bool:
    """True for an IP address of one machine, or a DNS name that no resolver interprets as an address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        labels = host.split(".")
        is_name = len(host) <= 253 and all(_LABEL.fullmatch(label) for label in labels)
        return is_name and not _LOOKS_NUMERIC.fullmatch(labels[-1])
    return not address.is_unspecified and not address.is_multicast and "%" not in host
