"""Attach under TLS: the receiver is the worker that the caller's certificate names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from pdserve.common.errors import PermissionDenied
from pdserve.common.net.rpc import abort_with, bind, make_channel, make_server
from pdserve.common.security.role_guard import CallerRoles, RoleGuard
from pdserve.common.security.tls_roles import ServiceRole
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control.attach_servicer import AttachServicer
from pdserve.kv_transfer.control.transfer_state import ReceiverState
from pdserve.v1 import kv_source_pb2_grpc
from tests.support.tls_authority import Authority, role_uri

from .conftest import LAYOUT, SOURCE_EPOCH


@pytest.fixture
async def secured(rig: Any, authority: Authority) -> AsyncIterator[Any]:
    """The rig, with a source that asks for roles."""
    tls = authority.issue(uris=[role_uri("prefill")]).identity(role=ServiceRole.PREFILL)
    callers = CallerRoles(tls.server)
    await rig.server.stop(None)
    rig.server = make_server(RoleGuard(callers, abort_with))
    servicer = AttachServicer(
        rig.transfers, ConnectorSet([rig.source_connector]), LAYOUT, SOURCE_EPOCH, lambda: 1, rig.digests, callers
    )
    kv_source_pb2_grpc.add_KvSourceServiceServicer_to_server(servicer, rig.server)
    rig.port = bind(rig.server, "127.0.0.1", 0, tls.server)
    await rig.server.start()
    await rig.channel.close()
    rig.channel = None
    yield rig
    if rig.channel is None:
        rig.channel = make_channel("127.0.0.1:1")


def call_as(rig: Any, authority: Authority, uris: Sequence[str]) -> None:
    rig.channel = make_channel(f"127.0.0.1:{rig.port}", authority.issue(uris=uris).identity().client)


@pytest.mark.parametrize("worker_id", [None, "decode-1"])
async def test_a_decode_worker_attaches_as_itself(
    secured: Any, until: Any, authority: Authority, worker_id: str | None
) -> None:
    call_as(secured, authority, [role_uri("decode", worker_id)])
    secured.expect()
    transfer = secured.receive()
    await until(lambda: transfer.state is ReceiverState.ATTACHED)


async def test_i8_a_decode_worker_attaches_as_no_other(secured: Any, until: Any, authority: Authority) -> None:
    call_as(secured, authority, [role_uri("decode", "decode-2")])
    source = secured.expect()
    transfer = secured.receive()
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert type(secured.owner.cause) is PermissionDenied
    assert "decode/decode-2, not for the worker 'decode-1'" in secured.owner.cause.message
    assert not source.has_ended


@pytest.mark.parametrize("role", ["router", "prefill"])
async def test_i8_nobody_else_attaches(secured: Any, until: Any, authority: Authority, role: str) -> None:
    call_as(secured, authority, [role_uri(role)])
    source = secured.expect()
    transfer = secured.receive(grace_s=0.0)
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert "no role spiffe://pdserve.internal/pdserve/decode" in secured.owner.cause.message
    assert not source.has_ended


class HidingChannel:
    """A channel whose first calls end as grpc.aio ends a call that the server refuses during a write."""

    def __init__(self, channel: Any, num_hidden: int) -> None:
        self._channel, self.num_hidden = channel, num_hidden
        self.num_calls = 0

    def stream_stream(self, *arguments: Any) -> Any:
        def call(requests: Any, **options: Any) -> Any:
            self.num_calls += 1
            made = self._channel.stream_stream(*arguments)(requests, **options)
            if self.num_calls <= self.num_hidden:
                made.read = self._read
            return made

        return call

    async def _read(self) -> Any:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, details="Internal error from Core")

    async def close(self) -> None:
        await self._channel.close()


@pytest.mark.parametrize(("num_hidden", "cause"), [(1, "no role spiffe"), (2, "Internal error from Core")])
async def test_a_hidden_status_is_asked_for_once_more(
    secured: Any, until: Any, authority: Authority, num_hidden: int, cause: str
) -> None:
    call_as(secured, authority, [role_uri("router")])
    secured.channel = HidingChannel(secured.channel, num_hidden)
    secured.expect()
    transfer = secured.receive(grace_s=0.0)
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert cause in secured.owner.cause.message
    assert secured.channel.num_calls == 2
