"""gRPC under mutual TLS: each side wants the other's certificate, by CA and name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from pdserve.common.net.rpc import bind, failed_to_shake_hands, from_rpc_error, make_channel, make_server
from pdserve.common.security.tls import ClientTls, ServerTls, TlsFile, load_client
from tests.support.processes.tls_authority import Authority
from tests.support.run.waiting import HANG_S


class _Answers(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        async def answer(request: bytes, context: object) -> bytes:
            return b"heard " + request

        return grpc.unary_unary_rpc_method_handler(answer)


@asynccontextmanager
async def served(tls: ServerTls | None) -> AsyncIterator[str]:
    """The address of a server."""
    server = make_server()
    server.add_generic_rpc_handlers((_Answers(),))
    port = bind(server, "127.0.0.1", 0, tls)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def ask(address: str, tls: ClientTls | None) -> bytes:
    async with make_channel(address, tls) as channel:
        call: Any = channel.unary_unary("/pdserve.test/ask")
        answer: bytes = await call(b"it", timeout=HANG_S)
        return answer


async def refusal(address: str, tls: ClientTls | None) -> str:
    """Message of a call that must not reach the server."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(address, tls)
    told = from_rpc_error(caught.value)
    assert told.code == "worker_lost"
    assert failed_to_shake_hands(told.message), told.message
    return told.message


async def test_services_of_one_ca_hear_each_other(authority: Authority) -> None:
    async with served(authority.identity().server) as address:
        assert await ask(address, authority.identity("elsewhere.example").client) == b"heard it"


async def test_a_server_hears_nobody_else(authority: Authority, other_authority: Authority) -> None:
    # it believes the server, and shows nothing, or what another CA signed
    nothing = load_client(TlsFile("ca", str(authority.ca_file)))
    files = other_authority.issue()
    stranger = load_client(
        TlsFile("ca", str(authority.ca_file)), *(TlsFile("f", str(p)) for p in (files.cert, files.key))
    )
    async with served(authority.identity().server) as address:
        for client in (None, nothing, stranger):
            await refusal(address, client)
        assert await ask(address, authority.identity().client) == b"heard it"


async def test_a_client_believes_nobody_else(authority: Authority, other_authority: Authority) -> None:
    client = authority.identity().client
    async with served(other_authority.identity().server) as address:
        assert "CERTIFICATE_VERIFY_FAILED" in await refusal(address, client)
    async with served(None) as address:
        await refusal(address, client)
    async with served(authority.identity("elsewhere.example").server) as address:
        assert "Hostname Verification Check failed" in await refusal(address, client)
        named = authority.identity(server_name="elsewhere.example").client
        assert await ask(address, named) == b"heard it"


async def test_a_front_end_hears_clients_without_certificates(authority: Authority) -> None:
    front = replace(authority.identity().server, client_ca=None)
    async with served(front) as address:
        assert await ask(address, load_client(TlsFile("ca", str(authority.ca_file)))) == b"heard it"
