"""Several router processes behind one port: a parent in this process, and children as users have them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import textwrap

import httpx
import psutil
import pytest

from pdserve.common.net.public_server import make_public_channel
from pdserve.common.settings.api_key_file import key_hash
from pdserve.v1 import inference_pb2, request_pb2
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.router.fake_worker import ADMITTED, decode_outputs, forever, play, said
from tests.support.run.waiting import HANG_S, eventually

pytestmark = [pytest.mark.process, pytest.mark.slow]
KEY = "a-key-of-alice-0123456789"
OPERATOR = "a-key-of-an-operator-0123"


def children() -> list[psutil.Process]:
    """The router processes of this test that live, the first one first."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended; a zombie counts as ended
            if "pdserve.router.router_process" in " ".join(each.cmdline()):
                found.append(each)
    return found


async def ask(cluster, path="/v1/completions", *, method="POST", key="", **body):
    """A request on a connection of its own, which the kernel gives to one of the processes."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=f"http://{cluster.addresses[0]}", timeout=HANG_S, trust_env=False) as client:
        return await client.request(method, path, headers=headers, json=body if method == "POST" else None)


async def complete(cluster, key="", max_tokens=2):
    return await ask(cluster, key=key, prompt="hello", max_tokens=max_tokens)


async def metric(cluster, name, key=""):
    """The sum of a metric's series."""
    text = (await ask(cluster, "/metrics", method="GET", key=key)).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def keys_file(tmp_path, **limits):
    lines = "".join(f"{name} = {value}\n" for name, value in limits.items())
    path = tmp_path / "keys.toml"
    path.write_text(
        f'[[keys]]\nname = "alice"\nsha256 = "{key_hash(KEY)}"\n{lines}\n'
        f'[[keys]]\nname = "root"\nsha256 = "{key_hash(OPERATOR)}"\nrole = "operator"\n'
    )
    return str(path)


async def test_both_serve_and_what_they_count_is_added(cluster):
    await cluster.start(prefill=0, router_processes=2)
    assert len(children()) == 2
    answers = await asyncio.gather(*(complete(cluster) for _ in range(24)))
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [said(2)] * 24
    assert await metric(cluster, "pdserve_requests_total") == 24
    assert await metric(cluster, "pdserve_router_processes") == 2
    assert await metric(cluster, "pdserve_workers") >= 1
    status = (await ask(cluster, "/debug/status", method="GET")).json()
    assert status["recent"]["num_requests"] == 24
    assert len(status["workers"]) == 1
    placements = (await ask(cluster, "/debug/routing", method="GET")).json()["placements"]
    assert len(placements) == 24
    for answer in answers[:4]:
        found = await ask(cluster, f"/debug/requests/{answer.json()['id']}", method="GET")
        assert found.json()["num_output_tokens"] == 2
    assert (await ask(cluster, "/debug/requests/unknown", method="GET")).status_code == 404


async def test_calls_over_grpc_reach_both(cluster):
    await cluster.start(prefill=0, router_processes=2)

    async def generate():
        channel = make_public_channel(cluster.addresses[1])
        try:
            call = InferenceServiceStub(channel).Generate(
                inference_pb2.GenerateRequest(
                    text=inference_pb2.TextPrompt(text="hello"), sampling=request_pb2.SamplingParams(max_tokens=2)
                )
            )
            return "".join([message.text async for message in call])
        finally:
            await channel.close()

    assert await asyncio.gather(*(generate() for _ in range(12))) == [said(2)] * 12
    assert await metric(cluster, "pdserve_requests_total") == 12
    served = await asyncio.gather(*(ask(cluster, "/health", method="GET") for _ in range(6)))
    assert {answer.json()["requests"] for answer in served} == {0}


ROUTER = """
    import asyncio, sys
    from pathlib import Path
    from pdserve.common.settings.router_settings import RouterSettings
    from pdserve.router.service import run_router

    settings = RouterSettings(port=0, grpc_port=0, router_processes=2, drain_s=1.0)
    ready = lambda http, grpc: print(http, grpc, flush=True)
    asyncio.run(run_router(settings, model_folder=Path(sys.argv[1]), ready=ready))
"""


