"""`DeploymentKey`: a secret that is stretched once, and the sub-keys that are derived from it by label.

    master  = scrypt(secret)                                  16 MiB of memory for each guess of a weak secret
    sub-key = keyed blake2b(master, label, context)           32 bytes; none reveals anything about another

Each use has a label of its own, so that a value made for one purpose cannot be used for another.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field

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
TENANTS = "tenants"
"""Digests of tenants for workers."""
USAGE = "usage of tenants"
"""MACs of the use of tenants that routers exchange; the context is the router's id."""
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
        """12 hex digits, equal where keys are equal. For a terminal alone: it is a test for guesses of the key."""
        return self.derive(FINGERPRINT)[:_FINGERPRINT_BYTES].hex()


@functools.lru_cache(maxsize=16)
def _stretched(secret: bytes) -> bytes:
    """32 bytes. scrypt's salt is fixed: services agree without a message, and the secret is one of its deployment."""
    return hashlib.scrypt(secret, salt=_SALT, n=_SCRYPT_N, r=_SCRYPT_R, p=1, dklen=32)
