"""`MooncakeUrl`: the setting `kv_store`, a store of KV blocks that workers share."""

from __future__ import annotations

from typing import Literal, get_args
from urllib.parse import parse_qsl, urlsplit

import msgspec

from pdserve.common.address.host_address import host_and_port
from pdserve.common.errors import ConfigError

StoreProtocol = Literal["tcp", "rdma"]
MIN_SEGMENT_MIB = 16
"""What Mooncake can add, unless it is nothing."""


class MooncakeUrl(msgspec.Struct, frozen=True):
    """`mooncake://MASTER:PORT?segment_mib=N`, with further options."""

    master_host: str
    """Of `mooncake_master`."""
    master_port: int
    segment_mib: int
    """Main memory that each rank of a worker adds to the store, in MiB; 0: none."""
    metadata: str = "P2PHANDSHAKE"
    """URL of its metadata server; the default needs none."""
    protocol: StoreProtocol = "tcp"
    devices: str = ""
    """RDMA devices, separated by commas."""
    host: str = ""
    """Name or address of this machine for others that use the store; empty: that of the interface that leads to the master."""
    plaintext: bool = False
    """Allow a master beyond loopback where that takes TLS otherwise: Mooncake encrypts nothing."""

    @property
    def master(self) -> str:
        """`host:port` of `mooncake_master`."""
        return host_and_port(self.master_host, self.master_port)

    @classmethod
    def parse(cls, text: str) -> MooncakeUrl:
        """Raises: ConfigError naming `kv_store`, its value and what is wrong."""
        try:
            url = urlsplit(text.strip())
            port, host = url.port, url.hostname
            options = dict(parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query)))
        except ValueError as error:
            raise _refusal(text, str(error)) from error
        if url.scheme != "mooncake":
            raise _refusal(text, "it does not begin with mooncake://")
        if not host or not port:
            raise _refusal(text, "host and port of the master are missing: mooncake://HOST:PORT?segment_mib=N")
        if url.path.strip("/") or url.fragment or url.username is not None:
            raise _refusal(text, "nothing but HOST:PORT may stand before the options")
        known = set(cls.__struct_fields__) - {"master_host", "master_port"}
        if unknown := sorted(options.keys() - known):
            raise _refusal(text, f"it has the option {unknown[0]!r}, known are {', '.join(sorted(known))}")
        return cls(
            host,
            port,
            _segment_mib(text, options.pop("segment_mib", None)),
            protocol=_protocol(text, options.pop("protocol", "tcp")),
            plaintext=_plaintext(text, options.pop("plaintext", "false")),
            **options,
        )


def _segment_mib(text: str, value: str | None) -> int:
    if value is None:
        raise _refusal(text, "segment_mib is missing: the memory that this worker adds to the store, 0 for none")
    if not value.isascii() or not value.isdigit() or 0 < int(value) < MIN_SEGMENT_MIB:
        raise _refusal(text, f"segment_mib is {value!r}, 0 or at least {MIN_SEGMENT_MIB} is needed")
    return int(value)


def _protocol(text: str, value: str) -> StoreProtocol:
    known: tuple[StoreProtocol, ...] = get_args(StoreProtocol)
    for protocol in known:
        if value == protocol:
            return protocol
    raise _refusal(text, f"protocol is {value!r}, known are {', '.join(known)}")


def _plaintext(text: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise _refusal(text, f"plaintext is {value!r}, true or false is needed")
    return value == "true"


def _refusal(text: str, reason: str) -> ConfigError:
    return ConfigError(f"kv_store is {text!r}: {reason}")
