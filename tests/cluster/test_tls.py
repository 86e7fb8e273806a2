"""A cluster under mutual TLS, processes and all: the same texts, and nobody in between or beside who has no certificate."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import httpx
import pytest

from pdserve.common.net.rpc import make_channel
from pdserve.common.protocol import PROTOCOL_VERSION
from pdserve.common.security.tls import ClientTls, TlsFile, load_client
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import Cluster, Service, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.tls_authority import Authority, IssuedFiles, role_uri
from tests.support.run.waiting import HANG_S

pytestmark = pytest.mark.process

FLAGS = ("--dtype=float32", "--num-blocks=256", "--max-num-batched-tokens=64")
PROMPTS = [[3 + (place * place + length) % 297 for place in range(length)] for length in (17, 250, 1000)]


async def is_refused(address: str) -> bool:
    """True if a client without TLS gets no answer of a worker."""
    async with make_channel(address) as channel:
        request = worker_pb2.WatchRequest(protocol_version=PROTOCOL_VERSION)
        call = worker_pb2_grpc.WorkerServiceStub(channel).Watch(iter([request]), timeout=HANG_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    return caught.value.code() is grpc.StatusCode.UNAVAILABLE


def generate(router: Service, *flags: str) -> subprocess.CompletedProcess[str]:
    command = ["generate", "x", "--url", router.address, "--max-tokens", "4", *flags]
    return subprocess.run(
        [sys.executable, "-m", "pdserve.cli.main", *command], capture_output=True, text=True, timeout=HANG_S
    )


async def test_i1_texts_under_mutual_tls_are_those_without(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    inside, other, public = (Authority(tmp_path / name) for name in ("inside", "other", "public"))
    common = ("--model", str(model), *FLAGS)
    with running_cluster(tmp_path) as cluster:
        cluster.tls = inside.identity().client
        prefill = cluster.start_worker("prefill", *common, *inside.issue().flags())
        decode = cluster.start_worker("decode", *common, *inside.issue().flags())
        stranger = cluster.start_worker("decode", *common, *other.issue().flags(), name="stranger")
        front = public.issue("127.0.0.1")
        router = cluster.start_router(
            *("--model", str(model), "--local-prefill", "never", *inside.issue("router").flags()),
            *(f"--front-tls-cert-file={front.cert}", f"--front-tls-key-file={front.key}"),
            prefill=[prefill.address],
            decode=[decode.address, stranger.address],
        )
        tls = load_client(TlsFile("ca", str(public.ca_file)))
        async with InferenceClient(router.address, tls) as client:
            for prompt in PROMPTS:
                answer = await client.ask(prompt, max_tokens=12)
                oracle.check(prompt, answer.token_ids)
                assert "kv_landed" in answer.moments, "it did not go through prefill/decode"
            await asyncio.gather(*(client.ask(prompt, max_tokens=12) for prompt in PROMPTS * 3))
        assert "not nixl: it encrypts nothing" in decode.read_log()

        await check_front(router, tls, public)
        assert all([await is_refused(worker.address) for worker in (prefill, decode)])
        check_stranger(cluster, router, stranger, other)
        cluster.check_pools()
        cluster.check_logs()


async def check_front(router: Service, tls: ClientTls, public: Authority) -> None:
    async with httpx.AsyncClient(verify=tls.context, trust_env=False, timeout=HANG_S) as http:
        health = (await http.get(f"https://{router.http}/health")).json()
        assert health["workers"]["decode"] == {"addresses": 2, "live": 1, "draining": 0, "refused": 1}
    async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as http:
        with pytest.raises(httpx.TransportError):
            await http.get(f"http://{router.http}/health")
    answered = await asyncio.to_thread(generate, router, "--ca-file", str(public.ca_file))
    assert answered.returncode == 0, answered.stderr


def check_stranger(cluster: Cluster, router: Service, stranger: Service, other: Authority) -> None:
    """It has served nobody, and the router has said why, once."""
    [told] = [line for line in router.read_log().splitlines() if f"is reached at {stranger.address}" in line]
    assert "CERTIFICATE_VERIFY_FAILED" in told
    inside, cluster.tls = cluster.tls, other.identity().client
    assert cluster.load(stranger).prompt_tokens_computed == 0
    del cluster.services[stranger.name]
    cluster.tls = inside
    stranger.process.terminate()
    assert stranger.process.wait(HANG_S) == 0


def put(files: IssuedFiles, new: IssuedFiles, *cas: Path) -> None:
    """Under other names first, as secrets are replaced."""
    contents = {files.cert: new.cert, files.key: new.key}
    for path, content in [
        *((path, new_path.read_bytes()) for path, new_path in contents.items()),
        (files.ca, b"".join(ca.read_bytes() for ca in cas)),
    ]:
        other = path.with_suffix(".new")
        other.write_bytes(content)
        other.replace(path)


@pytest.mark.slow
async def test_certificates_and_authority_change_while_a_cluster_answers(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    """Each service has its role alone, and no request is lost on the way to another authority."""
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    names = ("prefill", "decode", "router")
    held = {}
    for name in names:
        folder = tmp_path / f"held-{name}"
        folder.mkdir()
        held[name] = IssuedFiles(*(folder / file for file in ("cert.pem", "key.pem", "ca.pem")))
        put(held[name], first.issue(uris=[role_uri(name)]), first.ca_file)
    common = ("--model", str(model), *FLAGS)
    with running_cluster(tmp_path) as cluster:
        cluster.tls = first.identity().client
        prefill = cluster.start_worker("prefill", *common, *held["prefill"].flags())
        decode = cluster.start_worker("decode", *common, *held["decode"].flags())
        router = cluster.start_router(
            *("--model", str(model), "--local-prefill", "never", *held["router"].flags()),
            prefill=[prefill.address],
            decode=[decode.address],
        )
        services = (prefill, decode, router)
        assert all("the certificate for services" in service.read_log() for service in services)
        asked = 0
        async with InferenceClient(router.address) as client:

            async def ask_until(holds: Callable[[], bool]) -> None:
                nonlocal asked
                async with asyncio.timeout(HANG_S):
                    while not holds():
                        prompt = PROMPTS[asked % 2]
                        oracle.check(prompt, (await client.ask(prompt, max_tokens=6, cache_salt=str(asked))).token_ids)
                        asked += 1
                        await asyncio.sleep(0.1)

            both = (first.ca_file, second.ca_file)
            steps = [(first, both), (second, both), (second, (second.ca_file,))]
            for number, (authority, cas) in enumerate(steps, 1):
                for name in names:
                    put(held[name], authority.issue(uris=[role_uri(name)]), *cas)
                await ask_until(
                    lambda: all(service.read_log().count("was read again") == number for service in services)  # noqa: B023
                )
            # new lives and new connections: only certificates of the second authority are left
            cluster.tls = second.identity().client
            decode.signal(signal.SIGTERM)
            await asyncio.to_thread(decode.process.wait, HANG_S)
            again = await asyncio.to_thread(cluster.restart, decode.name)
            before = asked
            await ask_until(lambda: asked >= before + 4)
            assert again.address == decode.address
        cluster.check_pools()
