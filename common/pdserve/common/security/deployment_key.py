"""`DeploymentKey`: the secret that all services of one deployment share, and the sub-keys that are derived from it by label.

    master  = scrypt(secret)                                  16 MiB of memory for each guess of a weak secret
    sub-key = keyed blake2b(master, label, context)           32 bytes; none reveals anything about another

Each use has a label of its own, so that a value made for one purpose cannot be used for another.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.common.errors import ConfigError

BLOCK_HASHES = "block hashes"
"""Names of KV blocks in prefix caches, and request digests."""
SERVICE_CALLS = "service calls"
"""Authentication of gRPC calls between services."""
WATCH_PROOFS = "watch proofs"
"""Challenge and response at the start of a watch."""
REDIS_RECORDS = "redis records"
"""Signatures of workers' records."""
DATA_PLANE = "data plane"
"""Digests of KV bytes on their way; the context is the transfer id."""
STORED_BLOCKS = "stored blocks"
"""Digests of KV blocks in a store below host memory, and names of its folders; the context is the layout."""
TENANTS = "tenants"
"""Digests of tenants for workers."""
USAGE = "usage of tenants"
"""MACs of the use of tenants that routers exchange; the context is the router's id."""
STORED_RESPONSES = "stored responses"
"""Encryption of responses that routers share; the context is the response's id and the tenant."""
FINGERPRINT = "fingerprint"
"""A short value for an operator's eyes, by which two services' keys are compared. It is never sent or published."""

SUB_KEY_BYTES = 32
_SALT = b"pdserve deployment key v2"
_SCRYPT_N = 1 << 14
_SCRYPT_R = 8
_FINGERPRINT_BYTES = 6


@dataclass(frozen=True, slots=True)
class DeploymentKey:
    """Equal secrets give equal sub-keys in every process. The first derivation takes about 50 ms, later ones 2 us."""

    secret: bytes = field(repr=False)

    def derive(self, label: str, context: bytes = b"") -> bytes:
        """The sub-key of 32 bytes for one purpose. label: one of this module's. context: e.g. a transfer id."""
        name = label.encode()
        data = len(name).to_bytes(2, "big") + name + context
        return hashlib.blake2b(
            data, key=_stretched(self.secret), digest_size=SUB_KEY_BYTES, person=b"pdserve sub-key"
        ).digest()

    @property
    def fingerprint(self) -> str:
        """12 hex digits, equal where keys are equal. Only for a terminal: it is a test for guesses of the key."""
        return self.derive(FINGERPRINT)[:_FINGERPRINT_BYTES].hex()


@functools.lru_cache(maxsize=16)
def _stretched(secret: bytes) -> bytes:
    """32 bytes. scrypt's salt is fixed: services agree without a message, and the secret is one of its deployment."""
    return hashlib.scrypt(secret, salt=_SALT, n=_SCRYPT_N, r=_SCRYPT_R, p=1, dklen=32)


DEVELOPMENT_KEY = DeploymentKey(b"pdserve development key: public, for loopback only")
MIN_KEY_CHARS = 16
MIN_DISTINCT_CHARS = 6
"""One repeated character, or a short repeated word, is refused. 16 random decimal digits have fewer in 1 of 250 draws,
16 random hex digits in 1 of 30,000."""


def new_deployment_key() -> str:
    """256 random bits, as 64 hex digits."""
    return secrets.token_hex(32)


def resolve_deployment_key(
    key: str | None, key_file: Path | None, addresses: list[str], *, redis_given: bool = False
) -> tuple[DeploymentKey, bool]:
    """The key, and whether it is the public development key. White space around a given key does not count.

    key: None means that none is given; a blank one is an error, so that an empty variable opens nothing.
    addresses: every host this service listens on or connects to. Without a key the development key is used only while
    all of them are loopback and no Redis is given: others may share a Redis.
    Raises: ConfigError when there is no key and it is needed, or when the key is blank, too short or too uniform.
    """
    if key_file is not None:
        return _verified(_read(key_file), f"deployment_key_file {key_file}"), False
    if key is not None:
        return _verified(key, "deployment_key"), False
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


def _read(key_file: Path) -> str:
    try:
        return key_file.read_text()
    except OSError as error:
        raise ConfigError(f"deployment_key_file {key_file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"deployment_key_file {key_file}: not text") from error


def _verified(key: str, name: str) -> DeploymentKey:
    """name: the setting that gave the key. Raises: ConfigError, which never repeats the key."""
    key = key.strip()
    advice = "make one with `openssl rand -hex 32`"
    if not key:
        raise ConfigError(f"{name} is given, but blank: {advice}, or leave the setting out")
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(f"{name} has {len(key)} characters, at least {MIN_KEY_CHARS} are needed: {advice}")
    if (distinct := len(set(key))) < MIN_DISTINCT_CHARS:
        raise ConfigError(
            f"{name} has {distinct} different characters, at least {MIN_DISTINCT_CHARS} are needed: {advice}"
        )
    return DeploymentKey(key.encode())


def is_loopback(host: str) -> bool:
    """True if `host`, or the host of `host:port` or `[v6]:port`, never leaves this machine."""
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
