"""Attempts whose sequences another worker continues, under every order in which the events of the calls can come."""

from __future__ import annotations

import asyncio
from itertools import combinations
from typing import Any

import msgspec
import pytest

from pdserve.common.errors import DigestMismatch, PeerError, TransferFailed, WorkerLost
from pdserve.common.request.engine_types import FinishReason
from pdserve.common.timeline import Timeline
from pdserve.router.attempts import attempt as attempt_module
from pdserve.router.attempts.attempt import Attempt
from pdserve.router.attempts.attempt_failure import AttemptFailed
from pdserve.router.attempts.attempt_state import AttemptState
from pdserve.router.attempts.call_events import Admitted, Computed, Ended, LandedEvent, Migrating, Outputs
from pdserve.router.attempts.call_events import Migrated as MigratedEvent
from pdserve.router.attempts.migration import Migrated, MigrationSource
from pdserve.router.placement.placement import Placement
from pdserve.router.workers.call_failure import CallFailed
from tests.router.candidates import worker
from tests.router.test_attempt_orders import DIGEST, END, REQUEST, FedCall, calls
from tests.support.run.waiting import HANG_S

GONE = CallFailed(WorkerLost("gone"), True)


class DecodeCall(FedCall):
    """Notes what is asked of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.migrations: list[tuple[int, bytes]] = []
        self.ended: list[int] = []
        self.fields = kwargs

    def migrate(self, index: int, transfer_id: bytes, receiver: object) -> None:
        self.migrations.append((index, transfer_id))

    def end_sequence(self, index: int) -> None:
        self.ended.append(index)


class Relay:
    """What the client got."""

    def __init__(self, stop_at: int | None = None) -> None:
        """stop_at: the token that completes a stop string."""
        self.tokens: dict[int, list[int]] = {}
        self.stop_at = stop_at

    def __call__(self, outputs: Outputs) -> bool:
        known = self.tokens.setdefault(outputs.index, [])
        new = outputs.token_ids[len(known) - outputs.first_position :]
        assert outputs.first_position <= len(known), "a gap"
        known.extend(new)
        return outputs.finish_reason is not None or self.stop_at in new


def migrating(last: int, position: int, index: int = 0) -> Migrating:
    return Migrating(index, Computed(1 + position, DIGEST, [Outputs(index, position, [last])], {}), False)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(attempt_module, "DecodeCall", DecodeCall)
    calls.clear()
    return [worker(name, "decode") for name in ("d1", "d2")]


async def begin(workers: list[Any], relay: Relay, n: int = 1) -> tuple[Attempt, asyncio.Task[None], DecodeCall]:
    """An attempt at the first worker, whose sequences are to migrate."""
    request = msgspec.structs.replace(REQUEST, n=n)
    attempt = Attempt(0, request, Placement(decode=workers[0]), Timeline(), relay)
    running = asyncio.create_task(attempt.run())
    await asyncio.sleep(0)
    [call] = calls
    assert isinstance(call, DecodeCall)
    call.feed(Admitted({}))
    for index in range(n):
        call.feed(Outputs(index, 0, [10]))
    attempt.migrate(workers[1])
    attempt.migrate(workers[1])
    assert [index for index, _ in call.migrations] == list(range(n))
    return attempt, running, call


async def source_of(running: asyncio.Task[None], index: int = 0) -> MigrationSource:
    with pytest.raises(Migrated) as migrated:
        await asyncio.wait_for(running, HANG_S)
    return migrated.value.sources[index]


def go_on(workers: list[Any], relay: Relay, source: MigrationSource) -> tuple[Attempt, asyncio.Task[None]]:
    """The attempt at the second worker."""
    request = msgspec.structs.replace(REQUEST, output_token_ids=[10])
    placement = Placement(decode=workers[1], source=workers[0])
    attempt = Attempt(1, request, placement, Timeline(), relay, None, source)
    return attempt, asyncio.create_task(attempt.run())


THERE = [Admitted({}), LandedEvent(1, 1, "tcp", {}), Outputs(0, 2, [12]), Outputs(0, 3, [13], FinishReason.LENGTH), END]


async def run(
    workers: list[Any], here: list[Any], there: list[Any], turns: tuple[int, ...]
) -> tuple[Any, Attempt, Relay]:
    """What the second attempt ends with. here: events of the first worker, after `Migrating`, at these turns."""
    calls.clear()
    relay = Relay()
    _, running, first = await begin(workers, relay)
    first.feed(Outputs(0, 1, [11]))
    first.feed(migrating(11, 1))
    source = await source_of(running)
    attempt, running = go_on(workers, relay, source)
    await asyncio.sleep(0)
    second = calls[1]
    assert isinstance(second, DecodeCall)
    assert second.fields["transfer_id"] == first.migrations[0][1]
    assert second.fields["source"] is workers[0]
    feeds = [iter(here), iter(there)]
    for turn in range(len(here) + len(there)):
        at = 0 if turn in turns else 1
        (first, second)[at].feed(next(feeds[at]))
        await asyncio.sleep(0)
    async with asyncio.timeout(HANG_S):
        [failure] = await asyncio.gather(running, return_exceptions=True)
    assert all(call.cancelled for call in calls)
    assert [each.num_in_flight for each in workers] == [0, 0]
    return failure, attempt, relay


async def test_every_order_gives_every_token_once(workers: list[Any]) -> None:
    here = [MigratedEvent(0, Ended(True, "released", {})), END]
    for turns in combinations(range(len(here) + len(THERE)), len(here)):
        failure, attempt, relay = await run(workers, here, THERE, turns)
        assert (failure, attempt.state) == (None, AttemptState.DONE), turns
        assert relay.tokens == {0: [10, 11, 12, 13]}
        assert attempt.pause_s is not None


@pytest.mark.parametrize(
    "event", [GONE, CallFailed(TransferFailed("lost"), False), MigratedEvent(0, Ended(False, "expired", {}))]
)
async def test_a_source_that_fails_in_any_order(workers: list[Any], event: Any) -> None:
    """Harmless only once all blocks are there."""
    for turn in range(1 + len(THERE)):
        failure, attempt, relay = await run(workers, [event], THERE, (turn,))
        assert relay.tokens[0] == [10, 11, 12, 13][: len(relay.tokens[0])]
        if turn >= 2:
            assert (failure, attempt.state) == (None, AttemptState.DONE), turn
        else:
            assert isinstance(failure, AttemptFailed)
            assert failure.blamed is workers[0]
            assert failure.in_transfer
            assert relay.tokens[0] == [10, 11]


@pytest.mark.parametrize("cut", range(4))
async def test_a_receiver_that_fails_in_any_order(workers: list[Any], cut: int) -> None:
    there = [*THERE[:cut], GONE]
    here = [MigratedEvent(0, Ended(True, "released", {})), END]
    for turns in combinations(range(len(here) + len(there)), len(here)):
        failure, attempt, relay = await run(workers, here, there, turns)
        assert attempt.state is AttemptState.FAILED
        assert isinstance(failure, AttemptFailed)
        assert (failure.blamed, failure.died) == (workers[1], True)
        assert relay.tokens[0] == [10, 11, 12][: 2 + (cut == 3)]


async def test_a_source_that_is_lost_between_the_two_attempts(workers: list[Any]) -> None:
    relay = Relay()
    _, running, first = await begin(workers, relay)
    first.feed(migrating(10, 0))
    first.feed(GONE)
    attempt, running = go_on(workers, relay, await source_of(running))
    with pytest.raises(AttemptFailed):
        await asyncio.wait_for(running, HANG_S)
    assert attempt.state is AttemptState.FAILED


async def test_nobody_goes_on(workers: list[Any]) -> None:
    """The task ends between the two attempts."""
    _, running, first = await begin(workers, Relay())
    first.feed(migrating(10, 0))
    source = await source_of(running)
    assert not first.cancelled
    source.cancel()
    source.cancel()
    assert first.cancelled


async def test_one_of_two_sequences_ends_by_itself(workers: list[Any]) -> None:
    relay = Relay()
    _, running, first = await begin(workers, relay, n=2)
    first.feed(migrating(10, 0, index=1))
    await asyncio.sleep(0)
    assert not running.done()
    first.feed(Outputs(0, 1, [11], FinishReason.STOP))
    with pytest.raises(Migrated) as migrated:
        await asyncio.wait_for(running, HANG_S)
    assert list(migrated.value.sources) == [1]
    migrated.value.sources[1].cancel()
    assert first.cancelled


async def test_the_call_ends_when_no_sequence_needs_it(workers: list[Any]) -> None:
    _, running, first = await begin(workers, Relay(), n=3)
    for index in range(3):
        first.feed(migrating(10, 0, index))
    with pytest.raises(Migrated) as migrated:
        await asyncio.wait_for(running, HANG_S)
    for index in (1, 2, 0):
        assert not first.cancelled
        migrated.value.sources[index].cancel()
    assert first.cancelled


async def test_a_stop_string_that_its_last_token_completes_ends_it(workers: list[Any]) -> None:
    relay = Relay(stop_at=11)
    attempt, running, first = await begin(workers, relay)
    first.feed(Outputs(0, 1, [11]))
    first.feed(migrating(11, 1))
    await asyncio.wait_for(running, HANG_S)
    assert attempt.state is AttemptState.DONE
    assert first.cancelled


async def test_the_client_leaves_while_sequences_migrate(workers: list[Any]) -> None:
    attempt, running, first = await begin(workers, Relay(), n=2)
    first.feed(migrating(10, 0, index=1))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert attempt.state is AttemptState.CANCELLED
    assert first.cancelled


@pytest.mark.parametrize("index", [0, 7])
async def test_a_migration_that_was_not_asked_for(workers: list[Any], index: int) -> None:
    attempt = Attempt(0, REQUEST, Placement(decode=workers[0]), Timeline(), Relay())
    running = asyncio.create_task(attempt.run())
    await asyncio.sleep(0)
    calls[0].feed(migrating(10, 0, index))
    with pytest.raises(AttemptFailed) as failed:
        await asyncio.wait_for(running, HANG_S)
    assert isinstance(failed.value.error, PeerError)
    assert failed.value.blamed is workers[0]


async def test_another_request_than_the_sequence(workers: list[Any]) -> None:
    relay = Relay()
    _, running, first = await begin(workers, relay)
    other = migrating(10, 0)
    other.computed.request_digest = b"x" * 16
    first.feed(other)
    _, running = go_on(workers, relay, await source_of(running))
    with pytest.raises(AttemptFailed, match="another request") as failed:
        await asyncio.wait_for(running, HANG_S)
    assert failed.value.error.retryable, "it goes on without its blocks"


async def test_a_receiver_that_finds_other_blocks_costs_no_answer(workers: list[Any]) -> None:
    there = [Admitted({}), CallFailed(DigestMismatch("another digest"), False)]
    failure, _, _ = await run(workers, [], there, ())
    assert isinstance(failure, AttemptFailed)
    assert (failure.error.retryable, failure.in_transfer) == (True, True)
