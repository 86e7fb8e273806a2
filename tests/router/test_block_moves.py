"""When cached blocks are read from another worker: pure decisions, and what is learned from moves that ended."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pdserve.common import timeline as moments
from pdserve.common.timeline import Timeline
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.placement.block_moves import ALWAYS_LIMIT_S, FIRST_S, KEPT_S, LEAST_LIMIT_S, BlockMoves
from pdserve.router.placement.placement import Candidate, PlacementRules, choose, place
from pdserve.router.placement.transfer_bandwidth import DEFAULT_BYTES_PER_S, TransferBandwidth
from tests.router.candidates import seen, worker
from tests.router.fake_worker import LAYOUT
from tests.support.models.kv_layouts import with_shape

SIZE = LAYOUT.block_size
LONG = 400 * SIZE
SLOW = 1000.0
"""Prompt tokens per second of a worker to which moving is always faster."""


def moves(setting: Any = "auto") -> BlockMoves:
    return BlockMoves(setting, TransferBandwidth())


def prefill(name: str, overlap: int = 0, rate: float = SLOW, **fields: Any) -> Candidate:
    return seen(worker(name, "prefill", prefill_tokens_per_s=rate, **fields), LONG, overlap)


def decode(name: str, overlap: int = 0, confirmed: int | None = None, **fields: Any) -> Candidate:
    return seen(worker(name, "decode", **fields), LONG, overlap, confirmed)


def source_of(candidate: Candidate) -> str | None:
    return None if candidate.move is None else candidate.move.source.identity.worker_id


def test_the_worker_that_has_most_is_the_source() -> None:
    readers = [prefill("p1", 3), prefill("p2", 200)]
    known = [*readers, decode("d1", 100), decode("d2", 300), decode("d3", 300, blocks_in_use=9)]
    found = moves().with_moves(readers, known)
    assert [source_of(each) for each in found] == ["d2", "d2"]
    assert [each.move.num_blocks for each in found if each.move] == [297, 100]
    [best] = moves().with_moves([known[3]], known)
    assert best is known[3], "nobody has more"
    [third] = moves().with_moves([prefill("p3", 299)], [known[3], known[4]])
    assert third.move is not None
    assert third.move.num_blocks == 1


def test_the_last_token_is_computed() -> None:
    [reader] = moves().with_moves([prefill("p1")], [decode("d1", 400)])
    assert reader.move is not None
    assert reader.move.num_blocks == 399


def test_only_what_a_source_has_reported_counts() -> None:
    reader = prefill("p1")
    assert moves().with_moves([reader], [decode("d1", 300, confirmed=0)]) == [reader]


@pytest.mark.parametrize(
    "source",
    [
        decode("d1", 300, layout=with_shape(LAYOUT, num_layers=9)),
        decode("d1", 300, protocol_version=99),
    ],
    ids=["layout", "version"],
)
def test_blocks_that_cannot_be_read_are_not_moved(source: Candidate) -> None:
    reader = prefill("p1")
    assert moves("always").with_moves([reader], [source]) == [reader]


@pytest.mark.parametrize(
    ("setting", "rate", "moves_it"),
    [
        ("auto", SLOW, True),
        ("auto", 1e9, False),
        ("auto", 0.0, False),
        ("always", 1e9, True),
        ("always", 0.0, True),
        ("never", SLOW, False),
    ],
)
def test_moves_are_made_where_they_are_faster(setting: Any, rate: float, moves_it: bool) -> None:
    [reader] = moves(setting).with_moves([prefill("p1", rate=rate)], [decode("d1", 300)])
    assert (reader.move is not None) is moves_it


def test_a_rate_is_remembered_after_the_worker_has_forgotten_it() -> None:
    slow = worker("p1", "prefill", prefill_tokens_per_s=SLOW)
    slow.report(worker("p1", "prefill").load)
    assert slow.load.prefill_tokens_per_s == 0
    [reader] = moves().with_moves([seen(slow, LONG)], [decode("d1", 300)])
    assert reader.move is not None


def test_estimates_are_those_of_the_formula() -> None:
    [reader] = moves().with_moves([prefill("p1", 10)], [decode("d1", 110)])
    move = reader.move
    assert move is not None
    base_s = FIRST_S + 100 * LAYOUT.total_place_bytes / DEFAULT_BYTES_PER_S
    assert move.base_s == pytest.approx(base_s)
    assert move.num_bytes == 100 * LAYOUT.total_place_bytes
    assert move.move_s == pytest.approx(1.5 * base_s)
    assert move.compute_s == pytest.approx(100 * SIZE / SLOW)
    assert move.limit_s == pytest.approx(move.compute_s), "computing takes longer than twice the estimate"
    [fast] = moves().with_moves([prefill("p1", 399, rate=2 * SIZE / FIRST_S)], [decode("d1", 400)])
    assert fast.move is None
    [short] = moves("auto").with_moves([prefill("p1", 395, rate=SIZE / FIRST_S)], [decode("d1", 400)])
    assert short.move is not None
    assert short.move.limit_s == pytest.approx(max(LEAST_LIMIT_S, 2 * short.move.move_s))
    [insists] = moves("always").with_moves([prefill("p1", 10)], [decode("d1", 110)])
    assert insists.move is not None
    assert insists.move.limit_s == ALWAYS_LIMIT_S
    uncached = LONG - 110 * SIZE + int(move.move_s * SLOW)
    assert reader.uncached_tokens == uncached


def test_a_prefix_at_a_busy_worker_costs_an_idle_one_little() -> None:
    busy, idle = prefill("busy", 300, num_waiting_tokens=4 * LONG), prefill("idle")
    rules = PlacementRules()
    without = choose([prefill("busy", 300, num_waiting_tokens=LONG // 2), idle], WorkerRole.PREFILL, rules)
    assert without is not None
    found = moves().with_moves([busy, idle], [busy, idle])
    chosen = choose(found, WorkerRole.PREFILL, rules)
    assert chosen is not None
    assert chosen.worker is idle.worker
    placement = place(20, prefill=found, decode=[decode("d1")], rules=PlacementRules(local_prefill="never"))
    assert placement is not None
    assert placement.move is not None
    assert placement.move.source is busy.worker


def ended(
    it: BlockMoves,
    reader: Candidate,
    seconds: float | None,
    started_s: float | None = None,
    cached: int = 0,
    reserved_s: float = 0.0,
) -> None:
    """All until something happened. seconds: the blocks landed; None: they did not. reserved_s: they had room. started_s: the
    worker computed."""
    timeline, now = Timeline(), time.time_ns()
    timeline.moments_unix_ns[moments.PREFILL_QUEUED] = now
    times = {moments.BLOCKS_LANDED: seconds, moments.PREFILL_STARTED: started_s}
    for name, after in (times | {moments.BLOCKS_RESERVED: None if seconds is None else reserved_s}).items():
        if after is not None:
            timeline.moments_unix_ns[name] = now + int(after * 1e9)
    it.ended(reader.move, timeline, cached)


def move_of(it: BlockMoves, num_blocks: int = 300, rate: float = 1.0) -> Candidate:
    [reader] = it.with_moves([prefill("p1", rate=rate)], [decode("d1", num_blocks)])
    assert reader.move is not None
    return reader


def expected_s(it: BlockMoves, num_blocks: int = 300) -> tuple[float, float]:
    """The estimate without and with the spread."""
    move = move_of(it, num_blocks).move
    assert move is not None
    return move.base_s, move.move_s


def test_what_moves_take_is_learned_and_how_often_they_were_right_is_counted() -> None:
    it, source = moves(), [decode("d1", 300)]
    [reader] = it.with_moves([prefill("p1")], source)
    assert reader.move is not None
    assert reader.move.compute_s is not None
    ended(it, reader, None)
    ended(it, reader, 0.9 * reader.move.compute_s)
    ended(it, reader, 1.1 * reader.move.compute_s)
    ended(it, reader, None, cached=299 * SIZE)
    ended(it, reader, None, cached=300 * SIZE)
    it.ended(None, Timeline(), 0)
    assert dict(it.num_ended) == {"failed": 2, "faster": 1, "slower": 1, "unneeded": 1}
    assert it.num_bytes == 2 * reader.move.num_bytes, "the failed one brought nothing"
    for _ in range(100):
        ended(it, reader, 3 * reader.move.base_s)
    base_s, move_s = expected_s(it)
    assert base_s == pytest.approx(3 * reader.move.base_s, rel=0.05)
    assert move_s == pytest.approx((1 + 2 / 3) * base_s, rel=1e-3), (
        "these took three times as long as was expected of them"
    )
    for _ in range(100):
        ended(it, move_of(it), 3 * reader.move.base_s)
    steady_s = expected_s(it)[1]
    assert steady_s == pytest.approx(3 * reader.move.base_s, rel=0.05), "regular moves have no spread"
    for number in range(100):
        ended(it, move_of(it), (1 + 4 * (number % 2)) * reader.move.base_s)
    assert expected_s(it)[1] > 1.4 * steady_s


def test_the_first_block_is_learned_apart_from_the_others() -> None:
    it = moves()
    for _ in range(50):
        ended(it, move_of(it, 1), 0.031)
        ended(it, move_of(it, 300), 0.33)
    assert expected_s(it, 1)[0] == pytest.approx(0.031, rel=0.05)
    assert expected_s(it, 100)[0] == pytest.approx(0.13, rel=0.05)


def test_short_moves_that_were_slow_do_not_make_long_ones_slow() -> None:
    it = moves()
    before = expected_s(it, 300)[0]
    for number in range(50):
        ended(it, move_of(it, 1 + number % 2), 0.05)
    assert expected_s(it, 1)[0] == pytest.approx(0.05, rel=0.05)
    assert expected_s(it, 300)[0] == pytest.approx(before - FIRST_S + 0.05, rel=0.05)


def test_a_line_that_noise_made_too_steep_or_falling_promises_nothing_wrong() -> None:
    steep, falling = moves(), moves()
    for _ in range(50):
        ended(steep, move_of(steep, 100), 0.01)
        ended(steep, move_of(steep, 300), 0.5)
        ended(falling, move_of(falling, 10), 0.5)
        ended(falling, move_of(falling, 300), 0.01)
    assert expected_s(steep, 1)[0] > 0
    assert expected_s(steep, 300)[0] > expected_s(steep, 100)[0]
    assert expected_s(falling, 300)[0] == pytest.approx(expected_s(falling, 10)[0], rel=1e-6)
    assert 0.01 < expected_s(falling, 300)[0] < 0.5


def test_a_move_that_was_given_up_makes_the_next_one_wait_longer() -> None:
    it = moves()
    reader = move_of(it, rate=300 * SIZE / 0.1)
    assert reader.move is not None
    assert reader.move.limit_s == pytest.approx(0.1)
    before = expected_s(it)[1]
    ended(it, reader, None, started_s=0.4 * reader.move.limit_s)
    assert expected_s(it)[1] == before, "it failed at once: that says nothing of how long moves take"
    ended(it, reader, None, started_s=1.01 * reader.move.limit_s)
    assert 1.5 * before < expected_s(it)[1] < reader.move.limit_s, "one that waited long does not end all others"
    assert it.num_ended["failed"] == 2


def test_the_reader_s_own_queue_is_no_part_of_a_move() -> None:
    it = moves()
    for _ in range(50):
        ended(it, move_of(it), 5.02, reserved_s=5.0)
    assert expected_s(it)[0] == pytest.approx(0.02 + FIRST_S, rel=0.05)


def test_slow_moves_are_forgotten_so_that_moves_are_tried_again() -> None:
    now = 100.0
    it = BlockMoves("auto", TransferBandwidth(), clock=lambda: now)
    before = expected_s(it)
    for _ in range(20):
        ended(it, move_of(it), 5.0)
    now += KEPT_S
    assert expected_s(it)[0] > 4.0
    now += 0.1
    assert expected_s(it) == before
