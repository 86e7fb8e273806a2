"""The secret that all services of one deployment share: it keys the block hashes and the request digests."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from pathlib import Path

from pdserve.common.errors import ConfigError

DEVELOPMENT_KEY = b"pdserve development key: public, for loopback only"
MIN_KEY_BYTES = 16


def new_deployment_key() -> str:
    """256 random bits, as 64 hex digits."""
    return secrets.token_hex(32)


def resolve_deployment_key(
    key: str | None, key_file: Path | None, addresses: list[str], *, redis_given: bool = False
) -> tuple[bytes, bool]:
    """The key's bytes, and whether it is the public development key.

    addresses: every host this service listens on or connects to. Without a key the development key is used only while
    all of them are loopback and no Redis is given: others may share a Redis.
    Raises: ConfigError when there is no key and it is needed, or when the key is too short.
    """
    if key_file is not None:
        try:
            key = key_file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"deployment_key_file {key_file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"deployment_key_file {key_file}: not text") from error
        if not key:
            raise ConfigError(f"deployment_key_file {key_file} is empty")
    if key:
        if len(key) < MIN_KEY_BYTES:
            raise ConfigError(f"deployment_key has {len(key)} characters, at least {MIN_KEY_BYTES} are needed")
        return key.encode(), False
    if beyond := [address for address in addresses if not is_loopback(address)]:
        raise ConfigError(
            f"no deployment key, and {beyond[0]!r} is not a loopback address: "
            "set PDSERVE_DEPLOYMENT_KEY (or --deployment-key-file) to one secret shared by all services"
        )
    if redis_given:
        raise ConfigError(
            "no deployment key, and a Redis is given, which other machines may share: "
            "set PDSERVE_DEPLOYMENT_KEY (or --deployment-key-file) to one secret shared by all services"
        )
    return DEVELOPMENT_KEY, True


def key_check(key: bytes) -> str:
    """A short value by which two services see that their keys differ; tells nothing about the key."""
    return hashlib.blake2b(key, digest_size=6, person=b"key check").hexdigest()


def is_loopback(host: str) -> bool:
    """Whether `host`, or the host of `host:port` or `[v6]:port`, never leaves this machine."""
    name = host_of(host)
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_of(address: str) -> str:
    """`host`, `host:port`, `[v6]:port` or a bare v6 address -> host."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address
