"""The prefix index against a plain model of it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.common.kv_events import WorkerKey
from pdserve.router.placement.prefix_index import SPECULATIVE_S, PrefixIndex

WORKERS: list[WorkerKey] = [("a", 1), ("b", 2), ("c", 3), ("a", 4)]


def chain(*names: int) -> list[bytes]:
    return [bytes([name]) for name in names]


def naive(held: dict[WorkerKey, set[bytes]], hashes: list[bytes], worker: WorkerKey) -> int:
    length = 0
    while length < len(hashes) and hashes[length] in held.get(worker, set()):
        length += 1
    return length


def test_the_longest_prefix_of_each_worker() -> None:
    index = PrefixIndex()
    index.stored(WORKERS[0], chain(1, 2, 3))
    index.stored(WORKERS[1], chain(1, 3))
    assert index.match(chain(1, 2, 3, 4), WORKERS[:3], 0.0) == {WORKERS[0]: 3, WORKERS[1]: 1, WORKERS[2]: 0}


def test_a_hole_ends_a_prefix() -> None:
    index = PrefixIndex()
    index.stored(WORKERS[0], chain(1, 3, 4))
    assert index.match(chain(1, 2, 3, 4), WORKERS[:1], 0.0) == {WORKERS[0]: 1}


def test_the_last_state_is_a_prefix_whatever_is_missing_before() -> None:
    index = PrefixIndex()
    index.stored(WORKERS[0], chain(3))
    index.stored(WORKERS[1], chain(1, 3, 4, 9))
    index.stored(WORKERS[2], chain(8))
    found = index.reported(chain(1, 2, 3, 4, 5), WORKERS, last_suffices=True)
    assert found == {WORKERS[0]: 3, WORKERS[1]: 4, WORKERS[2]: 0, WORKERS[3]: 0}
    index.removed(WORKERS[1], chain(4))
    assert index.reported(chain(1, 2, 3, 4, 5), WORKERS[1:2], last_suffices=True) == {WORKERS[1]: 3}


def test_what_was_routed_counts_for_a_while() -> None:
    index = PrefixIndex()
    index.stored(WORKERS[0], chain(1))
    index.routed(WORKERS[0], chain(1, 2, 3), now_s=10.0)
    assert index.match(chain(1, 2, 3, 4), WORKERS[:1], 10.0 + SPECULATIVE_S / 2) == {WORKERS[0]: 3}
    assert index.match(chain(1, 2, 3, 4), WORKERS[:1], 10.1 + SPECULATIVE_S) == {WORKERS[0]: 1}


def test_a_worker_that_is_gone_leaves_nothing_behind() -> None:
    index = PrefixIndex()
    index.stored(WORKERS[0], chain(1, 2))
    index.routed(WORKERS[0], chain(1, 2, 3), now_s=0.0)
    index.cleared(WORKERS[0])
    assert len(index) == 0
    assert index.match(chain(1, 2, 3), WORKERS[:1], 0.0) == {WORKERS[0]: 0}


operations = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed", "cleared"]),
        st.sampled_from(WORKERS),
        st.lists(st.integers(0, 12), max_size=6),
    ),
    max_size=30,
)


@settings(max_examples=200)
@given(operations, st.lists(st.integers(0, 12), max_size=8, unique=True))
def test_it_equals_the_plain_model(history: list[tuple[str, WorkerKey, list[int]]], prompt: list[int]) -> None:
    index, held = PrefixIndex(), dict[WorkerKey, set[bytes]]()
    for what, worker, names in history:
        hashes = chain(*names)
        if what == "stored":
            index.stored(worker, hashes)
            held.setdefault(worker, set()).update(hashes)
        elif what == "removed":
            index.removed(worker, hashes)
            held.get(worker, set()).difference_update(hashes)
        else:
            index.cleared(worker)
            held.pop(worker, None)
    hashes = chain(*prompt)
    assert index.match(hashes, WORKERS, 0.0) == {worker: naive(held, hashes, worker) for worker in WORKERS}
    assert len(index) == len(set().union(*held.values())) if held else len(index) == 0
