"""Challenge and response of a watch: each side proves the deployment key before the other believes it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from pdserve.common.errors import ClockSkew, KeyMismatch, ProtocolMismatch
from pdserve.common.protocol import PROTOCOL_VERSION
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.security.watch_proof import WatchAnswer, WatchChallenge
from pdserve.v1 import worker_pb2

KEY, OTHER = DeploymentKey(b"0123456789abcdef"), DeploymentKey(b"fedcba9876543210")
NOW = 1_800_000_000.0


def identity(version: int = PROTOCOL_VERSION, **fields: Any) -> bytes:
    return worker_pb2.Identity(
        worker_id="decode-0", epoch=7, protocol_version=version, address="10.0.0.1:1", **fields
    ).SerializeToString()


def challenge(key: DeploymentKey = KEY, **more: Any) -> WatchChallenge:
    return WatchChallenge(key, blocks=True, clock=lambda: NOW, **more)


def answer(asked: WatchChallenge, key: DeploymentKey = KEY, at: float = NOW, **more: Any) -> WatchAnswer:
    return WatchAnswer(key, more.pop("said", identity()), asked.opening, clock=lambda: at, **more)


def event(answered: WatchAnswer) -> worker_pb2.WatchEvent:
    return worker_pb2.WatchEvent(welcome=answered.welcome)


def test_both_sides_prove_themselves() -> None:
    asked = challenge()
    answered = answer(asked)
    assert asked.read(event(answered)).worker_id == "decode-0"
    answered.verify(asked.answer)


def test_each_watch_has_nonces_of_its_own() -> None:
    one, two = challenge(), challenge()
    first, second = answer(one), answer(two)
    one.read(event(first))
    two.read(event(second))
    assert one.opening.nonce != two.opening.nonce
    for stale, proof in ((first, two.answer), (second, one.answer)):
        with pytest.raises(KeyMismatch):
            stale.verify(proof)
    with pytest.raises(KeyMismatch, match="deployment key differs"):
        two.read(event(first))


def test_a_worker_with_another_key_is_no_worker_of_ours() -> None:
    asked = challenge()
    with pytest.raises(KeyMismatch, match="deployment key differs"):
        asked.read(event(answer(asked, OTHER)))


@pytest.mark.parametrize("field", ["identity", "nonce", "unix_us", "proof"])
def test_a_welcome_with_a_changed_field_is_refused(field: str) -> None:
    asked = challenge()
    told = event(answer(asked))
    changed: Any = {
        "identity": identity(vocab_size=9),
        "nonce": bytes(32),
        "unix_us": told.welcome.unix_us + 1,
        "proof": bytes(32),
    }[field]
    setattr(told.welcome, field, changed)
    with pytest.raises(KeyMismatch):
        asked.read(told)


def test_a_router_without_the_key_cannot_answer() -> None:
    asked = challenge()
    answered = answer(asked)
    for proof in (b"", bytes(32), answered.welcome.proof):
        with pytest.raises(KeyMismatch, match="router's proof is wrong"):
            answered.verify(worker_pb2.WatchRequest(proof=proof))


@pytest.mark.parametrize("nonce", [b"", b"x" * 31, b"x" * 33])
def test_a_short_nonce_is_refused(nonce: bytes) -> None:
    opening = worker_pb2.WatchRequest(protocol_version=PROTOCOL_VERSION, nonce=nonce)
    with pytest.raises(KeyMismatch, match=f"{len(nonce)} bytes"):
        WatchAnswer(KEY, identity(), opening)


@pytest.mark.parametrize("at", [NOW - 61, NOW + 61])
def test_clocks_that_differ_are_both_named(at: float) -> None:
    asked = challenge()
    with pytest.raises(ClockSkew, match=r"the worker says 2027-01-15 .*, this router 2027-01-15 08:00:00 UTC"):
        asked.read(event(answer(asked, at=at)))


@pytest.mark.parametrize(
    ("router", "worker", "why"),
    [
        (1, 1, None), (1, 2, None), (2, 1, None), (2, 2, None), (2, 3, None),
        (0, 1, "speaks protocol version 0, which no release has"), (1, 3, "may differ by 1"), (3, 1, "may differ by 1"),
    ],
)  # fmt: skip
def test_which_versions_pair(router: int, worker: int, why: str | None) -> None:
    asked = challenge(version=router)
    refusal = contextlib.nullcontext() if why is None else pytest.raises(ProtocolMismatch, match=why)
    with refusal:
        answered = answer(asked, version=worker, said=identity(worker))
        asked.read(event(answered))
        answered.verify(asked.answer)


def test_a_worker_without_a_proof_is_refused() -> None:
    with pytest.raises(KeyMismatch, match="does not prove"):
        challenge().read(worker_pb2.WatchEvent(welcome=worker_pb2.Welcome()))
