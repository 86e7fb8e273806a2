"""Keyed chained hashes of full token blocks, and the digest of a whole request.

    root   = H16(version, model fingerprint, LoRA, cache_salt, tenant, prompt embeddings)
    h_i    = H24(h_{i-1} || tokens_i as u32 little endian || images_i)            full blocks only
    digest = H16("digest" || h_last or root || tokens after it || extras)        covers the tail and short prompts

with Hn = blake2b of n bytes under a sub-key of the deployment key: equal across processes and machines that share the
key, and no token can be read back by anyone who does not have it. images_i is empty for text; else, for each image that has
tokens in the block, its identifier and its first token's place, relative to the block.

The last 8 bytes of a block's hash are published for placement (`placement_hash`), in watches and in Redis. The first 16
never leave a process: they are independent of the last 8, and without them nothing names a block in a prefix cache.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from pdserve.common.security.deployment_key import BLOCK_HASHES, DeploymentKey

BLOCK_HASH_BYTES = 24
PLACEMENT_HASH_BYTES = 8
"""The end of a block's hash. Two blocks of a fleet with 4 million that share it cost one wrong estimate of an overlap."""
DIGEST_BYTES = 16
"""Bytes of a root, and of a request digest."""
_VERSION = b"pdserve.block.v1"


class HashedSpan(NamedTuple):
    """Tokens whose content is not determined by their ids: those of an image."""

    start: int
    """Relative to the hashed tokens; negative if it begins before them."""
    end: int
    identifier: bytes


class BlockHasher:
    """Hashes blocks of `block_size` tokens under one deployment key."""

    def __init__(self, deployment_key: DeploymentKey, block_size: int) -> None:
        self._key = deployment_key.derive(BLOCK_HASHES)
        self.block_size = block_size

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._key, digest_size=DIGEST_BYTES).digest()

    def root(
        self,
        model_fingerprint: str,
        cache_salt: str | None = None,
        lora: str | None = None,
        tenant: str = "",
        embeds_digest: bytes = b"",
    ) -> bytes:
        """The input of the first block's hash: requests with different roots never share a block.

        tenant: the owner, or the name of the group of tenants that share cached prefixes. embeds_digest: of the prompt's
        embeddings; empty for token ids.
        """
        last = (tenant, embeds_digest.hex()) if embeds_digest else (tenant,) if tenant else ()
        named = (model_fingerprint, lora or "", cache_salt or "", *last)
        parts = (_VERSION, *(name.encode() for name in named))
        # each part under its length, so that no two tuples read alike
        return self._digest(b"".join(len(part).to_bytes(4, "little") + part for part in parts))

    def extend(self, previous: bytes, token_ids: Sequence[int], spans: Sequence[HashedSpan] = ()) -> list[bytes]:
        """Hashes of the full blocks of `token_ids`, the first chained to `previous`; a partial tail has none."""
        size, key, blake2b = self.block_size * 4, self._key, hashlib.blake2b
        data = token_bytes(token_ids)
        hashes = []
        for start in range(0, len(data) - size + 1, size):
            block = previous + data[start : start + size]
            if spans:
                block += self._images_of_block(start // 4, spans)
            previous = blake2b(block, key=key, digest_size=BLOCK_HASH_BYTES).digest()
            hashes.append(previous)
        return hashes

    def _images_of_block(self, first: int, spans: Sequence[HashedSpan]) -> bytes:
        """first: the block's first token."""
        return b"".join(
            len(span.identifier).to_bytes(4, "little")
            + span.identifier
            + (span.start - first).to_bytes(8, "little", signed=True)
            for span in spans
            if span.start < first + self.block_size and span.end > first
        )

    def request_digest(
        self, root: bytes, block_hashes: Sequence[bytes], token_ids: Sequence[int], extras: bytes = b""
    ) -> bytes:
        """A digest that both calls of an attempt compare: equal only for the same prompt under the same root."""
        tail = token_bytes(token_ids[len(block_hashes) * self.block_size :])
        last = block_hashes[-1] if block_hashes else root
        return self._digest(b"digest" + last + len(tail).to_bytes(4, "little") + tail + extras)


def request_extras(lora_fingerprint: str, embeds_digest: bytes = b"") -> bytes:
    """The `extras` of the request digest: of an adapter's fingerprint and of the prompt's embeddings; empty without both."""
    lora = b"lora" + lora_fingerprint.encode() if lora_fingerprint else b""
    return lora + (b"embeds" + embeds_digest if embeds_digest else b"")


def placement_hash(block_hash: bytes) -> bytes:
    """The part of a block's hash that routers get: enough for placement, and useless at a worker."""
    return block_hash[-PLACEMENT_HASH_BYTES:]


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as u32 little endian. Raises: OverflowError."""
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
