"""From the index to the calls: where requests go in a running router, and what `/debug/routing` says about it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pdserve.common import timeline as moments
from pdserve.common.block_hash import BlockHasher, placement_hash
from pdserve.common.errors import Evicted
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.common.settings.api_key_file import key_hash
from pdserve.common.timeline import Timeline
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.placement.placement import Placement, PlacementHint, PlacementRules, place
from pdserve.router.placement.routing_decision import LeftOut, RoutingDecision, RoutingLog, views
from pdserve.router.placement.transfer_bandwidth import DEFAULT_BYTES_PER_S, TransferBandwidth
from tests.router.candidates import seen, worker
from tests.router.fake_worker import ADMITTED, LAYOUT, decode_well, needs_prefill, play, said, tokens
from tests.support.models.kv_layouts import with_shape
from tests.support.run.waiting import HANG_S

LONG = "a_sentence_that_fills_some_blocks_of_sixteen_tokens,_and_the_same_for_all"


async def placements(cluster):
    """Newest first."""
    return (await cluster.http.get("/debug/routing")).json()["placements"]


async def test_a_prefix_draws_requests_to_the_workers_that_were_given_it(cluster):
    await cluster.start(prefill=3, decode=3)
    for number in range(6):
        assert await cluster.text(prompt=LONG + str(number)) == said(5)
    assert sorted(len(it.calls) for it in cluster.workers) == [0, 0, 0, 0, 6, 6]
    newest, *_, oldest = await placements(cluster)
    assert oldest["kind"] == newest["kind"] == "remote"
    overlaps = {it["worker_id"]: it["overlap_blocks"] for it in newest["candidates"]}
    assert overlaps[newest["prefill"]] == overlaps[newest["decode"]] == len(LONG) // 16
    assert sorted(overlaps.values())[:4] == [0, 0, 0, 0]


async def test_round_robin_takes_no_notice_of_it(cluster):
    await cluster.start(prefill=2, decode=3, policy="round_robin")
    for _ in range(6):
        await cluster.text(prompt=LONG)
    assert [len(it.calls) for it in cluster.workers] == [3, 3, 2, 2, 2]


async def test_what_decode_reports_to_hold_is_prefilled_there(cluster):
    await cluster.start()
    hasher = BlockHasher(DEVELOPMENT_KEY, LAYOUT.block_size)
    hashes = hasher.extend(hasher.root(LAYOUT.model_fingerprint), tokens(LONG))
    cluster.of("decode").tell_blocks(1, cleared=True, stored=b"".join(map(placement_hash, hashes)))
    await ask_until(cluster, LONG, lambda placement: placement["kind"] == "local")
    call = cluster.of("decode").calls[-1]
    assert not call.sent.decode.HasField("source")
    assert call.sent.decode.local_prefill_tokens == 16


async def ask_until(cluster, prompt, done):
    """Asks until the router, which hears of things a little later, places as it should."""
    async with asyncio.timeout(HANG_S):
        while True:
            assert await cluster.text(prompt=prompt) == said(5)
            if done((await placements(cluster))[0]):
                return


async def test_decode_says_no_and_prefill_does_it(cluster):
    """The router's view is old: decode has lost the blocks."""
    await cluster.start()
    decode = cluster.of("decode")
    decode.report(prefill_tokens_per_s=1000.0)
    cluster.of("prefill").report(prefill_tokens_per_s=1000.0, num_waiting_tokens=90_000)
    await ask_until(cluster, "x" * 40, lambda placement: placement["kind"] == "local")
    decode.scripts = [play(ADMITTED, needs_prefill(64))]
    assert await cluster.text(prompt=LONG) == said(5)
    local, remote = decode.calls[-2:]
    assert not local.sent.decode.HasField("source")
    assert local.sent.decode.local_prefill_tokens >= len(LONG)
    assert remote.sent.decode.HasField("source")
    assert not remote.sent.decode.HasField("local_prefill_tokens")
    assert [it["kind"] for it in (await placements(cluster))[:2]] == ["remote", "local"]
    assert [it["hint"] for it in (await placements(cluster))[:2]] == ["remote", "any"]


