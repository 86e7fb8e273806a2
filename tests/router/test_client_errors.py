"""Errors of workers and channels name addresses and connections: clients get a code and one sentence, the log the rest."""

from __future__ import annotations

import asyncio
import re

import grpc
import pytest

from pdserve.common import errors
from pdserve.common.errors import BY_CODE, InvalidRequest, NeedsPrefill, PdServeError
from pdserve.router.requests.client_error import as_client_sees
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.fake_worker import ADMITTED, decode_outputs, forever, play
from tests.support.run.waiting import HANG_S

INTERNALS = (
    "source prefill-10.0.0.7-50052 (10.0.0.7:50052, epoch 10bcc0fa9473e72d) failed: ipv4:10.0.0.7:50052: refused"
)
PASSED_ON = {
    "cancelled",
    "deadline_exceeded",
    "invalid_request",
    "prompt_too_long",
    "body_too_large",
    "unsupported_media_type",
    "not_found",
    "model_not_found",
    "unauthenticated",
    "overloaded",
    "grammar_unavailable",
    "logits_processor_failed",
}


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_a_message_goes_out_only_where_its_class_speaks_about_the_request(code, caplog):
    error = BY_CODE[code](INTERNALS)
    seen = as_client_sees(error, "r1")
    assert (seen.code, seen.http_status, seen.retryable) == (error.code, error.http_status, error.retryable)
    if code in PASSED_ON:
        assert (seen.message, caplog.text) == (INTERNALS, "")
    else:
        assert not re.search(r"10\.0\.0\.7|epoch|10bcc|ipv4|prefill-", seen.message)
        assert "under request r1" in seen.message
        assert f"request r1 ends with {code}: {INTERNALS}" in caplog.text
        assert as_client_sees(seen, "r1") is seen, "what was translated once goes out as it is"


def test_what_the_router_wrote_for_clients_goes_out(caplog):
    error = errors.WorkerLost("no worker could serve this").for_clients()
    assert as_client_sees(error, "r1") is error
    assert not caplog.text


def test_every_class_of_error_is_known_to_this_test():
    known = PASSED_ON | {"internal_error", "worker_lost", "draining", "transfer_failed", "digest_mismatch", "evicted"}
    known |= {"needs_prefill", "layout_mismatch", "key_mismatch", "config_error", "unsupported_model"}
    known |= {"clock_skew", "protocol_mismatch", "peer_error", "wrong_worker", "permission_denied"}
    known |= {"adapter_unavailable", "forbidden"}
    assert set(BY_CODE) <= known, "does its message go out to clients?"


@pytest.mark.diagonal
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("code", ["worker_lost", "transfer_failed", "layout_mismatch", "internal_error", "draining"])
async def test_over_http(cluster, caplog, path, code, monkeypatch):
    monkeypatch.setattr("pdserve.router.requests.tasks.placed_task.WAIT_FOR_WORKER_S", 0.3)
    caplog.set_level("INFO")
    await cluster.start(max_attempts=2)
    for worker in cluster.workers:
        worker.scripts = [play(BY_CODE[code](INTERNALS))] * 9
    field = "prompt" if path == "/v1/completions" else "input"
    response = await cluster.http.post(path, json={field: "hello"})
    assert response.status_code >= 500
    assert "10.0.0.7" not in response.text
    assert "10.0.0.7" in caplog.text


async def test_a_dead_workers_address_does_not_go_out(cluster, caplog):
    await cluster.start(prefill=0, max_attempts=1)
    [worker] = cluster.workers

    async def die(worker, call):
        await worker.kill()

    worker.script = play(ADMITTED, die, forever)
    response = await cluster.complete()
    assert response.json()["error"]["code"] == "worker_lost"
    assert not re.search(r"127\.0\.0\.1|decode0|epoch", response.text)
    assert "127.0.0.1" in caplog.text


async def read_to_the_end(call):
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("between", [False, True], ids=["within a turn", "between turns"])
async def test_over_grpc_in_a_session(cluster, caplog, between):
    await cluster.start()

    async def script(worker, call):
        await anext(call.turns)
        yield ADMITTED
        yield decode_outputs(0, "a", "length" if between else None)
        raise errors.WorkerLost(INTERNALS)

    cluster.of("decode").session_script = script
    call = cluster.grpc.Session()
    sampling = request_pb2.SamplingParams(max_tokens=1 if between else 5)
    prompt = inference_pb2.TextPrompt(text="hello")
    await call.write(inference_pb2.GenerateRequest(text=prompt, sampling=sampling, stream=True))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(read_to_the_end(call), HANG_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "10.0.0.7" not in str(caught.value.details())
    assert "10.0.0.7" in caplog.text


def test_the_classes_that_pass_are_not_subclassed_by_accident():
    """A new subclass of an error whose message goes out is looked at here first."""
    passing = {kind.code for kind in _tree(InvalidRequest)}
    assert passing == {"invalid_request", "prompt_too_long", "body_too_large", "unsupported_media_type"}
    assert as_client_sees(NeedsPrefill("5"), "r1").code == "needs_prefill"


def _tree(root: type[PdServeError]) -> list[type[PdServeError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]
