"""Challenge and response at the start of a watch: router and worker prove the deployment key to each other.

    router -> worker   WatchRequest{protocol_version, blocks, nonce}
    worker -> router   Welcome{identity, nonce, unix_us, proof}      proof over both nonces, versions, identity and time
    router -> worker   WatchRequest{proof}                           proof over the same, under another label

The worker sends nothing more before the router's proof has arrived. The identity is signed as serialized bytes, so
fields that a newer version adds are covered, and an older one can check them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable

from pdserve.common import clock
from pdserve.common.errors import KeyMismatch, ProtocolMismatch
from pdserve.common.protocol import PROTOCOL_VERSION, version_objection
from pdserve.common.security.call_proof import verify_clock
from pdserve.common.security.deployment_key import WATCH_PROOFS, DeploymentKey
from pdserve.v1 import worker_pb2

NONCE_BYTES = 32
_WORKER, _ROUTER = b"pdserve watch: worker", b"pdserve watch: router"
NewNonce = Callable[[], bytes]


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


class WatchAnswer:
    """The worker's side of one watch."""

    def __init__(
        self,
        key: DeploymentKey,
        identity: bytes,
        opening: worker_pb2.WatchRequest,
        *,
        version: int = PROTOCOL_VERSION,
        clock: Callable[[], float] = clock.unix_s,
        nonce: NewNonce = new_nonce,
    ) -> None:
        """identity: this worker's, serialized. opening: the router's first message.

        Raises: ProtocolMismatch, KeyMismatch.
        """
        if (why := version_objection(opening.protocol_version, version)) is not None:
            raise ProtocolMismatch(f"the router is refused: {why}")
        if len(opening.nonce) != NONCE_BYTES:
            raise KeyMismatch(f"the nonce of a watch has {len(opening.nonce)} bytes, {NONCE_BYTES} are needed")
        self._key = key.derive(WATCH_PROOFS)
        self.welcome = worker_pb2.Welcome(identity=identity, nonce=nonce(), unix_us=int(clock() * 1e6))
        self._said = _said(opening, self.welcome)
        self.welcome.proof = _mac(self._key, _WORKER, self._said)

    def verify(self, answer: worker_pb2.WatchRequest) -> None:
        """The router's second message. Raises: KeyMismatch."""
        if not hmac.compare_digest(answer.proof, _mac(self._key, _ROUTER, self._said)):
            raise KeyMismatch("the router's proof is wrong: its deployment key differs from this worker's")


class WatchChallenge:
    """The router's side of one watch."""

    def __init__(
        self,
        key: DeploymentKey,
        *,
        blocks: bool,
        version: int = PROTOCOL_VERSION,
        clock: Callable[[], float] = clock.unix_s,
        nonce: NewNonce = new_nonce,
    ) -> None:
        self._key = key.derive(WATCH_PROOFS)
        self._version = version
        self._clock = clock
        self.opening = worker_pb2.WatchRequest(protocol_version=version, blocks=blocks, nonce=nonce())

    def read(self, event: worker_pb2.WatchEvent) -> worker_pb2.Identity:
        """The worker's identity, after its proof has been verified.

        Raises: ProtocolMismatch, KeyMismatch, ClockSkew; google.protobuf.message.DecodeError, for an identity that has
        the proof of a service of this deployment and cannot be decoded.
        """
        welcome = event.welcome
        if len(welcome.nonce) != NONCE_BYTES:
            raise KeyMismatch(_NO_PROOF)
        said = _said(self.opening, welcome)
        if not hmac.compare_digest(welcome.proof, _mac(self._key, _WORKER, said)):
            raise KeyMismatch(
                "its deployment key differs from this router's; all services need the same PDSERVE_DEPLOYMENT_KEY"
            )
        identity = worker_pb2.Identity.FromString(welcome.identity)
        if (why := version_objection(identity.protocol_version, self._version)) is not None:
            raise ProtocolMismatch(why)
        verify_clock("the worker", welcome.unix_us / 1e6, "this router", self._clock())
        self._answer = worker_pb2.WatchRequest(proof=_mac(self._key, _ROUTER, said))
        return identity

    @property
    def answer(self) -> worker_pb2.WatchRequest:
        """This router's proof; after `read`."""
        return self._answer


_NO_PROOF = "it does not prove that it has the deployment key"


def _said(opening: worker_pb2.WatchRequest, welcome: worker_pb2.Welcome) -> bytes:
    parts = (
        opening.protocol_version.to_bytes(4, "big") + bytes([opening.blocks]),
        opening.nonce,
        welcome.nonce,
        welcome.unix_us.to_bytes(8, "big"),
        welcome.identity,
    )
    # each part under its length, so that no two tuples read alike
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _mac(key: bytes, label: bytes, said: bytes) -> bytes:
    return hashlib.blake2b(len(label).to_bytes(2, "big") + label + said, key=key, digest_size=32).digest()
