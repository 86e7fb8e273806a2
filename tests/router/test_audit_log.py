"""Records of a client's request: audit lines, counters by key, attributes of spans; and their readers."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import stat

import grpc
import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.api_key_file import key_hash
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.telemetry import line_writer
from pdserve.router.tenants import audit_log
from pdserve.router.tenants.audit_log import AuditLog
from pdserve.router.tenants.client import Client
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.fake_worker import ADMITTED, forever, play
from tests.support.processes.otlp_receiver import otlp_receiver
from tests.support.run.waiting import HANG_S

SECRET_TEXT = "tell nobody of this"


def keys_file(folder, **entries):
    path = folder / "keys.toml"
    path.write_text(
        "".join(f'[[keys]]\nname = "{name}"\nsha256 = "{key_hash(name)}"\n{more}\n' for name, more in entries.items())
    )
    return path


def bearer(name):
    return {"authorization": f"Bearer {name}"}


async def lines(path, count):
    """The audit lines, once there are so many."""
    async with asyncio.timeout(HANG_S):
        while len(found := path.read_text().splitlines()) < count:  # noqa: ASYNC110 - a thread writes them
            await asyncio.sleep(0.01)
    return [json.loads(line) for line in found]


async def complete(cluster, name, **fields):
    body = {"prompt": SECRET_TEXT, "max_tokens": 3, **fields}
    return await cluster.http.post("/v1/completions", json=body, headers=bearer(name))


async def test_each_request_and_each_failed_authentication_has_a_line_without_content(cluster, tmp_path):
    path = tmp_path / "audit.jsonl"
    file = keys_file(tmp_path, alice="", **{"alice-2": 'tenant = "alice"'}, bob="max_sequences = 1")
    await cluster.start(api_keys_file=str(file), audit_log=str(path))
    answers = [
        await complete(cluster, "alice", prompt=[SECRET_TEXT, SECRET_TEXT]),
        await complete(cluster, "bob", n=2),
        await complete(cluster, "alice-2", bogus=SECRET_TEXT),
        await complete(cluster, "nobody"),
        await cluster.http.post("/v1/embeddings", json={"input": SECRET_TEXT}, headers=bearer("alice-2")),
    ]
    assert [answer.status_code for answer in answers] == [200, 400, 400, 401, 200]
    told = await lines(path, 5)
    assert [(one["event"], one["tenant"], one["key"], one["outcome"], one["status"]) for one in told] == [
        ("request", "alice", "alice", "length", 200),
        ("request", "bob", "bob", "invalid_request", 400),
        ("request", "alice", "alice-2", "invalid_request", 400),
        ("authentication_failed", "", "", "unauthenticated", 401),
        ("request", "alice", "alice-2", "stop", 200),
    ]
    assert {one["address"] for one in told} == {"127.0.0.1"}
    first = told[0]
    assert first["request_id"] == answers[0].headers["x-request-id"]
    assert (first["operation"], first["model"], first["prompts"]) == ("text_completion", "fake-model", 2)
    assert (first["prompt_tokens"], first["output_tokens"], first["cached_tokens"]) == (2 * len(SECRET_TEXT), 6, 6)
    assert first["time"].endswith("Z")
    assert told[4]["operation"] == "embeddings"
    assert SECRET_TEXT not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_grpc_and_sessions_have_lines_too(cluster, tmp_path):
    path = tmp_path / "audit.jsonl"
    await cluster.start(api_keys_file=str(keys_file(tmp_path, alice="")), audit_log=str(path))
    request = inference_pb2.GenerateRequest(
        text=inference_pb2.TextPrompt(text=SECRET_TEXT), sampling=request_pb2.SamplingParams(max_tokens=2)
    )
    metadata = (("authorization", "Bearer alice"),)
    assert (await cluster.grpc.Generate(request, metadata=metadata).read()).usage.completion_tokens == 2
    call = cluster.grpc.Session(metadata=metadata)
    for _ in range(2):
        await call.write(request)
        while not (await call.read()).finish_reason:
            pass
    call.cancel()
    await lines(path, 3)
    with pytest.raises(grpc.aio.AioRpcError):
        await cluster.grpc.Generate(request, metadata=(("authorization", "Bearer nobody"),)).read()
    told = await lines(path, 4)
    assert [(one["event"], one["key"], one["status"], one["address"]) for one in told] == [
        ("request", "alice", 200, "127.0.0.1"),
        ("request", "alice", 200, "127.0.0.1"),
        ("request", "alice", 200, "127.0.0.1"),
        ("authentication_failed", "", 401, "127.0.0.1"),
    ]
    assert len({one["request_id"] for one in told[1:3]}) == 1


async def test_a_client_that_leaves_has_a_line(cluster, tmp_path):
    path = tmp_path / "audit.jsonl"
    await cluster.start(audit_log=str(path))
    cluster.of("decode").script = play(ADMITTED, forever)
    asking = asyncio.create_task(cluster.complete())
    await cluster.of("decode").called()
    asking.cancel()
    [told] = await lines(path, 1)
    assert (told["outcome"], told["status"], told["tenant"]) == ("cancelled", 499, "")


async def test_a_rotated_file_is_followed(tmp_path):
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(str(path), "m")
    audit.failed_authentication("10.0.0.1", "no key")
    await lines(path, 1)
    path.rename(tmp_path / "audit.1")
    audit.failed_authentication("10.0.0.2", "no key")
    audit.close()
    [told] = [json.loads(line) for line in path.read_text().splitlines()]
    assert told["address"] == "10.0.0.2"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_lines_about_failures_are_bounded_and_what_is_left_out_is_counted(tmp_path):
    path, now = tmp_path / "audit.jsonl", [1000.0]
    audit = AuditLog(str(path), "m", clock=lambda: now[0])
    for _ in range(1000):
        audit.failed_authentication("10.0.0.1", "no key")
    now[0] += 1
    audit.failed_authentication("10.0.0.1", "no key")
    audit.close()
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(told) == audit_log.MAX_FAILURES_PER_S + 1
    assert [one["left_out"] for one in told[-2:]] == [0, 1000 - audit_log.MAX_FAILURES_PER_S]


def test_a_disk_that_hangs_holds_nobody_up(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(audit_log, "MAX_WAITING_LINES", 10)
    audit = AuditLog(str(tmp_path / "audit.jsonl"), "m")
    release: queue.Queue[None] = queue.Queue()
    assert audit._writer is not None
    monkeypatch.setattr(audit._writer._sink, "write", lambda line: release.get())
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            audit.request(
                Client(), request_id=f"{number}", operation="", num_prompts=1, num_prompt_tokens=1,
                num_output_tokens=1, num_cached_tokens=0, outcome="stop", status=200, duration_s=0.1,
            )  # fmt: skip
    assert audit.counts == {"written": 0, "dropped": 90}
    assert len(caplog.records) == 1
    # neither does it keep a leaving process
    monkeypatch.setattr(line_writer, "CLOSE_S", 0.05)
    audit.close()
    assert not audit._writer.has_stopped
    for _ in range(100):
        release.put(None)
    audit.close()
    assert audit._writer.has_stopped
    assert audit.counts == {"written": 10, "dropped": 90}


def test_a_log_that_cannot_be_written_stops_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"audit_log .*no-such/audit"):
        AuditLog(str(tmp_path / "no-such" / "audit"), "m")
    with pytest.raises(ConfigError, match="audit_log is given but empty"):
        load_settings(RouterSettings, flags={"audit_log": " "}, environ={})


def test_it_may_go_to_standard_error(capsys):
    audit = AuditLog("stderr", "m")
    audit.failed_authentication("10.0.0.1", "no key")
    audit.close()
    assert json.loads(capsys.readouterr().err)["event"] == "authentication_failed"


async def test_counters_by_key_are_for_operators(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("pdserve.router.tenants.api_keys.LOOK_EVERY_S", 0.01)
    file = keys_file(tmp_path, alice="", bob="", ops='role = "operator"')
    await cluster.start(api_keys_file=str(file))
    await complete(cluster, "alice")
    await complete(cluster, "bob", bogus=1)

    async def metrics(**headers):
        return (await cluster.http.get("/metrics", headers=headers)).text

    seen = await metrics(**bearer("ops"))
    length = len(SECRET_TEXT)
    assert 'pdserve_key_requests_total{key="alice",outcome="length",tenant="alice"} 1.0' in seen
    assert 'pdserve_key_requests_total{key="bob",outcome="invalid_request",tenant="bob"} 1.0' in seen
    assert f'pdserve_key_tokens_total{{key="alice",kind="prompt",tenant="alice"}} {length}.0' in seen
    assert 'pdserve_key_tokens_total{key="alice",kind="output",tenant="alice"} 3.0' in seen
    told = await metrics(**bearer("bob"))
    assert "pdserve_requests_total" in told
    assert "alice" not in told
    nobody: tuple[dict[str, str], ...] = ({}, bearer("nobody"))
    for headers in nobody:
        assert (await cluster.http.get("/metrics", headers=headers)).status_code == 401
    keys_file(tmp_path, bob="", ops='role = "operator"')
    async with asyncio.timeout(HANG_S):
        while 'key="alice"' in await metrics(**bearer("ops")):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert 'key="bob"' in await metrics(**bearer("ops"))


@pytest.fixture
def collector():
    with otlp_receiver() as receiver:
        yield receiver


async def test_spans_name_key_and_tenant(collector, cluster, tmp_path):
    trace_id = "ab" * 16
    file = keys_file(tmp_path, alice='tenant = "search"')
    await cluster.start(api_keys_file=str(file))
    headers = bearer("alice") | {"traceparent": f"00-{trace_id}-{'cd' * 8}-01"}
    body = {"prompt": "x", "max_tokens": 1}
    assert (await cluster.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    spans = await asyncio.to_thread(
        collector.wait_for, lambda spans: any(span.part == "request" for span in spans), trace_id
    )
    [span] = [span for span in spans if span.part == "request"]
    assert (span.attributes["pdserve.key"], span.attributes["pdserve.tenant"]) == ("alice", "search")
