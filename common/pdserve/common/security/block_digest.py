"""Algorithms for the digest of one block's bytes: a checksum, and a message authentication code.

    xxh3_64   detects damage; an attacker can make other bytes with the same digest
    gmac      also detects forgery: without the transfer's key, bytes and a matching digest cannot be made

Both give 64 bits. `gmac` is GMAC (the authentication of AES-128-GCM) over the bytes, then keyed BLAKE2b over its 128-bit tag
and the block's index. The second step gives the 64 bits their full strength: a tag of GMAC that is only cut to 64
bits could be forged with probability `len / 16` in 2^64 instead of 1 in 2^64, and requires a new nonce each time. With the
index, two blocks of one transfer cannot be exchanged.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

XXH3_64 = "xxh3_64"
GMAC = "gmac"
"""Names of the algorithms in `Open.digest_algorithms` and `Accepted.digest_algorithm`."""
ALGORITHMS = (XXH3_64, GMAC)
KEY_BYTES = 32

_DIGEST_BYTES = 8
_AES_KEY_BYTES = 16
_NONCE = bytes(12)
"""A constant nonce: no GMAC tag is published, and BLAKE2b hides what equal nonces would reveal."""


class BlockDigest(Protocol):
    """One algorithm, with its key if it has one. Thread-safe."""

    @property
    def name(self) -> str:
        """One of `ALGORITHMS`."""

    def of(self, view: memoryview, index: int) -> int:
        """The digest of a block's bytes as an unsigned 64-bit number. index: the block's index in its transfer, from 0.

        Releases the GIL while it reads large blocks.
        """


class Xxh3:
    """`xxh3_64`; ignores the index."""

    name = XXH3_64

    def of(self, view: memoryview, index: int) -> int:
        """As `BlockDigest.of`."""
        return xxhash.xxh3_64_intdigest(view)


class Gmac:
    """`gmac` under the key of one transfer."""

    name = GMAC

    def __init__(self, key: bytes) -> None:
        """key: `KEY_BYTES` bytes. Raises: ValueError for another length."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self.key = key
        self._gmac = AESGCM(key[:_AES_KEY_BYTES])
        self._outer_key = key[_AES_KEY_BYTES:]

    def of(self, view: memoryview, index: int) -> int:
        """As `BlockDigest.of`."""
        tag = self._gmac.encrypt(_NONCE, b"", view)
        outer = hashlib.blake2b(tag + index.to_bytes(8, "big"), key=self._outer_key, digest_size=_DIGEST_BYTES)
        return int.from_bytes(outer.digest(), "big")


XXH3 = Xxh3()
