"""`pdserve up --ray` on a Ray cluster of three nodes and a head: errors, stop, loss of the driver, of a worker and of a node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pdserve.common.net.http_server import listening_socket
from tests.support.processes.ray_cluster import START_S, RayNodes, RayUp, ray_nodes
from tests.support.run.waiting import HANG_S, eventually, wait_until

pytest.importorskip("ray", reason="needs the extra `ray`, which `make test-all` installs")

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(3 * START_S)]

READY = r"OpenAI http://(\S+)/v1 .* prefill (\S+)   decode ([^\n]+)\nmetrics  ([^\n]+)\n"
BODY = {"prompt": "The capital of Peru is", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(3) as started:
        yield started


@contextlib.contextmanager
def up(nodes: RayNodes, folder: Path, *arguments: str) -> Iterator[tuple[RayUp, re.Match[str]]]:
    """A running cluster; when it has ended, no worker's port listens any more."""
    ray_up = RayUp(nodes.address, folder / "log", *arguments)
    try:
        yield ray_up, ray_up.wait_for(READY)
    finally:
        ray_up.end()
        # every address in the log, those after a restart included
        opened = set(re.findall(r"127\.0\.0\.\d+:\d+", ray_up.log.read_text())) - {nodes.address}
        wait_until(lambda: not any(listens(address) for address in opened), lambda: opened)


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


def host_of(address: str) -> str:
    return address.rpartition(":")[0]


def workers_of(nodes: RayNodes, host: str) -> list[psutil.Process]:
    """The processes of pdserve on a node."""
    return [process for process in nodes.of_node(host) if "pdserve.cli.main" in process.cmdline()]


async def ask(client: httpx.AsyncClient, http: str, **given: Any) -> str:
    answer = await client.post(f"http://{http}/v1/completions", json=BODY | given)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


async def stream(client: httpx.AsyncClient, http: str, begun: asyncio.Event, **given: Any) -> str:
    """The text of a streamed answer. begun: set at its first event."""
    text = ""
    async with client.stream("POST", f"http://{http}/v1/completions", json=BODY | {"stream": True} | given) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                begun.set()
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"]
    return text


LIMIT_S = 8


@pytest.mark.parametrize(
    ("address", "arguments", "line"),
    [
        (
            "{nodes}",
            ["--prefill", "4", "--decode", "4"],
            "Ray did not find places for 8 workers within 8 s: they need 8 CPU, up to 1 CPU on one node; "
            "free are 6 of 6 CPU, 0 of 0 GPU",
        ),
        (
            "{nodes}",
            ["--device=cuda"],
            "Ray did not find places for 2 workers within 8 s: they need 2 CPU, 2 GPU, up to 1 CPU, 1 GPU on one node; "
            "free are 6 of 6 CPU, 0 of 0 GPU",
        ),
        ("{nodes}", ["--attention-backend=nosuch"], "-0 on node 127.0.0."),
        ("127.0.0.1:{silent}", [], "--ray 127.0.0.1:{silent}: no Ray cluster answered within 8 s"),
        ("ray://127.0.0.1:{silent}", [], "--ray ray://127.0.0.1:{silent}: no Ray cluster answered within 8 s"),
    ],
    ids=["CPUs", "GPUs", "at the node", "no Ray", "no Ray client server"],
)
def test_an_error_is_one_line_within_its_time(nodes: RayNodes, address: str, arguments: list[str], line: str) -> None:
    with listening_socket("127.0.0.1", 0) as silent:
        known = {"nodes": nodes.address, "silent": str(silent.getsockname()[1])}
        ray = ["--ray", address.format_map(known), "--ray-timeout-s", str(LIMIT_S)]
        command = [sys.executable, "-m", "pdserve", "up", "demo", "--port", "0", "--grpc-port", "0", *ray, *arguments]
        began = time.monotonic()
        ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * HANG_S, check=False)
    assert ended.returncode == 2, ended.stderr
    assert line.format_map(known) in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    # two limits, and the start of Python on a busy machine
    assert time.monotonic() - began < HANG_S


