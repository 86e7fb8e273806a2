"""Proofs that a gRPC call between services comes from one that has the deployment key.

A proof travels in the call's metadata under `PROOF_KEY`. It is a MAC (keyed blake2b of 32 bytes, under a sub-key of the
deployment key) over a label, the method, the receiving worker's id and epoch, the caller's protocol version, the time, a
nonce, and the digest of the call's first message. It works with and without TLS, and does not encrypt.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from datetime import UTC, datetime

from pdserve.common import clock
from pdserve.common.errors import ClockSkew, KeyMismatch, ProtocolMismatch, WrongWorker
from pdserve.common.kv_events import WorkerKey
from pdserve.common.protocol import PROTOCOL_VERSION, version_objection
from pdserve.common.security.deployment_key import SERVICE_CALLS, DeploymentKey

PROOF_KEY = "pdserve-proof-bin"
MAX_SKEW_S = 60
"""Seconds by which the clocks of two services may differ, and for which a nonce is remembered in both directions."""
NONCE_BYTES = 16
_FORMAT = 1
_LABEL = b"pdserve service call"
_FIELDS = struct.Struct(">BHQQ16s32s")
"""Format, the caller's protocol version, the receiver's epoch, microseconds since 1970, nonce, digest of the message.

The receiver's id follows, then the MAC.
"""
_MAC_BYTES = 32
_MAX_ID_BYTES = 512

Metadata = tuple[tuple[str, bytes], ...]


def message_digest(message: bytes) -> bytes:
    """32 bytes over a serialized message: 40 us for a prompt of 12,000 tokens."""
    return hashlib.blake2b(message, digest_size=32).digest()


class CallSigner:
    """Makes the proofs of one service's calls."""

    def __init__(
        self,
        key: DeploymentKey,
        *,
        version: int = PROTOCOL_VERSION,
        clock: Callable[[], float] = clock.unix_s,
        nonce: Callable[[], bytes] = lambda: secrets.token_bytes(NONCE_BYTES),
    ) -> None:
        self._key = key.derive(SERVICE_CALLS)
        self._version = version
        self._clock = clock
        self._nonce = nonce

    def metadata(self, method: str, receiver: WorkerKey, message: bytes) -> Metadata:
        """Metadata of a call whose first message is `message`. method: `/package.Service/Method`."""
        worker_id, epoch = receiver
        fields = _FIELDS.pack(
            _FORMAT, self._version, epoch, int(self._clock() * 1e6), self._nonce(), message_digest(message)
        )
        said = fields + worker_id.encode()
        return ((PROOF_KEY, said + _mac(self._key, method, said)),)


class CallVerifier:
    """Checks the proofs of calls to one epoch of one worker."""

    def __init__(
        self,
        key: DeploymentKey,
        receiver: Callable[[], WorkerKey],
        *,
        version: int = PROTOCOL_VERSION,
        clock: Callable[[], float] = clock.unix_s,
    ) -> None:
        """receiver: called with each call; a worker's id is known with its port, after its server is made."""
        self._key = key.derive(SERVICE_CALLS)
        self._receiver = receiver
        self._version = version
        self._clock = clock
        self._nonces = NonceMemory(MAX_SKEW_S)

    def verify(self, method: str, proof: bytes | None) -> bytes:
        """The digest that the call's first message must have. proof: None for a call without one.

        Raises: KeyMismatch for a missing, wrong or repeated proof, ClockSkew, ProtocolMismatch, WrongWorker.
        """
        if proof is None:
            raise KeyMismatch(
                f"{method} needs a proof of the deployment key, and none came with it: the caller is no service of this "
                "deployment"
            )
        if not _FIELDS.size + _MAC_BYTES <= len(proof) <= _FIELDS.size + _MAC_BYTES + _MAX_ID_BYTES:
            raise KeyMismatch(f"the proof of a call has {len(proof)} bytes, which no proof has")
        said, mac = proof[:-_MAC_BYTES], proof[-_MAC_BYTES:]
        form, version, epoch, stamp_us, nonce, digest = _FIELDS.unpack_from(said)
        if form != _FORMAT:
            raise ProtocolMismatch(f"the proof of a call has format {form}, this service knows {_FORMAT}")
        if not hmac.compare_digest(mac, _mac(self._key, method, said)):
            raise KeyMismatch(f"the proof of a call to {method} is wrong: the caller's deployment key differs")
        if (why := version_objection(version, self._version)) is not None:
            raise ProtocolMismatch(f"the caller is refused: {why}")
        self._verify_receiver(said[_FIELDS.size :], epoch)
        self._verify_time(nonce, stamp_us / 1e6)
        return bytes(digest)

    def verify_message(self, method: str, digest: bytes, message: bytes) -> None:
        """Raises: KeyMismatch when the message is not the one that the proof was made for."""
        if message_digest(message) != digest:
            raise KeyMismatch(f"the message of a call to {method} is not the one that its proof was made for")

    def _verify_receiver(self, worker_id: bytes, epoch: int) -> None:
        own_id, own_epoch = self._receiver()
        if (worker_id, epoch) != (own_id.encode(), own_epoch):
            raise WrongWorker(
                f"the call is for worker {worker_id.decode(errors='replace')}, epoch {epoch:016x}; "
                f"this is {own_id}, epoch {own_epoch:016x}"
            )

    def _verify_time(self, nonce: bytes, stamp_s: float) -> None:
        now_s = self._clock()
        verify_clock("the caller", stamp_s, "this service", now_s)
        if not self._nonces.is_new(nonce, stamp_s, now_s):
            raise KeyMismatch("the proof of a call was used before")


