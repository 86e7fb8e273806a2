"""Proofs of calls between services: what they cover, how long they hold, and which versions work together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.common.errors import ClockSkew, KeyMismatch, ProtocolMismatch, WrongWorker
from pdserve.common.protocol import PROTOCOL_VERSION, version_objection, works_with
from pdserve.common.security.call_proof import MAX_NONCES, MAX_SKEW_S, PROOF_KEY, CallSigner, CallVerifier, NonceMemory
from pdserve.common.security.deployment_key import DeploymentKey

KEY = DeploymentKey(b"0123456789abcdef")
ME = ("decode-0", 0xFEDC_BA98_7654_3210)
METHOD = "/pdserve.v1.StepStreamService/Open"
NOW = 1_800_000_000.0


def proof(at: float = NOW, *, key: DeploymentKey = KEY, receiver: Any = ME, method: str = METHOD, **more: Any) -> bytes:
    [(name, value)] = CallSigner(key, clock=lambda: at, **more).metadata(method, receiver, b"message")
    assert name == PROOF_KEY
    return value


def verifier(version: int = PROTOCOL_VERSION) -> CallVerifier:
    return CallVerifier(KEY, lambda: ME, version=version, clock=lambda: NOW)


def test_a_proof_holds_for_its_message_alone() -> None:
    checking = verifier()
    digest = checking.verify(METHOD, proof())
    checking.verify_message(METHOD, digest, b"message")
    for other in (b"", b"messagf", b"message "):
        with pytest.raises(KeyMismatch, match="not the one that its proof was made for"):
            checking.verify_message(METHOD, digest, other)


@pytest.mark.parametrize("place", range(len(proof())))
def test_a_proof_with_any_byte_changed_is_refused(place: int) -> None:
    changed = bytearray(proof())
    changed[place] ^= 1
    with pytest.raises((KeyMismatch, ProtocolMismatch)):
        verifier().verify(METHOD, bytes(changed))


@pytest.mark.parametrize(
    ("given", "error", "why"),
    [
        (None, KeyMismatch, "none came with it"),
        (b"", KeyMismatch, "0 bytes"),
        (b"x" * 5000, KeyMismatch, "5000 bytes"),
        (proof(key=DeploymentKey(b"fedcba9876543210")), KeyMismatch, "deployment key differs"),
        (proof(method="/pdserve.v1.WorkerService/Meet"), KeyMismatch, "is wrong"),
        (proof(receiver=("decode-1", ME[1])), WrongWorker, "for worker decode-1.*this is decode-0"),
        (proof(receiver=("decode-0", 7)), WrongWorker, "epoch 0000000000000007.*epoch fedcba9876543210"),
        (proof(receiver=("", ME[1])), WrongWorker, "this is decode-0"),
        (proof(NOW - 61), ClockSkew, r"2027-01-15 07:58:59 UTC.*2027-01-15 08:00:00 UTC"),
        (proof(NOW + 61), ClockSkew, r"2027-01-15 08:01:01 UTC.*2027-01-15 08:00:00 UTC"),
        (proof(1.8e13), ClockSkew, "clocks differ"),
        (proof(version=0), ProtocolMismatch, "speaks protocol version 0, which no release has"),
        (proof(version=PROTOCOL_VERSION + 2), ProtocolMismatch, "may differ by 1"),
    ],
    ids=range(13),  # proofs differ in each process, which would be their names
)
def test_what_is_wrong_is_said(given: bytes | None, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why) as caught:
        verifier().verify(METHOD, given)
    assert type(caught.value) is error


def test_a_call_is_taken_once() -> None:
    checking, sent = verifier(), proof()
    checking.verify(METHOD, sent)
    for _ in range(3):
        with pytest.raises(KeyMismatch, match="used before"):
            checking.verify(METHOD, sent)
    checking.verify(METHOD, proof())


@pytest.mark.parametrize("skew_s", [-MAX_SKEW_S, 0, MAX_SKEW_S])
def test_a_replay_is_refused_for_as_long_as_its_time_would_pass(skew_s: float) -> None:
    clock = [NOW]
    checking = CallVerifier(KEY, lambda: ME, clock=lambda: clock[0])
    sent = proof(NOW + skew_s)
    checking.verify(METHOD, sent)
    for passed in range(0, 3 * MAX_SKEW_S, 5):
        clock[0] = NOW + passed
        with pytest.raises(KeyMismatch):
            checking.verify(METHOD, sent)


def test_refused_calls_use_no_memory() -> None:
    checking, stranger = verifier(), DeploymentKey(b"a stranger's key")
    for _ in range(100):
        for wrong in (proof(NOW - 100), proof(key=stranger)):
            with pytest.raises(KeyMismatch):
                checking.verify(METHOD, wrong)
    assert len(checking._nonces) == 0


def test_nonces_are_forgotten_when_their_time_has_passed() -> None:
    memory = NonceMemory(60)
    for second in range(1000):
        assert memory.is_new(second.to_bytes(16, "big"), 10_000.0 + second, 10_000.0 + second)
    assert len(memory) <= 61


@pytest.mark.parametrize("sign", [-1, 1], ids=["before", "after"])
def test_a_full_memory_forgets_the_second_farthest_from_now_and_refuses_its_calls(sign: int) -> None:
    memory = NonceMemory(60, max_nonces=100)
    numbers = itertools.count()

    def take(stamp: float) -> bool:
        return memory.is_new(next(numbers).to_bytes(16, "big"), stamp, 10_000.0)

    assert all(take(10_000.0 + sign * place) for place in range(10) for _ in range(10))
    assert take(10_000.0 + sign * 5)
    assert len(memory) <= 100
    assert not take(10_000.5 + sign * 9), "its nonce may have been seen and forgotten"
    assert not memory.is_new((9).to_bytes(16, "big"), 10_000.0 + sign * 9, 10_000.0)
    assert take(10_000.0)
    assert take(10_000.0 + sign * 8)


@pytest.mark.few(2)
@pytest.mark.parametrize("seconds", [[59], [1], range(1, 60), range(-60, 61)], ids=["last", "next", "to come", "all"])
def test_no_number_of_calls_stamped_otherwise_keeps_out_those_of_now(seconds: Sequence[int]) -> None:
    memory, now = NonceMemory(60), 10_000.0
    count = MAX_NONCES + 20_000
    for number in range(count):
        memory.is_new(number.to_bytes(16, "big"), now + seconds[number % len(seconds)], now)
    assert len(memory) <= MAX_NONCES
    for number in range(count, count + 100):
        # also while the stamps that were dropped are still to come
        later = now + (number - count) // 10
        assert memory.is_new(number.to_bytes(16, "big"), later, later) or later - now in seconds
        assert not memory.is_new(number.to_bytes(16, "big"), later, later)
    assert memory.is_new(b"last", now + 200, now + 200)


def test_a_second_that_was_dropped_takes_no_call_again_when_it_comes() -> None:
    memory = NonceMemory(60, max_nonces=10)
    for number in range(20):
        memory.is_new(number.to_bytes(16, "big"), 10_059.0, 10_000.0)
    for now in (10_001.0, 10_059.0, 10_119.0):
        assert not memory.is_new((0).to_bytes(16, "big"), 10_059.0, now), now
    assert memory.is_new((0).to_bytes(16, "big"), 10_060.0, 10_060.0)


def test_versions_work_together_when_they_differ_by_one() -> None:
    assert [works_with(1, other) for other in range(4)] == [False, True, True, False]
    assert works_with(7, 8)
    assert works_with(8, 7)
    assert version_objection(1, 2) is None
    assert version_objection(2, 1) is None
    assert version_objection(0, 1) == ("it speaks protocol version 0, which no release has; this service speaks 1")
    assert "version 4, this service 2" in (version_objection(4, 2) or "")


@pytest.mark.parametrize("ours", [PROTOCOL_VERSION, PROTOCOL_VERSION + 1])
def test_calls_of_this_version_are_taken_by_this_version_and_the_next(ours: int) -> None:
    verifier(ours).verify(METHOD, proof())
