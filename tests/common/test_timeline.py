"""The critical path: phases that are differences of neighbouring moments, and so add up to the whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.common import timeline
from pdserve.common.timeline import MOMENTS, PATH_PHASES, Timeline

MS = 1_000_000
REMOTE = {
    "arrived": 0, "tokenized": 1, "admitted": 2, "placed": 4, "attempted": 5, "prefill_queued": 8, "decode_queued": 9,
    "kv_reserved": 10, "prefill_started": 12, "kv_first_landed": 15, "prefill_computed": 20, "first_token": 21,
    "kv_landed": 23, "decode_started": 24, "decode_finished": 50, "finished": 52,
}  # fmt: skip


def timed(moments_ms: dict[str, int]) -> Timeline:
    times = Timeline()
    times.moments_unix_ns = {name: at * MS for name, at in moments_ms.items()}
    return times


def path_ms(moments_ms: dict[str, int], end_ms: int) -> dict[str, float]:
    phases = timed(moments_ms).critical_path(end_ms * MS)
    assert sum(phases.values()) == pytest.approx((end_ms - moments_ms["arrived"]) / 1e3)
    return {name: round(seconds * 1e3, 6) for name, seconds in phases.items()}


def test_through_prefill_and_decode() -> None:
    assert path_ms(REMOTE, 52) == {
        "tokenize": 1, "admission": 1, "route": 2, "prepare": 1, "dispatch": 3, "prefill_queue": 4, "prefill": 8,
        "kv_exposed": 3, "decode_queue": 1, "decode": 26, "deliver": 2,
    }  # fmt: skip


def test_waiting_for_room_at_decode_is_not_called_transfer() -> None:
    late = REMOTE | {"kv_reserved": 22, "kv_first_landed": 23}
    phases = path_ms(late, 52)
    assert phases["decode_reserve"] == 2
    assert phases["kv_exposed"] == 1
    assert list(phases) == [phase for phase in PATH_PHASES if phase in phases]


def test_decode_that_prefills_itself_exposes_nothing() -> None:
    local = {name: at for name, at in REMOTE.items() if name not in ("decode_queued", "kv_reserved", "kv_landed")}
    local |= {"decode_started": local["prefill_computed"]}
    assert path_ms(local, 52)["decode"] == 30
    assert path_ms(local, 52).get("kv_exposed", 0) == 0


def test_one_token_is_delivered_by_prefill() -> None:
    names = ("arrived", "tokenized", "admitted", "placed", "attempted", "prefill_queued", "prefill_started")
    one = {name: REMOTE[name] for name in (*names, "prefill_computed")} | {"first_token": 21, "finished": 21}
    assert path_ms(one, 21) == {
        "tokenize": 1, "admission": 1, "route": 2, "prepare": 1, "dispatch": 3, "prefill_queue": 4, "prefill": 8,
        "deliver": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("last", "phase"), [("arrived", "tokenize"), ("placed", "prepare"), ("prefill_started", "prefill")]
)
def test_a_request_cut_short_ends_within_a_phase(last: str, phase: str) -> None:
    cut = {name: at for name, at in REMOTE.items() if at <= REMOTE[last]}
    phases = path_ms(cut, 100)
    assert list(phases)[-1] == phase
    assert phases[phase] == 100 - REMOTE[last]


def test_a_new_attempt_forgets_what_workers_of_the_last_one_said() -> None:
    times = timed(REMOTE)
    times.begin_attempt()
    assert set(times.moments_unix_ns) == {"arrived", "tokenized", "admitted", "placed", "attempted", "first_token"}
    assert times.moments_unix_ns[timeline.ATTEMPTED] > times.moments_unix_ns[timeline.PLACED]


@given(st.sets(st.sampled_from(MOMENTS)), st.integers(0, 1000), st.randoms(use_true_random=False))
def test_whatever_was_seen_and_whatever_the_clocks_say_it_adds_up(
    seen: set[str], end_ms: int, draw: random.Random
) -> None:
    moments_ms = {name: draw.randrange(end_ms + 1) for name in seen} | {"arrived": 0}
    phases = timed(moments_ms).critical_path(end_ms * MS)
    assert sum(phases.values()) == pytest.approx(end_ms / 1e3)
    assert all(seconds >= 0 for seconds in phases.values())
    assert set(phases) <= set(PATH_PHASES)
