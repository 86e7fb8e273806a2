"""`/debug/status`, `/debug/requests/{request_id}` and the page that shows them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from pdserve.common import timeline as moments
from pdserve.common.errors import NotFound
from pdserve.common.request.cached_tokens import CACHED_SOURCES, NOTHING_CACHED, CachedTokens
from pdserve.common.timeline import Timeline
from pdserve.router.placement.block_moves import MOVE_OUTCOMES
from pdserve.router.telemetry.metric_text import without_label
from pdserve.router.telemetry.request_log import KEPT_REQUESTS, KEPT_S, AskedRequest, LoggedRequest, RequestLog
from pdserve.router.telemetry.request_trace import PromptTrace, RequestTrace
from pdserve.router.telemetry.router_metrics import RouterMetrics
from pdserve.router.telemetry.status_view import MAX_SLOWEST, MAX_WORKERS, MovesView, RequestView, StatusView
from pdserve.router.tenants.client import ANYBODY, Client
from pdserve.router.workers.fleet import Fleet
from tests.router.conftest import Cluster
from tests.router.fake_worker import ADMITTED, forever, play
from tests.router.test_tenants import PROMPT, complete, headers, keys_file

METRICS = RouterMetrics(CollectorRegistry(), lambda: 0, dict, lambda: 0)
ALICE, BOB = Client(key_name="a", tenant="alice"), Client(key_name="b", tenant="bob")


async def status(cluster: Cluster, name: str | None = None) -> StatusView:
    answer = await cluster.http.get("/debug/status", headers=headers(name) if name else {})
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=StatusView)


async def trace(cluster: Cluster, request_id: str, name: str | None = None) -> RequestView:
    answer = await cluster.http.get(f"/debug/requests/{request_id}", headers=headers(name) if name else {})
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=RequestView)


async def test_an_operator_sees_the_fleet_and_each_request_with_its_phases(cluster):
    missing = cluster.worker("decode", worker_id="never-started")
    await cluster.start(wait=False)
    await cluster.live(prefill=1, decode=1)
    answer = await cluster.complete(PROMPT, max_tokens=5)
    await cluster.idle()
    view = await status(cluster)
    assert (view.sees_all, view.healthy, view.num_workers) == (True, True, 3)
    assert {(worker.role, worker.worker_id, worker.state) for worker in view.workers} == {
        ("prefill", "prefill0", "live"),
        ("decode", "decode1", "live"),
        ("decode", missing.address, "absent"),
    }
    assert view.queue.num_running == view.queue.num_queued == 0
    assert view.recent.num_requests == 1
    assert view.recent.output_tokens_per_s == pytest.approx(5 / view.recent.window_s)
    assert view.moves == MovesView(blocks=dict.fromkeys(MOVE_OUTCOMES, 0), requests={"moved": 0, "failed": 0})
    [request] = view.slowest
    assert (request.num_cached_tokens, request.cached_tokens) == (3, CachedTokens(pool=3))
    assert (view.recent.num_prompt_tokens, view.recent.cached_tokens) == (
        request.num_prompt_tokens,
        CachedTokens(pool=3),
    )
    assert (request.prefill, request.decode, request.outcome, request.num_output_tokens) == (
        "prefill0",
        "decode1",
        "length",
        5,
    )
    assert request.num_prompt_tokens == answer.json()["usage"]["prompt_tokens"]
    path = [phase for phase in request.phases if not phase.overlaps]
    assert sum(phase.duration_s for phase in path) == pytest.approx(request.duration_s, abs=1e-6)
    assert [phase.start_s for phase in path] == sorted(phase.start_s for phase in path)
    for name in (request.request_id, answer.json()["id"], f"{request.request_id}.0.0"):
        assert await trace(cluster, name) == request


async def test_a_request_under_way_is_seen_with_its_age(cluster):
    await cluster.start()
    cluster.of("decode").script = play(ADMITTED, forever)
    asking = asyncio.create_task(cluster.complete())
    await cluster.of("decode").called(1)
    [request] = (await status(cluster)).slowest
    assert request.outcome == ""
    assert (await trace(cluster, request.request_id)).duration_s > request.duration_s > 0
    asking.cancel()
    await cluster.idle()
    assert (await trace(cluster, request.request_id)).outcome == "cancelled"
    view = await status(cluster)
    assert (view.slowest, view.errors) == ([], {}), "its client chose how long it took"
    assert (view.recent.num_requests, view.recent.failed_per_s, view.recent.duration_p50_s) == (1, 0, None)


async def test_a_tenant_sees_only_its_own_requests_and_no_workers(cluster, tmp_path):
    file = keys_file(tmp_path, alice="", bob="", ops='role = "operator"')
    await cluster.start(api_keys_file=file)
    for name in ("alice", "bob", "bob"):
        assert (await complete(cluster, name)).status_code == 200
    await cluster.idle()
    seen = {name: await status(cluster, name) for name in ("alice", "bob", "ops")}
    assert {name: len(view.slowest) for name, view in seen.items()} == {"alice": 1, "bob": 2, "ops": 3}
    assert {name: view.recent.num_requests for name, view in seen.items()} == {"alice": 1, "bob": 2, "ops": 3}
    own = seen["alice"]
    assert not own.sees_all
    assert (own.workers, own.tenants, own.errors, own.num_workers, own.num_indexed_blocks) == ([], [], {}, 0, 0)
    assert own.queue.num_places is own.recent.cached_fraction is None
    [request] = own.slowest
    assert (request.prefill, request.decode, request.num_cached_tokens) == ("", "", None)
    assert request.cached_tokens is own.recent.cached_tokens is None
    assert own.moves == MovesView()
    assert {tenant.tenant for tenant in seen["ops"].tenants} >= {"alice", "bob"}
    assert (await trace(cluster, request.request_id, "ops")).decode == "decode0"
    assert (await trace(cluster, request.request_id, "alice")) == request
    refused = await cluster.http.get(f"/debug/requests/{request.request_id}", headers=headers("bob"))
    unknown = await cluster.http.get("/debug/requests/0123", headers=headers("bob"))
    assert refused.status_code == unknown.status_code == 404
    assert "the last 1024 requests for 600 s" in unknown.json()["error"]["message"]
    assert refused.json()["error"]["message"].replace(request.request_id, "0123") == unknown.json()["error"]["message"]
    for path in ("/debug/status", f"/debug/requests/{request.request_id}"):
        assert (await cluster.http.get(path)).status_code == 401
    assert (await cluster.http.get("/")).status_code == 200


async def test_a_refused_request_counts_among_the_errors(cluster):
    await cluster.start()
    assert (await cluster.complete(max_tokens=0)).status_code == 400
    assert (await status(cluster)).errors == {"invalid_request": 1}


async def test_the_answer_of_a_large_fleet_is_bounded(cluster, monkeypatch):
    await cluster.start()
    absent = Fleet.absent
    monkeypatch.setattr(
        Fleet,
        "absent",
        lambda fleet: (
            [*absent(fleet)]
            + [(role, f"h:{n}", "x" * 9999) for n in range(999) for role in [next(iter(fleet.lives())).identity.role]]
        ),
    )
    view = await status(cluster)
    assert (view.num_workers, len(view.workers)) == (1001, MAX_WORKERS)
    assert max(len(worker.cause) for worker in view.workers) == 200


async def test_the_page_is_one_file_whose_policy_names_its_parts(cluster):
    await cluster.start()
    page = await cluster.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    for tag, name in (("style", "style-src"), ("script", "script-src")):
        [content] = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        assert policy[name] == f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    assert not re.search(
        r"\son\w+=|\sstyle=|https?:|//[a-z]|innerHTML|outerHTML|insertAdjacent|document\.write|localStorage|cookie|eval",
        page.text,
    )
    assert re.findall(r'(?:src|href)="([^"]*)"', page.text) == ["data:,"]
    assert page.headers["cache-control"] == "no-store"


class Clock:
    """Unix time in nanoseconds, which a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> int:
        return int(self.now_s * 1e9)


