"""`DigestRule`: the digest of a worker's transfers, by the setting `kv_digest` and the peer's address.

`auto` requires a message authentication code if a third party could change bytes: if blocks may be sent without TLS to a peer
beyond loopback. Each side applies its own rule and accepts nothing weaker, so an attacker that changes negotiation messages can end
a transfer, but not weaken its digests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.common.errors import TransferFailed
from pdserve.common.security.block_digest import ALGORITHMS, GMAC, XXH3, XXH3_64, BlockDigest, Gmac
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.settings.worker_settings import KvDigestName

_SHOWN_NAMES = 8
_ANSWER = b"the answer to an attach"
_SHOWN_CHARS = 32


class DigestRule:
    """The rule of one worker."""

    def __init__(self, setting: KvDigestName, derive: Callable[[bytes], bytes], *, clear: bool) -> None:
        """setting: `kv_digest`. derive: returns a key of 32 bytes for a context, which only workers with the deployment key can
        derive.

        clear: True if any of the worker's connectors may send blocks without TLS.
        """
        self._setting = setting
        self._derive = derive
        self._clear = clear

    def allowed(self, peer: str) -> tuple[str, ...]:
        """The algorithms that are accepted with a peer at this host, or host:port; best first."""
        if self._setting != "auto":
            return (self._setting,)
        return (GMAC,) if self._clear and not is_loopback(peer) else (XXH3_64, GMAC)

    def choose(self, offered: Sequence[str], peer: str) -> str:
        """The first of a receiver's algorithms that is accepted. Raises: TransferFailed if none is."""
        allowed = self.allowed(peer)
        chosen = next((name for name in offered if name in allowed), None)
        if chosen is None:
            there = ", ".join(name[:_SHOWN_CHARS] for name in offered[:_SHOWN_NAMES])
            raise TransferFailed(
                f"no common digest algorithm: {', '.join(allowed)} here, {there or 'none'} there (kv_digest)"
            )
        return chosen

    def answer_proof(self, transfer_id: bytes, source_epoch: int, said: Sequence[bytes]) -> bytes:
        """32 bytes that prove the source's answer, since another process may answer at its address.

        said: the fields of the answer, in a fixed order.
        """
        parts = (_ANSWER, transfer_id, source_epoch.to_bytes(8, "big"), *said)
        # each part is prefixed by its length, so that no two answers have the same bytes; a digest's context has 32 bytes
        return self._derive(b"".join(len(part).to_bytes(4, "big") + part for part in parts))

    def make(self, name: str, transfer_id: bytes, token: bytes) -> BlockDigest:
        """The algorithm for one transfer. token: 16 random bytes of the source, which make the key new in each transfer.

        Raises: TransferFailed for an unknown name.
        """
        if name not in ALGORITHMS:
            raise TransferFailed(f"the digest algorithm {name[:_SHOWN_CHARS]!r} is unknown here")
        return Gmac(self._derive(token + transfer_id)) if name == GMAC else XXH3
