"""Placement: pure decisions over workers as they stand."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.common.protocol import PROTOCOL_VERSION
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.placement.placement import (
    POLICIES,
    Placement,
    PlacementHint,
    PlacementRules,
    choose,
    compatible_prefill_workers,
    estimate,
    place,
)
from pdserve.router.workers import worker as worker_module
from pdserve.router.workers.worker import LoadEstimate, WorkerLoad, WorkerState
from tests.router.candidates import seen, worker
from tests.router.fake_worker import LAYOUT
from tests.support.models.kv_layouts import with_shape

P1, P2 = worker("p1", "prefill"), worker("p2", "prefill", num_waiting_tokens=160)
D1, D2 = worker("d1", blocks_in_use=1), worker("d2", blocks_in_use=4)
OTHER = worker("other", "prefill", layout=with_shape(LAYOUT, num_layers=9))
NEWER = worker("newer", "prefill", protocol_version=PROTOCOL_VERSION + 2)
CAPPED = worker("capped", limit=10)
TOKEN_BYTES = LAYOUT.shapes[0].block_bytes / LAYOUT.block_size


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
        ([NEWER], [D1], {}, (None, "d1", True)),
        ([P1], [D1], {"local_prefill": "always"}, (None, "d1", False)),
        ([P1], [CAPPED], {"local_prefill": "always"}, ("p1", "capped", False)),
        ([], [CAPPED], {"local_prefill": "always"}, (None, "capped", True)),
        ([], [D1], {"local_prefill": "never"}, (None, None, None)),
        ([OTHER], [D1], {"local_prefill": "never"}, (None, None, None)),
        ([P1], [D1], {"local_prefill": "never", "hint": PlacementHint.LOCAL}, ("p1", "d1", False)),
        ([P1], [D1], {"hint": PlacementHint.LOCAL}, (None, "d1", False)),
        ([P1], [CAPPED], {"hint": PlacementHint.LOCAL}, ("p1", "capped", False)),
        ([P1], [D1], {"hint": PlacementHint.REMOTE, "local_prefill": "always"}, ("p1", "d1", False)),
        ([], [D1], {"hint": PlacementHint.REMOTE}, (None, "d1", True)),
        ([P1, P2], [D1], {"blamed": {("p1", 1)}}, ("p2", "d1", False)),
        ([P1], [D1], {"blamed": {("p1", 1)}}, (None, "d1", False)),
        ([P1], [D1], {"blamed": {("p1", 1)}, "local_prefill": "never"}, ("p1", "d1", False)),
        ([P1], [D1], {"blamed": {("p1", 1)}, "hint": PlacementHint.REMOTE}, ("p1", "d1", False)),
        ([P1], [D1, D2], {"blamed": {("d1", 1)}}, ("p1", "d2", False)),
        ([P1], [D1], {"blamed": {("d1", 1)}}, ("p1", "d1", False)),
        ([P1], [D1], {"max_tokens": 1}, ("p1", None, False)),
        ([], [D1], {"max_tokens": 1}, (None, "d1", True)),
        ([P1], [], {"max_tokens": 1}, ("p1", None, False)),
        ([P1, P2], [D1], {"max_tokens": 1, "blamed": {("p1", 1)}}, ("p2", None, False)),
        ([P1], [D1], {"max_tokens": 1, "blamed": {("p1", 1)}}, (None, "d1", False)),
        ([P1], [], {"max_tokens": 1, "blamed": {("p1", 1)}}, ("p1", None, False)),
        ([P1], [D1], {"max_tokens": 1, "blamed": {("p1", 1)}, "local_prefill": "never"}, ("p1", None, False)),
        ([P1], [D1], {"max_tokens": 1, "local_prefill": "always"}, (None, "d1", False)),
        ([], [D1], {"max_tokens": 1, "local_prefill": "never"}, (None, None, None)),
    ],
)
def test_place(prefill, decode, options, expected):
    options = {"max_tokens": 8, **options}
    max_tokens = options.pop("max_tokens")
    placed = place(
        max_tokens,
        prefill=[seen(w) for w in prefill],
        decode=[seen(w) for w in decode],
        rules=PlacementRules(**options),
    )
    assert ids(placed) == expected


# ---- policies


def test_a_cached_block_outweighs_eight_that_are_held():
    has_it = seen(worker("a", blocks_in_use=47), 100, overlap=6)
    has_nothing = seen(worker("b"), 100)
    rules = {name: PlacementRules(policy=name) for name in POLICIES}
    pool = [has_nothing, has_it]
    assert choose(pool, WorkerRole.DECODE, rules["kv_aware"]) is has_it
    assert choose(pool, WorkerRole.DECODE, rules["least_loaded"]) is has_nothing
    busier = seen(worker("a", blocks_in_use=49), 100, overlap=6)
    assert choose([has_nothing, busier], WorkerRole.DECODE, rules["kv_aware"]) is has_nothing


def test_round_robin_goes_by_the_turns_of_the_role_whatever_the_order():
    pool = [seen(worker(name, blocks_in_use=load)) for name, load in (("c", 0), ("a", 9), ("b", 5))]
    chosen = [
        choose(pool, WorkerRole.PREFILL, PlacementRules(policy="round_robin", turns={WorkerRole.PREFILL: turn}))
        for turn in range(5)
    ]
    assert [each.worker.identity.worker_id for each in chosen if each is not None] == ["a", "b", "c", "a", "b"]


def test_equal_workers_take_turns():
    pool = [worker(f"w{i}") for i in range(3)]
    order = []
    for _ in range(6):
        found = choose([seen(it) for it in pool], WorkerRole.DECODE, PlacementRules())
        assert found is not None
        chosen = found.worker
        chosen.reserve(LoadEstimate(calls=1)).end()
        order.append(chosen.identity.worker_id)
    assert order == ["w0", "w1", "w2"] * 2


def test_blocks_of_another_size_cost_what_their_tokens_cost():
    small = seen(worker("s", layout=msgspec.structs.replace(LAYOUT, block_size=8), blocks_in_use=4), 64, overlap=2)
    large = seen(worker("l", blocks_in_use=2), 64, overlap=1)
    assert small.cost_blocks == large.cost_blocks == 6.5


loads = st.fixed_dictionaries(
    {
        "num_waiting_tokens": st.integers(0, 2000),
        "blocks_in_use": st.integers(0, 100),
        "num_running": st.integers(0, 20),
    }
)
LAYOUTS = [
    LAYOUT,
    with_shape(LAYOUT, num_layers=9),
    msgspec.structs.replace(LAYOUT, model_fingerprint="z" * 32),
]


@st.composite
def pools(draw, role, most=5):
    """Candidates of one role, for a prompt of 320 tokens."""
    made = []
    for number in range(draw(st.integers(0, most))):
        it = worker(
            f"{role}{number}",
            role,
            layout=draw(st.sampled_from(LAYOUTS)),
            protocol_version=draw(st.sampled_from([1, 1, 1, 2, 3])),
            sampler_version=draw(st.sampled_from([1, 2])),
            limit=draw(st.sampled_from([None, None, 0, 100])),
            prefill_tokens_per_s=draw(st.sampled_from([0.0, 100.0, 5000.0])),
            **draw(loads),
        )
        overlap = draw(st.integers(0, 20))
        made.append(seen(it, 320, overlap, draw(st.integers(0, overlap))))
    return made


@st.composite
def situations(draw):
    prefill, decode = draw(pools("prefill")), draw(pools("decode"))
    keys = [candidate.worker.key for candidate in (*prefill, *decode)]
    rules = PlacementRules(
        policy=draw(st.sampled_from(list(POLICIES))),
        local_prefill=draw(st.sampled_from(["never", "auto", "always"])),
        hint=draw(st.sampled_from(list(PlacementHint))),
        blamed=frozenset(draw(st.sets(st.sampled_from(keys))) if keys else ()),
        sampler_version=draw(st.sampled_from([None, 1, 2, 3])),
        turns={role: draw(st.integers(0, 9)) for role in WorkerRole},
        bytes_per_s=draw(st.sampled_from([1e3, 1e9])),
    )
    return prefill, decode, rules, draw(st.sampled_from([1, 8]))


@given(situations())
def test_whatever_the_situation_a_placement_is_sound(situation):
    prefill, decode, rules, max_tokens = situation
    placed = place(max_tokens, prefill=prefill, decode=decode, rules=rules)
    if placed is None:
        assert not decode or rules.local_prefill == "never"
        return
    if rules.hint is PlacementHint.SESSION:
        assert placed.kind == "local"
        assert rules.local_prefill != "never"
        return
    if placed.prefill and placed.decode:
        assert placed.prefill.identity.layout == placed.decode.identity.layout
        versions = placed.prefill.identity.protocol_version, placed.decode.identity.protocol_version
        assert max(versions) - min(versions) <= 1
        if placed.prefill.key in rules.blamed:
            assert rules.local_prefill == "never" or rules.hint is PlacementHint.REMOTE
            mine = next(c for c in decode if c.worker is placed.decode)
            assert {c.worker.key for c in compatible_prefill_workers(mine, prefill)} <= rules.blamed
    if rules.local_prefill == "never" and placed.decode:
        assert placed.prefill is not None
    if placed.kind == "local" and not placed.prefill_here:
        assert placed.decode is not None
        limit = placed.decode.identity.max_local_prefill_tokens
        mine = next(c for c in decode if c.worker is placed.decode)
        assert limit is None or mine.unconfirmed_tokens <= limit or {c.worker.key for c in prefill} & rules.blamed
        assert rules.local_prefill != "never"
    if placed.kind == "remote" and (rules.local_prefill == "never" or rules.hint is PlacementHint.REMOTE):
        assert placed.local_prefill_tokens is None


@given(pools("decode"), st.data(), st.sampled_from(list(POLICIES)))
def test_a_blamed_worker_is_chosen_only_when_there_is_no_other(pool, data, policy):
    keys = [candidate.worker.key for candidate in pool]
    blamed = data.draw(st.sets(st.sampled_from(keys))) if keys else set()
    chosen = choose(pool, WorkerRole.DECODE, PlacementRules(policy=policy, blamed=blamed))
    if not pool:
        assert chosen is None
        return
    assert chosen is not None
    if chosen.worker.key in blamed:
        assert blamed == set(keys)
        assert choose(pool, WorkerRole.DECODE, PlacementRules(policy=policy, blamed=blamed), strict=True) is None


@given(pools("decode"), st.data(), st.sampled_from(list(POLICIES)), st.sampled_from([1, 2]))
def test_a_worker_with_the_same_sampler_goes_first_and_is_never_needed(pool, data, policy, version):
    keys = [candidate.worker.key for candidate in pool]
    blamed = data.draw(st.sets(st.sampled_from(keys))) if keys else set()
    rules = PlacementRules(policy=policy, blamed=blamed, sampler_version=version)
    chosen = choose(pool, WorkerRole.DECODE, rules)
    assert (chosen is None) == (not pool)
    left = [candidate for candidate in pool if candidate.worker.key not in blamed] or pool
    alike = [candidate for candidate in left if candidate.worker.identity.sampler_version == version]
    assert chosen is choose(alike or left, WorkerRole.DECODE, PlacementRules(policy=policy, blamed=blamed))


def test_a_placement_names_the_samplers_of_its_workers():
    p, d = worker("p", "prefill", sampler_version=1), worker("d", sampler_version=2)
    both = Placement(prefill=p, decode=d)
    assert (both.sampler_version, both.sampler_versions) == (2, {1, 2})
    alone = Placement(prefill=p)
    assert (alone.sampler_version, alone.sampler_versions) == (1, {1})


@given(pools("decode").filter(bool), st.integers(0, 20))
def test_more_overlap_never_makes_kv_aware_turn_away(pool, more):
    chosen = choose(pool, WorkerRole.DECODE, PlacementRules())
    assert chosen is not None
    better = msgspec.structs.replace(chosen, overlap_blocks=min(20, chosen.overlap_blocks + more))
    again = choose([better if it is chosen else it for it in pool], WorkerRole.DECODE, PlacementRules())
    assert again is better
    least = choose(pool, WorkerRole.DECODE, PlacementRules(policy="least_loaded"))
    assert least is not None
    assert least.load_blocks == min(it.load_blocks for it in pool)


@given(pools("decode").filter(bool))
def test_the_same_situation_gives_the_same_choice(pool):
    for policy in POLICIES:
        rules = PlacementRules(policy=policy, turns={WorkerRole.DECODE: 3})
        assert choose(pool, WorkerRole.DECODE, rules) is choose(list(pool), WorkerRole.DECODE, rules)


# ---- local or remote


def rated(name, role, rate, **load):
    return worker(name, role, prefill_tokens_per_s=rate, **load)


def at_decode(rate, num_tokens=1000, overlap=0, confirmed=None, **load):
    return seen(rated("d", "decode", rate, **load), num_tokens, overlap, confirmed)


def at_prefill(rate, num_tokens=1000, overlap=0, **load):
    return seen(rated("p", "prefill", rate, **load), num_tokens, overlap)


BUSY = {"num_waiting_tokens": 5000}
FAST, SLOW = 1e9, TOKEN_BYTES * 500
"""Networks, bytes a second; over the slow one blocks come slower than they are computed."""


@pytest.mark.parametrize(
    ("decode", "source", "bytes_per_s", "kind"),
    [
        pytest.param(at_decode(0.0), at_prefill(1e3), FAST, "remote", id="no rate at decode"),
        pytest.param(at_decode(1e3), at_prefill(0.0), FAST, "remote", id="no rate at prefill"),
        pytest.param(
            at_decode(0.0), at_prefill(1e3, **BUSY), FAST, "local", id="no rate at decode, a queue at prefill"
        ),
        pytest.param(
            at_decode(1e3), at_prefill(0.0, **BUSY), FAST, "local", id="a queue at prefill, whose rate is unknown"
        ),
        pytest.param(at_decode(0.0), at_prefill(0.0, **BUSY), FAST, "remote", id="no rates, a queue at prefill"),
        pytest.param(at_decode(1e3), at_prefill(1e3), FAST, "remote", id="equal and idle"),
        pytest.param(at_decode(1e3), at_prefill(1e3, **BUSY), FAST, "local", id="a queue at prefill"),
        pytest.param(at_decode(1e3, num_running=8), at_prefill(1e3, **BUSY), FAST, "remote", id="streams would stand"),
        pytest.param(at_decode(1e3, 1000, 50), at_prefill(1e3), FAST, "local", id="most is cached at decode"),
        pytest.param(at_decode(1e3, 1000, 50), at_prefill(1e3, 1000, 50), FAST, "remote", id="cached at both"),
        pytest.param(at_decode(1e3, 1000, 50, 0), at_prefill(1e3), FAST, "remote", id="only expected at decode"),
        pytest.param(at_decode(1e3), at_prefill(1e3), SLOW, "local", id="a slow network"),
        pytest.param(at_decode(0.0, 992, 62, num_running=50), at_prefill(0.0, 992, 62), FAST, "local", id="last token"),
        pytest.param(at_decode(0.0, 1000, 62), at_prefill(0.0, 1000, 62), FAST, "local", id="less than a block"),
        pytest.param(at_decode(0.0, 12), at_prefill(0.0, 12), FAST, "remote", id="short and nothing cached"),
    ],
)
def test_local_or_remote(decode, source, bytes_per_s, kind):
    placed = place(8, prefill=[source], decode=[decode], rules=PlacementRules(bytes_per_s=bytes_per_s))
    assert placed is not None
    assert placed.kind == kind
    assert placed.estimates is not None
    limit = placed.estimates.limit_tokens
    assert limit is not None
    assert placed.local_prefill_tokens == limit >= 16
    never = place(
        8, prefill=[source], decode=[decode], rules=PlacementRules(bytes_per_s=bytes_per_s, local_prefill="never")
    )
    assert never is not None
    assert (never.kind, never.local_prefill_tokens) == ("remote", None)


@given(st.data(), st.floats(1, 1e5), st.floats(1, 1e5), st.integers(17, 4000), st.floats(1e6, 1e10))
def test_the_limit_is_where_both_estimates_meet(data, rate_d, rate_p, num_tokens, bandwidth):
    load = {"num_waiting_tokens": data.draw(st.integers(0, 4000)), "num_running": data.draw(st.integers(0, 20))}
    source = at_prefill(rate_p, num_tokens, num_waiting_tokens=data.draw(st.integers(0, 4000)))
    decode = at_decode(rate_d, num_tokens, data.draw(st.integers(0, num_tokens // 16)), **load)
    found = estimate(decode, source, bandwidth)
    assert found.limit_tokens is not None
    assert found.local_s is not None
    assert found.remote_s is not None
    uncached = decode.unconfirmed_tokens
    transfer_is_faster = TOKEN_BYTES / bandwidth < (2 + load["num_running"]) / rate_d
    if uncached > 16 and transfer_is_faster and found.local_s != pytest.approx(found.remote_s):
        assert (uncached <= found.limit_tokens) == (found.local_s < found.remote_s)


def test_the_estimates_are_what_the_formulas_say():
    decode = seen(rated("d", "decode", 1000.0, num_running=3, num_waiting_tokens=200), 800, overlap=40)
    source = seen(rated("p", "prefill", 2000.0, num_waiting_tokens=400), 800, overlap=10)
    found = estimate(decode, source, TOKEN_BYTES * 1600)
    assert found.local_s == pytest.approx((200 + 160 * 5) / 1000)
    assert found.remote_s == pytest.approx((400 + 640) / 2000 + 160 / 1600)
    assert found.limit_tokens == int((0.52 - 0.2) / (0.005 - 1 / 1600))
    capped = worker("c", limit=30, prefill_tokens_per_s=1000.0)
    assert estimate(seen(capped, 800, 40), source, 1e9).limit_tokens == 30


@pytest.mark.parametrize(("rate_d", "rate_p"), [(0.0, 1500.0), (1500.0, 0.0)])
def test_an_unknown_rate_is_the_other_workers(rate_d, rate_p):
    found = estimate(at_decode(rate_d, num_running=2), at_prefill(rate_p, num_waiting_tokens=300), FAST)
    known = estimate(at_decode(1500.0, num_running=2), at_prefill(1500.0, num_waiting_tokens=300), FAST)
    assert found == known
    assert found.local_s is not None
    neither = estimate(at_decode(0.0), at_prefill(0.0), FAST)
    assert (neither.local_s, neither.remote_s, neither.limit_tokens) == (None, None, 16)


# ---- the router's account


def test_the_account_is_its_own_calls_and_what_reports_show_beyond_them(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(worker_module, "clock", SimpleNamespace(monotonic=lambda: now[0]))
    it = worker("x", num_waiting_tokens=160, num_running=2, blocks_in_use=20)
    assert (it.waiting_tokens, it.num_requests, it.held_blocks) == (160, 2, 20)
    first = it.reserve(LoadEstimate(calls=1, tokens=32, all_blocks=10, new_blocks=2))
    assert (it.waiting_tokens, it.num_requests, it.held_blocks) == (192, 3, 22)
    it.report(WorkerLoad(num_waiting_tokens=192, num_running=2, num_waiting=1, blocks_in_use=30))
    assert (it.waiting_tokens, it.num_requests, it.held_blocks) == (192, 3, 22)
    first.computed()
    first.computed()
    assert (it.waiting_tokens, it.held_blocks) == (160, 22)
    first.end()
    first.end()
    assert (it.waiting_tokens, it.num_requests, it.held_blocks) == (160, 2, 20)
    assert it.num_in_flight == 0
    # a report that was written before the call ended shows nothing of others
    it.report(WorkerLoad(blocks_in_use=10, num_running=1, num_waiting_tokens=32))
    assert (it.waiting_tokens, it.num_requests, it.held_blocks) == (0, 0, 0)
    now[0] += 1
    it.report(WorkerLoad(blocks_in_use=10, num_running=1))
    assert (it.num_requests, it.held_blocks) == (1, 10)


def test_a_shared_prefix_is_counted_once():
    it = worker("x")
    shared = seen(it, 100, overlap=6).share(prefills=True, grows=False)
    assert shared == LoadEstimate(calls=1, tokens=4, all_blocks=7, new_blocks=1)
    assert seen(it, 100, overlap=6).share(prefills=False, grows=True) == LoadEstimate(
        calls=1, all_blocks=8, new_blocks=2
    )
    reservation = it.reserve(shared)
    it.report(WorkerLoad(blocks_in_use=7, num_running=1, num_waiting_tokens=4))
    assert it.held_blocks == 1
    reservation.end()


def test_a_death_is_told_once_and_not_to_those_who_left():
    it, told = worker("x"), []
    it.subscribe_lost(lambda dead: told.append(("a", dead.cause_of_death)))
    leave = it.subscribe_lost(lambda dead: told.append(("b", dead.cause_of_death)))
    leave()
    leave()
    it.mark_lost("unplugged")
    it.mark_lost("again")
    assert told == [("a", "unplugged")]
    assert it.state is WorkerState.DEAD
    it.report(WorkerLoad())
    assert it.state is WorkerState.DEAD
