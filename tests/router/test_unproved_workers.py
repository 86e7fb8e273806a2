"""Workers that cannot prove who they are, or say what cannot be read: refused by name, and the rest serves on."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
import msgspec
import pytest

from pdserve.common.errors import PeerError, WorkerLost
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.router.workers import worker_watcher as watched_address
from pdserve.router.workers.announced_identity import verify_identity
from tests.router.candidates import worker
from tests.router.fake_worker import ADMITTED, LAYOUT, decode_outputs, play, said
from tests.support.models.kv_layouts import with_shape
from tests.support.run.waiting import HANG_S

WATCH = "/pdserve.v1.WorkerService/Watch"
FORBIDDEN_WORDS = ("Traceback", "Exception deserializing")


class Garbler(grpc.aio.ServerInterceptor):
    """While `methods` has a method, what goes out of it is no message."""

    def __init__(self, *methods: str) -> None:
        self.methods = set(methods)

    async def intercept_service(self, continuation, handler_call_details):
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.rpartition("/")[2]
        if handler is None:
            return handler
        serialize = handler.response_serializer
        return handler._replace(
            response_serializer=lambda message: b"\xff" * 9 if method in self.methods else serialize(message)
        )


async def stands(cluster, role="decode", **counts):
    """Returns when /health counts the workers of a role so."""
    async with asyncio.timeout(HANG_S):
        while True:
            found = (await cluster.http.get("/health")).json()["workers"][role]
            if all(found[name] == count for name, count in counts.items()):
                return
            await asyncio.sleep(0.02)


def warnings(caplog, text):
    return [record.message for record in caplog.records if text in record.message]


async def test_a_copied_identity_served_by_a_stranger_is_never_live(cluster, caplog):
    """A process that lacks the key has all that is public of a worker, at another port."""
    caplog.set_level(logging.WARNING)
    victim = await cluster.worker("decode", worker_id="victim").start()
    key = DeploymentKey(b"a stranger's own key, long enough")
    stranger = cluster.worker("decode", worker_id="victim", key=key)
    stranger.identity = victim.identity
    await stranger.start()
    stranger.report(blocks_free=1000, blocks_total=1000)
    await cluster.start(prefill=0, decode=0, wait=False)
    await stands(cluster, live=1, refused=1)
    for _ in range(5):
        assert await cluster.text(prompt="My password is hunter2") == said(5)
    assert not stranger.calls
    assert not stranger.met
    assert warnings(caplog, "deployment key differs")


async def test_a_worker_with_a_dtype_of_tomorrow_is_refused_by_name_and_breaks_nothing(cluster, caplog):
    caplog.set_level(logging.WARNING)
    layout = with_shape(LAYOUT, dtype="float4_e2m1fn_x2")
    for role in ("prefill", "decode"):
        await cluster.worker(role, worker_id=f"tomorrow-{role}", layout=layout).start()
    await cluster.start(prefill=1, decode=1, wait=False)
    for role in ("prefill", "decode"):
        await stands(cluster, role, live=1, refused=1)
        assert await cluster.text() == said(5)
    assert len(warnings(caplog, "its dtype is 'float4_e2m1fn_x2'")) == 2
    assert "KeyError" not in caplog.text


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"worker_id": "a b"}, "worker_id is 'a b'"),
        ({"worker_id": "x" * 200}, "worker_id is"),
        ({"max_model_len": 2**31}, "max_model_len is 2147483648"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648"),
        ({"layout": with_shape(LAYOUT, num_layers=2**31)}, "num_layers is 2147483648"),
        ({"layout": with_shape(LAYOUT, head_dim=0)}, "head_dim is 0"),
        ({"layout": with_shape(LAYOUT, num_kv_heads=3)}, "num_kv_heads is 3, 1 to 2 is needed"),
        ({"layout": msgspec.structs.replace(LAYOUT, tp_size=2**31)}, "tp_size is 2147483648"),
        ({"layout": msgspec.structs.replace(LAYOUT, tp_rank=1)}, "tp_rank is 1, 0 to 0 is needed"),
        ({"layout": msgspec.structs.replace(LAYOUT, model_fingerprint="")}, "model_fingerprint is ''"),
        (
            {"layout": with_shape(LAYOUT, num_layers=4096, head_dim=16384, block_size=16384)},
            "block_bytes",
        ),
    ],
    ids=str,
)
async def test_an_identity_beyond_its_bounds_is_refused_by_name(cluster, caplog, options, why):
    caplog.set_level(logging.WARNING)
    vocab_size = options.pop("vocab_size", None)
    odd = cluster.worker("decode", **options)
    odd.vocab_size = vocab_size or odd.vocab_size
    await odd.start()
    await cluster.start(prefill=0, decode=1, wait=False)
    await stands(cluster, live=1, refused=1)
    assert await cluster.text() == said(5)
    assert warnings(caplog, why)


def test_heads_of_states_have_more_numbers_than_those_of_keys():
    """As many as 16 heads of 128 x 256, and the columns of a convolution."""
    layout = with_shape(LAYOUT, dtype="float32", block_size=1, head_dim=16 * 128 * 256 + 3 * (2048 + 512))
    verify_identity(worker("a", layout=layout).identity)


@pytest.mark.few(1)
@pytest.mark.parametrize("skew_s", [-100, 100])
async def test_a_worker_whose_clock_is_off_is_refused_with_both_times(cluster, caplog, skew_s):
    caplog.set_level(logging.WARNING)
    odd = cluster.worker("decode")
    odd.clock = lambda: time.time() + skew_s
    await odd.start()
    await cluster.start(prefill=0, decode=0, wait=False)
    await stands(cluster, live=0, refused=1)
    [warning] = warnings(caplog, "clocks differ")
    assert warning.count(" UTC") == 2
    odd.clock = time.time
    await cluster.live(decode=1)


@pytest.mark.few(1)
@pytest.mark.parametrize("garbles_first", [True, False])
async def test_a_watch_that_cannot_be_decoded_is_that_workers_fault_and_one_warning(cluster, caplog, garbles_first):
    caplog.set_level(logging.WARNING)
    odd = cluster.worker("decode", worker_id="odd")
    garbler = Garbler(*(("Watch",) if garbles_first else ()))
    odd.interceptors.append(garbler)
    await odd.start()
    await cluster.start(prefill=0, decode=1, wait=False)
    await stands(cluster, live=1 if garbles_first else 2)
    garbler.methods.add("Watch")
    await stands(cluster, live=1)
    # it is tried again and again
    await asyncio.sleep(1.2)
    for _ in range(3):
        assert await cluster.text() == said(5)
    assert len(warnings(caplog, "cannot be decoded; the call fails")) == 1
    assert not any(word in caplog.text for word in FORBIDDEN_WORDS)
    garbler.methods.clear()
    await cluster.live(decode=2)


@pytest.mark.few(2)
@pytest.mark.parametrize(("role", "kind"), [("prefill", "prefill"), ("decode", "decode"), ("prefill", "embed")])
async def test_a_stream_that_cannot_be_decoded_is_tried_elsewhere(cluster, caplog, role, kind):
    caplog.set_level(logging.WARNING)
    odd = cluster.worker(role, worker_id=f"odd-{role}-{kind}")
    odd.interceptors.append(Garbler("Open"))
    await odd.start()
    await cluster.start(policy="round_robin")
    for _ in range(4):
        if kind == "embed":
            response = await cluster.http.post("/v1/embeddings", json={"input": "abc"})
            assert response.status_code == 200, response.text
        else:
            assert await cluster.text() == said(5)
    assert odd.calls
    assert len(warnings(caplog, "cannot be decoded; the call fails")) == 1
    assert not any(word in caplog.text for word in FORBIDDEN_WORDS)
    assert (await cluster.http.get("/health")).json()["workers"][role]["live"] == 2, "it is no death"


class NewError(WorkerLost):
    """An error of a release to come."""

    code = "of_a_newer_release"
    grpc_status = grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize("script", [play(NewError("x")), play(ADMITTED, decode_outputs(0, "a"), NewError("x"))])
async def test_an_error_code_that_is_unknown_is_tried_elsewhere(cluster, caplog, script):
    caplog.set_level(logging.WARNING)
    odd = await cluster.worker("decode", worker_id="odd").start()
    odd.script = script
    await cluster.start(prefill=0, decode=1, policy="round_robin")
    for _ in range(4):
        assert await cluster.text() == said(5)
    assert odd.calls
    assert not any(word in caplog.text for word in FORBIDDEN_WORDS)
    assert (await cluster.http.get("/health")).json()["workers"]["decode"]["live"] == 2


async def test_when_all_peers_fail_so_the_client_gets_a_503(cluster):
    await cluster.start(prefill=0, decode=1, max_attempts=2)
    cluster.of("decode").script = play(NewError("10.0.0.7 said something"))
    response = await cluster.complete()
    assert response.status_code == PeerError.http_status
    assert response.json()["error"]["code"] == "peer_error"
    assert "10.0.0.7" not in response.text


async def test_a_call_that_reaches_another_life_is_tried_again_there_and_is_no_death_under_the_prompt(
    cluster, monkeypatch
):
    """The worker came back at its address before the router's watch noticed: its calls are for the life that is over."""
    await cluster.start(prefill=0, decode=1)
    worker = cluster.of("decode")
    worker.epoch += 1  # its server refuses what is meant for the epoch before
    with monkeypatch.context() as patched:
        patched.setattr("pdserve.router.requests.tasks.placed_task.WAIT_FOR_WORKER_S", 0.3)
        assert (await cluster.complete(max_tokens=3)).status_code in (200, 503)
    assert not worker.calls
    await worker.kill()
    await worker.start()
    await cluster.live(decode=1)
    for _ in range(3):
        assert await cluster.text() == said(5), "the prompt is not refused"


@pytest.mark.slow
async def test_a_worker_that_says_nothing_of_its_proof_is_given_up_and_tried_again(cluster, monkeypatch):
    monkeypatch.setattr(watched_address, "FIRST_MESSAGE_TIMEOUT_S", 0.3)
    mute = cluster.worker("decode")

    async def watch(request_iterator, context):
        await asyncio.Event().wait()
        yield

    mute.Watch, honest = watch, mute.Watch
    await mute.start()
    await cluster.start(prefill=0, decode=0, wait=False)
    await asyncio.sleep(0.7)
    await stands(cluster, live=0, refused=0)
    await mute.kill()
    mute.Watch = honest
    await mute.start()
    await cluster.live(decode=1)