def ended(log: RequestLog, clock: Clock, request_id: str, duration_s: float, client: Client = ALICE) -> None:
    record = RequestTrace(METRICS, clock(), None, {})
    asked = AskedRequest(
        request_id=request_id, client_request_id="", operation="chat", client=client, arrived_unix_ns=clock()
    )
    log.began(record, asked)
    record.runs.append(run := PromptTrace(record, Timeline()))
    clock.now_s += duration_s
    run.timeline.moments_unix_ns |= {moments.ARRIVED: asked.arrived_unix_ns, moments.FINISHED: clock()}
    run.finish_reason = "stop"
    log.ended(record)


def test_cached_tokens_are_added_up_by_source_over_prompts_and_requests():
    log = RequestLog(clock=(clock := Clock()))
    metrics = RouterMetrics(registry := CollectorRegistry(), lambda: 0, dict, lambda: 0)
    for number, prompts in enumerate(
        [[CachedTokens(pool=64, peer=32)], [CachedTokens(store=8), CachedTokens(pool=999)]]
    ):
        record = RequestTrace(metrics, clock(), None, {})
        asked = AskedRequest(
            request_id=f"{number}", client_request_id="", operation="chat", client=ALICE, arrived_unix_ns=clock()
        )
        log.began(record, asked)
        for cached in prompts:
            run = PromptTrace(record, Timeline())
            record.runs.append(run)
            run.timeline.moments_unix_ns |= {moments.ARRIVED: clock(), moments.FINISHED: clock()}
            run.num_prompt_tokens = 100
            run.relayed(0, 1, cached)
            run.relayed(0, 1, NOTHING_CACHED)
            run.finish_reason = "stop"
            run.count(clock())
        log.ended(record)
    assert [log.find(name, ANYBODY).cached_tokens for name in "01"] == [
        CachedTokens(pool=64, peer=32),
        CachedTokens(pool=100, store=8),
    ]
    recent = log.recent(ANYBODY)
    assert (recent.num_prompt_tokens, recent.cached_tokens) == (300, CachedTokens(pool=164, store=8, peer=32))
    assert recent.cached_fraction == pytest.approx(204 / 300)
    counted = {
        source: registry.get_sample_value("pdserve_cached_prompt_tokens_total", {"source": source})
        for source in CACHED_SOURCES
    }
    assert counted == {"pool": 164, "host": 0, "store": 8, "peer": 32}


