"""Placement: pure decisions over workers as they stand."""

from __future__ import annotations

import msgspec
import pytest
from fake_worker import LAYOUT

from pdserve.router.placement import Wish, cost_blocks, least_loaded, place
from pdserve.router.worker import Worker, WorkerIdentity, WorkerLoad, WorkerRole, WorkerState


def worker(name, role="decode", *, layout=LAYOUT, limit=None, **load):
    identity = WorkerIdentity(
        worker_id=name,
        epoch=1,
        role=WorkerRole(role),
        protocol_version=1,
        address="127.0.0.1:1",
        layout=layout,
        tokenizer_fingerprint="t",
        key_check="k",
        max_model_len=256,
        vocab_size=300,
        num_blocks=10,
        max_local_prefill_tokens=limit,
    )
    return Worker(identity, None, WorkerLoad(**load))


P1, P2 = worker("p1", "prefill"), worker("p2", "prefill", num_waiting_tokens=160)
D1, D2 = worker("d1", num_running=1), worker("d2", num_running=4)
OTHER = worker("other", "prefill", layout=msgspec.structs.replace(LAYOUT, num_layers=9))
CAPPED = worker("capped", limit=10)


def ids(placement):
    return (
        placement and (placement.prefill and placement.prefill.identity.worker_id),
        placement and (placement.decode and placement.decode.identity.worker_id),
        placement and placement.prefill_here,
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "options", "expected"),
    [
        ([P1, P2], [D1, D2], {}, ("p1", "d1", False)),
        ([], [D2, D1], {}, (None, "d1", True)),
        ([P1], [], {}, (None, None, None)),
        ([OTHER], [D1], {}, (None, "d1", True)),
        ([P1], [D1], {"local_prefill": "always"}, (None, "d1", False)),
        ([P1], [CAPPED], {"local_prefill": "always"}, ("p1", "capped", False)),
        ([], [CAPPED], {"local_prefill": "always"}, (None, "capped", True)),
        ([], [D1], {"local_prefill": "never"}, (None, None, None)),
        ([OTHER], [D1], {"local_prefill": "never"}, (None, None, None)),
        ([P1], [D1], {"local_prefill": "never", "wish": Wish.LOCAL}, ("p1", "d1", False)),
        ([P1], [D1], {"wish": Wish.LOCAL}, (None, "d1", False)),
        ([P1], [CAPPED], {"wish": Wish.LOCAL}, ("p1", "capped", False)),
        ([P1], [D1], {"wish": Wish.REMOTE, "local_prefill": "always"}, ("p1", "d1", False)),
        ([], [D1], {"wish": Wish.REMOTE}, (None, "d1", True)),
        ([P1, P2], [D1], {"blamed": {("p1", 1)}}, ("p2", "d1", False)),
        ([P1], [D1], {"blamed": {("p1", 1)}}, (None, "d1", False)),
        ([P1], [D1], {"blamed": {("p1", 1)}, "local_prefill": "never"}, ("p1", "d1", False)),
        ([P1], [D1], {"blamed": {("p1", 1)}, "wish": Wish.REMOTE}, ("p1", "d1", False)),
        ([P1], [D1, D2], {"blamed": {("d1", 1)}}, ("p1", "d2", False)),
        ([P1], [D1], {"blamed": {("d1", 1)}}, ("p1", "d1", False)),
        ([P1], [D1], {"max_tokens": 1}, ("p1", None, False)),
        ([], [D1], {"max_tokens": 1}, (None, "d1", True)),
        ([P1], [], {"max_tokens": 1}, ("p1", None, False)),
        ([P1], [D1], {"max_tokens": 1, "local_prefill": "always"}, (None, "d1", False)),
        ([], [D1], {"max_tokens": 1, "local_prefill": "never"}, (None, None, None)),
    ],
)
def test_place(prefill, decode, options, expected):
    options = {"max_tokens": 8, "local_prefill": "auto", **options}
    assert ids(place(100, options.pop("max_tokens"), prefill=prefill, decode=decode, **options)) == expected


def test_cost_counts_what_was_reported_and_what_was_placed_since():
    it = worker("x", num_waiting_tokens=160, num_running=2)
    assert cost_blocks(it) == 12
    first = it.book(32)
    assert cost_blocks(it) == 15
    it.report(WorkerLoad(num_waiting_tokens=192, num_running=2, num_waiting=1))
    assert cost_blocks(it) == 15
    second = it.book(16)
    assert cost_blocks(it) == 17
    first.end()
    assert cost_blocks(it) == 17
    second.end()
    second.end()
    assert cost_blocks(it) == 15
    assert it.num_in_flight == 0


def test_equal_workers_take_turns():
    pool = [worker(f"w{i}") for i in range(3)]
    order = []
    for _ in range(6):
        chosen = least_loaded(pool)
        chosen.book(0).end()
        order.append(chosen.identity.worker_id)
    assert order == ["w0", "w1", "w2"] * 2


def test_a_death_is_told_once_and_not_to_those_who_left():
    it, told = worker("x"), []
    it.tell_death(lambda dead: told.append(("a", dead.cause_of_death)))
    leave = it.tell_death(lambda dead: told.append(("b", dead.cause_of_death)))
    leave()
    leave()
    it.die("unplugged")
    it.die("again")
    assert told == [("a", "unplugged")]
    assert it.state is WorkerState.DEAD
    it.report(WorkerLoad())
    assert it.state is WorkerState.DEAD