async def test_another_version_of_pdserve_at_a_node_is_named() -> None:
    from pdserve.cli.ray_cluster.worker_actor import WorkerActor  # needs the extra

    found = await WorkerActor().start("decode-0", "decode", {}, "0.0.0")
    assert re.fullmatch(r"decode-0: pdserve is \S+ on node \S+ and 0\.0\.0 here: they must be equal", found["error"])


async def test_the_first_ctrl_c_drains_and_the_second_ends_everything(nodes: RayNodes, tmp_path: Path) -> None:
    with up(nodes, tmp_path) as (ray_up, ready):
        workers = [process for address in (ready[2], ready[3]) for process in workers_of(nodes, host_of(address))]
        assert len(workers) == 2
        async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as client:
            body = BODY | {"max_tokens": 4000, "stream": True}
            async with client.stream("POST", f"http://{ready[1]}/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                ray_up.process.send_signal(signal.SIGINT)
                await asyncio.to_thread(ray_up.wait_for, "draining 1 request, at most 30 s; Ctrl-C again stops now")
                assert ray_up.process.poll() is None
                ray_up.process.send_signal(signal.SIGINT)
                assert await asyncio.to_thread(ray_up.process.wait, HANG_S) == 0
                assert '"code":"draining"' in "".join([line async for line in lines])
        assert "Traceback" not in ray_up.log.read_text()
        await eventually(lambda: not any(worker.is_running() for worker in workers))


def test_workers_end_with_a_driver_that_dies(nodes: RayNodes, tmp_path: Path) -> None:
    with up(nodes, tmp_path) as (ray_up, ready):
        workers = [process for address in (ready[2], ready[3]) for process in workers_of(nodes, host_of(address))]
        assert len(workers) == 2
        ray_up.process.kill()
        wait_until(lambda: not any(worker.is_running() for worker in workers))


async def test_ray_restarts_a_worker_whose_process_dies(nodes: RayNodes, tmp_path: Path) -> None:
    with up(nodes, tmp_path, "--decode", "2") as (ray_up, ready):
        http, lost = ready[1], ready[3].split(", ")[0]
        async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as client:
            expected = await ask(client, http)
            [worker] = workers_of(nodes, host_of(lost))
            worker.kill()
            assert await ask(client, http) == expected
            await asyncio.to_thread(ray_up.wait_for, f"decode-0 at {lost} is lost; Ray restarts it")
            await asyncio.to_thread(ray_up.wait_for, r"decode-0 is back at (\S+)")
            await all_live(client, http, decode=2)
            assert await ask(client, http) == expected


async def all_live(client: httpx.AsyncClient, http: str, decode: int) -> None:
    """Until the router has these addresses, all of them live, and no other."""
    expected = {"prefill": (1, 1), "decode": (decode, decode)}
    for _ in range(int(HANG_S)):
        workers = (await client.get(f"http://{http}/health")).json()["workers"]
        if {role: (count["addresses"], count["live"]) for role, count in workers.items()} == expected:
            return
        await asyncio.sleep(1)
    raise AssertionError(workers)


async def test_requests_survive_a_node_whose_worker_comes_back_on_another(nodes: RayNodes, tmp_path: Path) -> None:
    with up(nodes, tmp_path, "--decode", "2") as (ray_up, ready):
        http, prefill, (lost, other) = ready[1], ready[2], ready[3].split(", ")
        assert len({host_of(address) for address in (prefill, lost, other)}) == 3
        async with httpx.AsyncClient(trust_env=False, timeout=2 * HANG_S) as client:
            for metrics in re.findall(r"http://\S+", ready[4]):
                assert (await client.get(metrics)).status_code == 200
            expected = await ask(client, http, max_tokens=900)
            begun = [asyncio.Event() for _ in range(8)]
            running = [asyncio.create_task(stream(client, http, one, max_tokens=900)) for one in begun]
            await asyncio.gather(*(one.wait() for one in begun))
            assert not any(one.done() for one in running)
            await asyncio.to_thread(nodes.kill_node, host_of(lost))
            assert {*(await asyncio.gather(*running))} == {expected}
            assert await ask(client, http, max_tokens=900) == expected
            back = await asyncio.to_thread(ray_up.wait_for, r"decode-0 is back at (\S+)")
            assert host_of(back[1]) in (host_of(prefill), host_of(other))
            await all_live(client, http, decode=2)
            assert await ask(client, http, max_tokens=900) == expected