def test_moves_of_running_requests_have_a_median_pause():
    metrics = RouterMetrics(CollectorRegistry(), lambda: 0, dict, lambda: 0)
    assert (metrics.migration_counts(), metrics.median_migration_pause_s) == ({"moved": 0, "failed": 0}, None)
    for pause_s in (0.1, None, 0.3, 0.2):
        metrics.migrated(pause_s)
    assert (metrics.migration_counts(), metrics.median_migration_pause_s) == ({"moved": 3, "failed": 1}, 0.2)


def test_the_log_forgets_by_number_and_by_age():
    log = RequestLog(clock=(clock := Clock()))
    for number in range(KEPT_REQUESTS + 1):
        ended(log, clock, f"{number}", 0.01)
    with pytest.raises(NotFound, match="no request '0' is known"):
        log.find("0", ALICE)
    assert log.find("1", ALICE).outcome == "stop"
    # the log holds less than the window: rates are taken over what it holds
    assert log.recent(ANYBODY).requests_per_s == pytest.approx(100, rel=0.01)
    assert log.recent(ALICE).requests_per_s == pytest.approx(100, rel=0.01)
    clock.now_s += KEPT_S
    ended(log, clock, "new", 0.01)
    with pytest.raises(NotFound):
        log.find("1000", ALICE)
    assert [request.request_id for request in log.slowest(ALICE)] == ["new"]


def test_a_tenant_displaces_no_others_requests():
    """Each keeps its share, and a tenant's rates are taken over its own requests."""
    log = RequestLog(clock=(clock := Clock()))
    carol = Client(key_name="c", tenant="carol")
    ended(log, clock, "alice", 1.0)
    clock.now_s += 9
    for number in range(2 * KEPT_REQUESTS):
        ended(log, clock, f"bob{number}", 0.001, BOB)
    assert log.find("alice", ALICE).outcome == "stop"
    assert (log.recent(ALICE).window_s, log.recent(ALICE).num_requests) == (pytest.approx(12.048), 1)
    assert (log.recent(BOB).window_s, log.recent(BOB).num_requests) == (pytest.approx(1.023), KEPT_REQUESTS - 1)
    assert log.recent(ANYBODY).window_s == log.recent(BOB).window_s
    for number in range(2 * KEPT_REQUESTS):
        ended(log, clock, f"carol{number}", 0.0, carol)
    kept = {each.tenant: log.recent(each).num_requests for each in (ALICE, BOB, carol)}
    assert kept["alice"] == 1
    assert abs(kept["bob"] - kept["carol"]) <= 1
    assert sum(kept.values()) == log._num_ended == KEPT_REQUESTS


