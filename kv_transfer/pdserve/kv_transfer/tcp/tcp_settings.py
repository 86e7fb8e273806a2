"""Settings of the TCP connector, and the address that it gives to its peers."""

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
    """`connect_timeout_s` is for the connection; with TLS as long again for the handshake."""

    host: str = "127.0.0.1"
    """Address of this machine to listen on."""
    port: int = 0
    """0: any free port."""
    advertise_host: str | None = None
    """The host that peers connect to; needed when `host` is a wildcard. Peers resolve a name."""
    sockets_per_peer: int = 2
    """Most connections that reads from one peer use at once; they are kept open and used again."""
    max_request_bytes: int = 64 << 20
    """Largest answer that this source gives to a peer that asks for more than one block at once."""
    send_stall_s: float = 10.0
    """Seconds without a sent byte after which a peer's connection is closed."""
    first_request_s: float = 5.0
    """A new connection that was granted no read within this time is closed; with TLS its handshake counts too."""
    idle_close_s: float = 60.0
    """Connections without reads are closed by the reader after this time, by the source after twice of it."""
    fence_after_s: float = 1.0
    """Sends that are under way when their grant closes are cut off after this time."""
    max_connections: int = 512
    """Connections of peers that read; one beyond is closed at its first read."""
    max_connections_per_host: int = 128
    """Part of these for one address, or one IPv6 network of 64 bits."""
    max_newcomers: int = 128
    """Connections that have not shown a token yet; one more replaces the oldest."""
    max_newcomers_per_host: int = 64
    """Part of these for one address, or one IPv6 network of 64 bits."""
    tls: TlsIdentity | None = None
    """This process's identity to its peers, which must show certificates, too; None: no encryption."""

    def __post_init__(self) -> None:
        # not super(): a dataclass with slots is another class than the one that this function was defined in
        ReadSettings.__post_init__(self)
        places = (self.max_connections, self.max_connections_per_host, self.max_newcomers, self.max_newcomers_per_host)
        if min(self.sockets_per_peer, *places) < 1:
            raise ConfigError("sockets_per_peer and the places for connections must be at least 1 each")
        if self.max_request_bytes < self.longest_request_bytes:
            raise ConfigError("max_request_bytes must be at least longest_request_bytes")
        if min(self.send_stall_s, self.first_request_s) <= 0:
            raise ConfigError("send_stall_s and first_request_s must be above 0")

    @property
    def peers_host(self) -> str:
        """The host for the metadata."""
        return self.advertise_host or self.host

    def check_peers_host(self) -> None:
        """Raises ConfigError when peers could not connect to `peers_host`."""
        if not is_plain_host(self.peers_host):
            raise ConfigError(f"peers cannot be told to connect to {self.peers_host!r}: set advertise_host")


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
        """Read what a peer sent. Raises TransferFailed when it is not exactly a plain host and a port."""
        if len(metadata) > MAX_METADATA_BYTES:
            raise TransferFailed(f"the source's TCP metadata has {len(metadata)} bytes")
        try:
            address = msgspec.json.decode(metadata, type=TcpAddress, strict=True)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TransferFailed(f"the source's TCP metadata cannot be read: {error}") from error
        if address.version != METADATA_VERSION:
            raise TransferFailed(f"the source speaks version {address.version} of the TCP connector's metadata")
        if not is_plain_host(address.host) or not 1 <= address.port <= 65535:
            raise TransferFailed(f"the source's TCP metadata names no usable address: {address.host!r}, {address.port}")
        return address


def is_plain_host(host: str) -> bool:
    """An IP address of one machine, or a DNS name that no resolver takes for an address in disguise."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        labels = host.split(".")
        is_name = len(host) <= 253 and all(_LABEL.fullmatch(label) for label in labels)
        return is_name and not _LOOKS_NUMERIC.fullmatch(labels[-1])
    return not address.is_unspecified and not address.is_multicast and "%" not in host