async def test_the_page_needs_a_key_and_tells_no_prompt(cluster, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nname = "ops"\nrole = "operator"\nsha256 = "{key_hash("secret")}"\n')
    await cluster.start(api_keys_file=str(file))
    headers = {"authorization": "Bearer secret"}
    ask = {"prompt": "tell nobody", "max_tokens": 5}
    assert (await cluster.http.post("/v1/completions", json=ask, headers=headers)).status_code == 200
    assert (await cluster.http.get("/debug/routing")).status_code == 401
    page = await cluster.http.get("/debug/routing", headers=headers)
    assert page.status_code == 200
    assert "nobody" not in page.text
    assert "secret" not in page.text
    [placement] = page.json()["placements"]
    assert placement["prompt_tokens"] == len("tell nobody")
    assert (placement["prefill"], placement["decode"], placement["policy"]) == ("prefill0", "decode0", "kv_aware")


async def test_who_was_left_out_and_why(cluster):
    odd = with_shape(LAYOUT, num_layers=7)
    await cluster.worker("prefill", worker_id="odd", layout=odd).start()
    leaving = await cluster.worker("decode", worker_id="leaving").start()
    await cluster.start()
    leaving.report(draining=True)
    await cluster.live(decode=1)
    await cluster.text()
    why = {(left["role"], left["worker"]): left["why"] for left in (await placements(cluster))[0]["left_out"]}
    assert why == {("prefill", "odd"): "its blocks differ from decode's", ("decode", "leaving"): "draining"}


async def test_a_blamed_worker_is_left_out_of_the_next_attempt(cluster):
    await cluster.start(prefill=1, decode=2)
    evict = play(ADMITTED, Evicted("no room"))
    for it in cluster.workers:
        if it.role == "decode":
            it.script = lambda w, c: (evict if c.sent.attempt == 0 else decode_well)(w, c)
    assert await cluster.text() == said(5)
    second, first = await placements(cluster)
    assert (first["attempt"], second["attempt"]) == (0, 1)
    assert second["decode"] != first["decode"]
    blamed = {"role": "decode", "worker": first["decode"], "why": "blamed by the last attempt"}
    assert second["left_out"] == [blamed]


def decision(**changes):
    prefill, decode = seen(worker("p", "prefill"), 100, 2), seen(worker("d"), 100, 5)
    fields = {
        "unix_s": 1.0,
        "request_id": "r",
        "attempt": 0,
        "policy": "kv_aware",
        "hint": PlacementHint.ANY,
        "num_tokens": 100,
        "placement": place(8, prefill=[prefill], decode=[decode], rules=PlacementRules()),
        "candidates": views(WorkerRole.PREFILL, [prefill]) + views(WorkerRole.DECODE, [decode]),
        "left_out": (LeftOut(role="decode", worker="x", why="draining"),),
    }
    return RoutingDecision(**{**fields, **changes})


def test_a_decision_as_attributes_is_flat():
    found = decision().attributes()
    assert all(isinstance(value, (str, int, float, bool, list)) for value in found.values())
    assert found["pdserve.route.kind"] == "remote"
    assert (found["pdserve.route.prefill_overlap_blocks"], found["pdserve.route.decode_overlap_blocks"]) == (2, 5)
    assert found["pdserve.route.left_out"] == ["decode x: draining"]
    assert found["pdserve.route.candidates"] == ["p", "d"]
    assert found["pdserve.route.candidates.role"] == ["prefill", "decode"]
    assert found["pdserve.route.candidates.overlap_blocks"] == [2, 5]
    assert found["pdserve.route.candidates.cost_blocks"][1] == 2.5
    alone = decision(placement=Placement(prefill=worker("p", "prefill")))
    assert alone.attributes()["pdserve.route.kind"] == "prefill-only"
    assert "pdserve.route.decode" not in alone.attributes()


def test_the_log_keeps_the_last():
    log = RoutingLog(length=2)
    for number in range(3):
        log.add(decision(request_id=str(number)))
    assert [entry["request_id"] for entry in log.content()] == ["2", "1"]
    msgspec.json.encode(log.content())


def test_bandwidth_is_what_transfers_add_to_a_request():
    bandwidth, seen_moments = TransferBandwidth(), Timeline()
    bandwidth.landed(1000, seen_moments)
    assert bandwidth.bytes_per_s == DEFAULT_BYTES_PER_S
    second = 10**9
    known = {moments.KV_RESERVED: second, moments.PREFILL_COMPUTED: 3 * second, moments.KV_LANDED: 5 * second}
    seen_moments.merge(known)
    bandwidth.landed(0, seen_moments)
    assert bandwidth.bytes_per_s == DEFAULT_BYTES_PER_S
    bandwidth.landed(1000, seen_moments)
    assert bandwidth.bytes_per_s == pytest.approx(500)
    # all came while the prompt was still computing
    seen_moments.merge({moments.KV_LANDED: 2 * second})
    bandwidth.landed(1000, seen_moments)
    assert bandwidth.bytes_per_s == pytest.approx(1900 / 1.8, rel=1e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize("rate", [5e-324, 1e308, float("inf"), float("nan"), -1.0])
async def test_a_reported_rate_that_no_worker_has_counts_as_unknown(cluster, rate):
    """An estimate that divides by it would overflow, and fail requests of others."""
    await cluster.start()
    for role in ("prefill", "decode"):
        cluster.of(role).report(prefill_tokens_per_s=rate, num_waiting_tokens=2**32 - 1)
    for _ in range(10):
        # reports come a little later
        assert await cluster.text() == said(5)
        await asyncio.sleep(0.02)
