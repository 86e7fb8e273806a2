"""TLS of the router: which workers it believes and says so, and who may speak to its front ends."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import grpc.aio
import httpx
import pytest

from pdserve.cli.clients.grpc_client import GrpcClient
from pdserve.cli.not_reached import NotReached
from pdserve.common.net.public_server import make_public_channel
from pdserve.common.processes.shutdown import Shutdown
from pdserve.common.security.tls import TlsFile, load_client
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.service import run_router
from pdserve.v1 import inference_pb2
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.router.conftest import Cluster
from tests.router.fake_worker import said
from tests.support.processes.tls_authority import IssuedFiles
from tests.support.run.waiting import HANG_S


async def refused(cluster: Cluster, count: int) -> None:
    """Returns when so many decode workers are refused."""
    async with asyncio.timeout(HANG_S):
        while True:
            if (await cluster.http.get("/health")).json()["workers"]["decode"]["refused"] == count:
                return
            await asyncio.sleep(0.02)


async def test_workers_of_the_ca_serve_and_others_are_told_why_not(cluster, caplog, authority, other_authority):
    caplog.set_level(logging.WARNING)
    servers = {
        "good": authority.identity().server,
        "stranger": other_authority.identity().server,
        "elsewhere": authority.identity("elsewhere.example").server,
        "plain": None,
    }
    workers = {name: await cluster.worker("decode", worker_id=name, tls=tls).start() for name, tls in servers.items()}
    await cluster.start(prefill=0, decode=0, wait=False, **authority.issue().settings())
    await cluster.live(decode=1)
    await refused(cluster, 3)
    assert await cluster.text() == said(5)
    await asyncio.sleep(1.5)  # each address is tried again meanwhile
    for name, why in {
        "stranger": "CERTIFICATE_VERIFY_FAILED",
        "elsewhere": "Hostname Verification Check failed",
        "plain": "handshake failed",
    }.items():
        told = [record.message for record in caplog.records if f"reached at {workers[name].address}" in record.message]
        assert len(told) == 1, told
        assert why in told[0]
        assert not workers[name].calls


async def test_a_name_for_all_workers(cluster, authority):
    await cluster.worker("decode", tls=authority.identity("pdserve.internal").server).start()
    settings = authority.issue().settings() | {"tls_server_name": "pdserve.internal"}
    await cluster.start(prefill=0, decode=0, **settings)
    assert await cluster.text() == said(5)


@pytest.mark.parametrize("shown", ["nothing", "another CA's"])
async def test_a_router_that_workers_do_not_believe_says_so(cluster, caplog, authority, other_authority, shown):
    caplog.set_level(logging.WARNING)
    worker = await cluster.worker("decode", tls=authority.identity().server).start()
    files = other_authority.issue()
    bundle = other_authority.ca_file.with_name("bundle.pem")  # the router believes the worker
    bundle.write_bytes(other_authority.ca_file.read_bytes() + authority.ca_file.read_bytes())
    settings = IssuedFiles(files.cert, files.key, bundle).settings() if shown == "another CA's" else {}
    await cluster.start(prefill=0, decode=0, wait=False, **settings)
    await refused(cluster, 1)
    assert f"reached at {worker.address}" in caplog.text
    assert "do both sides have TLS, certificates of one CA" in caplog.text
    assert not worker.calls


class Front:
    """A router without workers, with TLS at its front ends."""

    def __init__(self, files: IssuedFiles, client_ca: Path | None) -> None:
        self._settings = RouterSettings(
            port=0,
            grpc_port=0,
            front_tls_cert_file=str(files.cert),
            front_tls_key_file=str(files.key),
            front_tls_client_ca_file=str(client_ca) if client_ca else None,
        )
        self._stop = asyncio.Event()
        self._ca = TlsFile("ca", str(files.ca))

    async def start(self, folder: Path) -> Front:
        ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(
            run_router(
                self._settings,
                model_folder=folder,
                ready=lambda *addresses: ready.set_result(addresses),
                shutdown=Shutdown(stop=self._stop),
            )
        )
        self.http, self.grpc = await ready
        return self

    async def stop(self) -> None:
        self._stop.set()
        await self._running

    async def ask_both(self, client: IssuedFiles | None) -> None:
        """Raises what a client hears that is not let in."""
        tls = load_client(
            self._ca, *([TlsFile("c", str(client.cert)), TlsFile("k", str(client.key))] if client else [])
        )
        async with make_public_channel(self.grpc, tls) as channel:
            await InferenceServiceStub(channel).GetModel(inference_pb2.GetModelRequest(), timeout=HANG_S)
        assert (await self.get("https", tls.context)).status_code == 200

    async def get(self, scheme: str, context: ssl.SSLContext | bool = False) -> httpx.Response:
        async with httpx.AsyncClient(verify=context, trust_env=False, timeout=HANG_S) as http:
            return await http.get(f"{scheme}://{self.http}/v1/models")


async def test_front_ends_speak_tls_and_nothing_else(model_folder, authority):
    front = await Front(authority.issue(), None).start(model_folder)
    await front.ask_both(None)
    with pytest.raises(httpx.TransportError):
        await front.get("http")
    async with make_public_channel(front.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await InferenceServiceStub(channel).GetModel(inference_pb2.GetModelRequest(), timeout=HANG_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await front.ask_both(None)
    await front.stop()


@pytest.mark.parametrize("trusts", ["nobody", "another CA"])
async def test_the_commands_say_why_they_reach_no_router(model_folder, authority, other_authority, trusts):
    front = await Front(authority.issue(), None).start(model_folder)
    tls = load_client(TlsFile("--ca-file", str(other_authority.ca_file))) if trusts == "another CA" else None
    async with GrpcClient(front.grpc, tls=tls) as client:
        with pytest.raises(NotReached, match="with a certificate of the CA in --ca-file"):
            await anext(client.generate("x"))
    await front.stop()


async def test_clients_need_a_certificate_where_a_ca_is_given_for_them(model_folder, authority, other_authority):
    front = await Front(authority.issue(), other_authority.ca_file).start(model_folder)
    await front.ask_both(other_authority.issue("client"))
    for client in (None, authority.issue("client")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await front.ask_both(client)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        tls = load_client(TlsFile("ca", str(authority.ca_file)))
        with pytest.raises(httpx.TransportError):
            await front.get("https", tls.context)
    await front.stop()