def test_more_tenants_than_the_log_has_room_for():
    log = RequestLog(clock=(clock := Clock()))
    tenants = [Client(key_name="k", tenant=f"t{number}") for number in range(KEPT_REQUESTS + 10)]
    for tenant in tenants:
        ended(log, clock, tenant.tenant, 0.001, tenant)
    assert [log.recent(each).num_requests for each in tenants] == [0] * 10 + [1] * KEPT_REQUESTS
    assert log._num_ended == len(log._ended) == KEPT_REQUESTS


def test_a_tenant_that_is_gone_gives_up_its_room():
    log = RequestLog(clock=(clock := Clock()))
    for number in range(100):
        ended(log, clock, f"{number}", 0.01)
    clock.now_s += KEPT_S + 1
    ended(log, clock, "new", 0.01, BOB)
    assert (log._num_ended, list(log._ended)) == (1, ["bob"])


def test_the_slowest_are_of_the_client_and_bounded():
    log = RequestLog(clock=(clock := Clock()))
    for number in range(20):
        ended(log, clock, f"alice{number}", 0.001 * number)
        ended(log, clock, f"bob{number}", 0.1, BOB)
    assert [each.request_id for each in log.slowest(ALICE)] == [f"alice{19 - n}" for n in range(MAX_SLOWEST)]
    assert {each.tenant for each in log.slowest(BOB)} == {"bob"}
    assert log.slowest(ANYBODY)[0].tenant == "bob"
    assert log.recent(ALICE).duration_p50_s == pytest.approx(0.010)
    assert log.recent(ALICE).num_requests == 20


def test_a_request_that_never_starts_is_not_kept():
    log = RequestLog(clock=(clock := Clock()))
    record = RequestTrace(METRICS, clock(), None, {})
    log.began(record, AskedRequest(request_id="r", client_request_id="", operation="", client=ALICE, arrived_unix_ns=1))
    assert len(log.slowest(ALICE)) == 1
    del record
    assert log.slowest(ALICE) == []


@pytest.mark.parametrize(("prefill", "service"), [("p", "prefill"), ("", "decode")])
def test_a_phase_names_the_service_that_spent_it(prefill, service):
    timeline = Timeline()
    timeline.moments_unix_ns = {
        moments.ARRIVED: 0, moments.ATTEMPTED: 10**9, moments.PREFILL_QUEUED: 2 * 10**9, moments.PREFILL_STARTED: 3 * 10**9,
        moments.PREFILL_COMPUTED: 6 * 10**9, moments.DECODE_QUEUED: 2 * 10**9, moments.KV_RESERVED: 3 * 10**9,
        moments.KV_LANDED: 7 * 10**9, moments.DECODE_STARTED: 8 * 10**9, moments.DECODE_FINISHED: 9 * 10**9,
    }  # fmt: skip
    asked = AskedRequest(request_id="r", client_request_id="", operation="", client=ALICE, arrived_unix_ns=0)
    request = LoggedRequest(
        asked=asked, outcome="stop", end_unix_ns=10**10, timeline=timeline, num_prompts=1, num_prompt_tokens=1,
        cached_tokens=CachedTokens(), num_output_tokens=1, num_attempts=1, prefill=prefill, decode="d",
    )  # fmt: skip
    phases = {phase.name: phase for phase in request.view(ANYBODY).phases}
    assert phases["prefill"].service == phases["prefill_queue"].service == service
    assert (phases["prefill"].start_s, phases["prefill"].duration_s) == (3, 3)
    assert (phases["decode"].service, phases["deliver"].service) == ("decode", "router")
    assert (phases["kv_transfer"].start_s, phases["kv_transfer"].duration_s, phases["kv_transfer"].overlaps) == (
        3,
        4,
        True,
    )


async def test_metrics_name_workers_to_operators_alone(cluster, tmp_path):
    file = keys_file(tmp_path, alice="", ops='role = "operator"')
    await cluster.start(api_keys_file=file)
    await complete(cluster, "alice")
    names = [worker.worker_id for worker in cluster.workers]
    for who, sees in (("alice", False), ("ops", True)):
        text = (await cluster.http.get("/metrics", headers=headers(who))).text
        assert [name in text for name in names] == [sees] * len(names)
        assert "pdserve_workers{" in text
    # what a client chose is no label of its own
    assert b'{a="x,worker=\\"y"} 1' in without_label("worker", b'm{a="x,worker=\\"y"} 1\nm{a="b",worker="c"} 1\n')
