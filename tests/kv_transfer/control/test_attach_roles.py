"""Attach under TLS: the receiver is the worker that the caller's certificate names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from pdserve.common.errors import PermissionDenied
from pdserve.common.net.rpc import abort_with, bind, make_channel, make_server
from pdserve.common.security.role_guard import CallerRoles, RoleGuard
from pdserve.common.security.tls_roles import ServiceRole
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control.attach_servicer import AttachServicer
from pdserve.kv_transfer.control.transfer_state import ReceiverState
from pdserve.v1 import kv_source_pb2_grpc
from tests.support.processes.tls_authority import Authority, role_uri

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


@pytest.mark.parametrize(
    ("role", "asked_for"), [("router", "spiffe://pdserve.internal/pdserve/prefill or "), ("prefill", "")]
)
async def test_i8_nobody_else_attaches(
    secured: Any, until: Any, authority: Authority, role: str, asked_for: str
) -> None:
    call_as(secured, authority, [role_uri(role)])
    source = secured.expect()
    transfer = secured.receive(grace_s=0.0)
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert f"no role {asked_for}spiffe://pdserve.internal/pdserve/decode" in secured.owner.cause.message
    assert not source.has_ended
