"""The router as a process: what it imports, where it listens, how it leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap

import httpx
import msgspec
import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.net.http_server import listening_socket
from pdserve.common.processes.shutdown import Shutdown
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.service import run_router
from tests.router.fake_worker import ADMITTED, FakeWorker, decode_outputs, decode_well, forever, play, said
from tests.support.run.waiting import HANG_S


def test_the_router_imports_no_torch():
    code = """
        import sys
        import pdserve.router.service
        heavy = {"torch", "triton", "transformers", "pdserve.engine", "pdserve.kv_transfer"} & set(sys.modules)
        assert not heavy, heavy
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=HANG_S)


@pytest.mark.parametrize("field", ["port", "grpc_port"])
async def test_a_port_in_use_is_told_with_its_address(model_folder, field):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = RouterSettings(**{"port": 0, "grpc_port": 0, field: port})
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            await run_router(settings, model_folder=model_folder)


async def test_routers_that_reuse_ports_serve_next_to_each_other(cluster, model_folder):
    await cluster.start(prefill=0, reuse_port=True)
    port, grpc_port = (int(address.rpartition(":")[2]) for address in cluster.addresses)
    settings = RouterSettings(port=port, grpc_port=grpc_port, decode=(cluster.of("decode").address,), metrics_port=0)
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        await run_router(settings, model_folder=model_folder)
    second, ready = Shutdown(), asyncio.Event()
    running = asyncio.create_task(
        run_router(
            msgspec.structs.replace(settings, reuse_port=True), model_folder=model_folder, ready=lambda *_: ready.set(),
            shutdown=second,
        )
    )  # fmt: skip
    began: list[float] = []
    async with asyncio.timeout(HANG_S):
        await ready.wait()
        # the kernel chooses the router of a connection
        while not began or max(began) - min(began) < 0.001:
            async with httpx.AsyncClient(base_url=f"http://{cluster.addresses[0]}", trust_env=False) as client:
                answer = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
                assert answer.json()["choices"][0]["text"] == said(2)
                status = (await client.get("/debug/status")).json()
                began.append(status["unix_s"] - status["uptime_s"])
    second.stop.set()
    async with asyncio.timeout(HANG_S):
        await running


async def test_a_folder_without_a_tokenizer_is_told(tmp_path):
    with pytest.raises(ConfigError, match="tokenizer"):
        await run_router(RouterSettings(port=0, grpc_port=0), model_folder=tmp_path)


def test_a_host_that_is_not_ours():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0"):
        listening_socket("192.0.2.1", 0)


async def test_leaving_lets_streams_end_and_refuses_new_ones(cluster):
    await cluster.start(prefill=0)
    go_on = asyncio.Event()

    async def wait(worker, call):
        await go_on.wait()

    cluster.of("decode").script = play(decode_outputs(0, "a"), wait, decode_outputs(1, "b", "length"))
    asking = asyncio.create_task(cluster.text(max_tokens=2))
    await cluster.of("decode").called()
    cluster.stop.set()
    await asyncio.sleep(0.05)
    response = await cluster.complete()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "draining"
    assert not asking.done()
    go_on.set()
    assert await asking == "ab"
    async with asyncio.timeout(HANG_S):
        await cluster.running


async def test_streams_that_outlast_the_drain_end_with_an_error(cluster):
    await cluster.start(prefill=0, drain_s=0.2)
    cluster.of("decode").script = play(decode_outputs(0, "a"), forever)
    async with cluster.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        lines = response.aiter_lines()
        assert '"a"' in await anext(lines)
        cluster.stop.set()
        rest = "".join([line async for line in lines])
        assert '"code":"draining"' in rest
        assert "[DONE]" not in rest
    async with asyncio.timeout(HANG_S):
        await cluster.running
    await cluster.of("decode").calls[0].cancelled.wait()


async def test_a_drain_says_what_it_waits_for_and_a_second_signal_ends_it(cluster):
    await cluster.start(prefill=0, drain_s=30.0)
    cluster.of("decode").script = play(decode_outputs(0, "a"), forever)
    async with cluster.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        lines = response.aiter_lines()
        assert '"a"' in await anext(lines)
        cluster.stop.set()
        await asyncio.sleep(0.05)
        assert cluster.lines == ["draining 1 request, at most 30 s; Ctrl-C again stops now"]
        assert not cluster.running.done()
        cluster.shutdown.hurry.set()
        assert '"code":"draining"' in "".join([line async for line in lines])
    async with asyncio.timeout(5):
        await cluster.running


async def test_an_idle_router_ends_without_a_line(cluster):
    await cluster.start(prefill=0)
    cluster.stop.set()
    async with asyncio.timeout(5):
        await cluster.running
    assert not cluster.lines


ROUTER = """
    import asyncio, sys
    from pathlib import Path
    from pdserve.common.settings.router_settings import RouterSettings
    from pdserve.router.service import run_router

    settings = RouterSettings(port=0, grpc_port=0, decode=(sys.argv[2],), drain_s=5.0)
    ready = lambda http, grpc: print(http, grpc, flush=True)
    asyncio.run(run_router(settings, model_folder=Path(sys.argv[1]), ready=ready))
    print("left", flush=True)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_end_the_process_gracefully(model_folder, fingerprint, number):
    import httpx

    worker = await FakeWorker("decode", fingerprint).start()
    worker.script = play(ADMITTED, decode_outputs(0, "a"), 0.3, decode_outputs(1, "b", "length"))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error",
        "-c",
        textwrap.dedent(ROUTER),
        str(model_folder),
        worker.address,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ""},
    )
    try:
        assert process.stdout is not None
        http, _ = (await process.stdout.readline()).decode().split()
        async with httpx.AsyncClient(base_url=f"http://{http}", timeout=HANG_S, trust_env=False) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}))
            await worker.called()
            process.send_signal(number)
            assert (await asking).json()["choices"][0]["text"] == said(2)
        stdout, stderr = await asyncio.wait_for(process.communicate(), HANG_S)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await worker.kill()
    assert process.returncode == 0, stderr.decode()
    assert stdout.decode().strip() == "left"
    assert b"Traceback" not in stderr, stderr.decode()


async def test_a_router_that_dies_ends_its_calls(cluster):
    await cluster.start(prefill=0)
    cluster.of("decode").script = play(ADMITTED, forever)
    asking = asyncio.create_task(cluster.text())
    await cluster.of("decode").called()
    cluster.running.cancel()
    await asyncio.gather(cluster.running, return_exceptions=True)
    async with asyncio.timeout(HANG_S):
        await cluster.of("decode").calls[0].cancelled.wait()
    await asyncio.gather(asking, return_exceptions=True)
    cluster.of("decode").script = decode_well