def verify_clock(them: str, stamp_s: float, us: str, now_s: float) -> None:
    """Raises: ClockSkew naming both times, when they differ by more than `MAX_SKEW_S`."""
    if abs(stamp_s - now_s) > MAX_SKEW_S:
        raise ClockSkew(
            f"clocks differ: {them} says {_as_text(stamp_s)}, {us} {_as_text(now_s)}; at most {MAX_SKEW_S} s are allowed"
        )


def _as_text(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{unix_s:.0f} s since 1970"


def _mac(key: bytes, method: str, said: bytes) -> bytes:
    name = method.encode()
    data = len(_LABEL).to_bytes(2, "big") + _LABEL + len(name).to_bytes(2, "big") + name + said
    return hashlib.blake2b(data, key=key, digest_size=_MAC_BYTES).digest()


MAX_NONCES = 1 << 17
"""About 12 MiB. A worker that takes 1,000 calls per second for two minutes has seen as many."""


class NonceMemory:
    """Keeps nonces by the second of their time stamp, and forgets whole seconds.

    When it is full, the second that is farthest from now is dropped, before or after it, and calls with a stamp of that second or
    beyond it are refused from then on: memory is bounded, a replay remains impossible, and no stamps to come, of which a peer may
    send any number, keep out calls of now.
    """

    def __init__(self, window_s: int, max_nonces: int = MAX_NONCES) -> None:
        """window_s: how far a stamp may be from this process's clock, either way."""
        self._window_s = window_s
        self._max_nonces = max_nonces
        self._seconds: dict[int, set[bytes]] = {}
        self._num_nonces = 0
        self._oldest = 0
        """Stamps before this second are refused."""
        self._dropped: set[int] = set()
        """Later seconds whose stamps are refused, since their nonces are forgotten."""

    def __len__(self) -> int:
        return self._num_nonces

    def is_new(self, nonce: bytes, stamp_s: float, now_s: float) -> bool:
        """Remember a nonce; False when it was seen before, or when its second has been dropped.

        The caller has checked that the stamp is within the window.
        """
        second, now = int(stamp_s), int(now_s)
        self._forget_before(now - self._window_s)
        if second < self._oldest or second in self._dropped:
            return False
        seen = self._seconds.setdefault(second, set())
        if nonce in seen:
            return False
        seen.add(nonce)
        self._num_nonces += 1
        while self._num_nonces > self._max_nonces:
            self._drop_farthest(now)
        return True

    def _drop_farthest(self, now: int) -> None:
        farthest = max(self._seconds, key=lambda second: abs(second - now))
        if farthest <= now:
            self._forget_before(farthest + 1)
        else:
            self._dropped.add(farthest)
            self._num_nonces -= len(self._seconds.pop(farthest))

    def _forget_before(self, second: int) -> None:
        if second <= self._oldest:
            return
        self._oldest = second
        self._dropped = {each for each in self._dropped if each >= second}
        for old in [each for each in self._seconds if each < second]:
            self._num_nonces -= len(self._seconds.pop(old))