async def test_the_death_of_the_parent_ends_the_processes(model_folder):
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(ROUTER), str(model_folder), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    assert await asyncio.wait_for(parent.stdout.readline(), HANG_S)
    before = children()
    assert len(before) == 2
    parent.kill()
    await parent.wait()
    await eventually(
        lambda: not [each for each in before if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    )


async def test_the_end_of_the_parent_ends_the_processes(cluster):
    await cluster.start(prefill=0, router_processes=2)
    before = children()
    cluster.running.cancel()
    await asyncio.gather(cluster.running, return_exceptions=True)
    await eventually(lambda: not children())
    assert not [each for each in before if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


async def test_a_limit_of_a_tenant_holds_over_both(cluster, tmp_path):
    await cluster.start(prefill=0, wait=False, router_processes=2, api_keys_file=keys_file(tmp_path, max_sequences=5))
    cluster.of("decode").script = play(ADMITTED, forever)
    asking = [asyncio.create_task(complete(cluster, KEY)) for _ in range(24)]
    refused = await eventually(lambda: sum(task.done() for task in asking) == 19)
    assert refused
    assert {task.result().status_code for task in asking if task.done()} == {429}
    view = (await ask(cluster, "/debug/status", method="GET", key=OPERATOR)).json()
    assert [tenant["num_requests"] for tenant in view["tenants"] if tenant["tenant"] == "alice"] == [5]
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_a_process_that_dies_is_restarted_and_holds_nothing(cluster, tmp_path):
    await cluster.start(prefill=0, wait=False, router_processes=2, api_keys_file=keys_file(tmp_path, max_sequences=6))
    cluster.of("decode").script = play(ADMITTED, forever)
    asking = [asyncio.create_task(complete(cluster, KEY)) for _ in range(6)]
    await eventually(lambda: len(cluster.of("decode").calls) == 6)
    assert (await complete(cluster, KEY)).status_code == 429
    first, second = children()
    os.kill(first.pid, signal.SIGKILL)
    await eventually(lambda: any(task.done() for task in asking))
    await eventually(lambda: len(children()) == 2 and first.pid not in [each.pid for each in children()])
    cluster.of("decode").script = play(ADMITTED, decode_outputs(0, "ab", "length"))
    num_left = sum(not task.done() for task in asking)
    assert all(isinstance(task.exception(), httpx.HTTPError) for task in asking if task.done())
    assert second.is_running()
    await eventually(lambda: sum(not task.done() for task in asking) == num_left)
    answers = await asyncio.gather(*(complete(cluster, KEY) for _ in range(6 - num_left)))
    assert {answer.status_code for answer in answers} == {200}
    assert await metric(cluster, "pdserve_router_process_restarts_total", OPERATOR) == 1
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_a_shutdown_drains_both(cluster):
    await cluster.start(prefill=0, router_processes=2)
    go_on = asyncio.Event()

    async def wait(worker, call):
        await go_on.wait()

    cluster.of("decode").script = play(decode_outputs(0, "a"), wait, decode_outputs(1, "b", "length"))
    asking = [asyncio.create_task(complete(cluster)) for _ in range(8)]
    await eventually(lambda: len(cluster.of("decode").calls) == 8)
    before = children()
    cluster.stop.set()
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in asking)
    go_on.set()
    assert [answer.json()["choices"][0]["text"] for answer in await asyncio.gather(*asking)] == ["ab"] * 8
    async with asyncio.timeout(HANG_S):
        await cluster.running
    assert cluster.lines == ["draining 8 requests, at most 30 s; Ctrl-C again stops now"]
    assert not [each for each in before if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


async def test_a_stored_response_is_found_by_every_process(cluster):
    await cluster.start(prefill=0, router_processes=2)
    made = (await ask(cluster, "/v1/responses", input="hello", max_output_tokens=2)).json()
    answers = await asyncio.gather(*(ask(cluster, f"/v1/responses/{made['id']}", method="GET") for _ in range(12)))
    assert {answer.json()["id"] for answer in answers} == {made["id"]}
    assert (await ask(cluster, f"/v1/responses/{made['id']}", method="DELETE")).json()["deleted"]
    gone = await asyncio.gather(*(ask(cluster, f"/v1/responses/{made['id']}", method="GET") for _ in range(12)))
    assert {answer.status_code for answer in gone} == {404}
