"""Roles in certificates: what counts as one, what a service's own must say, and which calls they open."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.common.errors import ConfigError, PermissionDenied
from pdserve.common.net.rpc import abort_with, bind, from_rpc_error, make_channel, make_server
from pdserve.common.security.role_guard import CALLERS, CallerRoles, RoleGuard
from pdserve.common.security.tls import ClientTls
from pdserve.common.security.tls_roles import PeerRoles, RoleName, ServiceRole, role_names
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from pdserve.v1 import kv_source_pb2_grpc, step_stream_pb2_grpc, worker_pb2_grpc
from tests.support.processes.tls_authority import ALL_ROLES, Authority, role_uri
from tests.support.run.waiting import HANG_S

ROLES = ("router", "prefill", "decode")
METHODS = {
    "/pdserve.v1.StepStreamService/Open": ("router",),
    "/pdserve.v1.WorkerService/Watch": ("router",),
    "/pdserve.v1.WorkerService/Meet": ("router",),
    "/pdserve.v1.KvSourceService/Attach": ("prefill", "decode"),
}


@pytest.mark.parametrize("uri", [role_uri("router"), role_uri("decode", "d-1.x_2"), role_uri("prefill", None, "a.b-c")])
def test_roles_are_written_as_they_are_read(uri: str) -> None:
    [name] = role_names([uri])
    assert str(name) == uri


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://example.org/ns/default/sa/decode",
        "spiffe://example.org/pdserve/driver",
        "spiffe://example.org/pdserve/decode/",
        "spiffe://example.org/pdserve/decode/a/b",
        "spiffe://example.org/pdserve/decode/" + "x" * 129,
        "spiffe://Example.org/pdserve/decode",
        "spiffe:///pdserve/decode",
        "spiffe://example.org/pdserve/decode?x",
        "spiffe://example.org/pdserve/decode\n",
        "https://example.org/pdserve/decode",
        "",
    ],
)
def test_other_uris_are_no_role(uri: str) -> None:
    assert role_names([uri, role_uri("router")]) == (RoleName("pdserve.internal", ServiceRole.ROUTER),)


def test_what_a_peer_lacks_is_said_with_what_it_has() -> None:
    peers = PeerRoles("a.example")
    decode = (ServiceRole.DECODE,)
    assert peers.objection([role_uri("decode", None, "a.example")], decode) is None
    assert peers.objection([role_uri("decode", "d1", "a.example")], decode, "d1") is None
    assert peers.objection([role_uri("decode", None, "a.example")], decode, "d1") is None
    other = peers.objection([role_uri("decode", "d1", "a.example")], decode, "d2")
    assert other is not None
    assert "is for spiffe://a.example/pdserve/decode/d1, not for the worker 'd2'" in other
    for uris in ([], [role_uri("decode", None, "b.example")], [role_uri("prefill", None, "a.example")]):
        objection = peers.objection(uris, decode)
        assert objection is not None
        assert "no role spiffe://a.example/pdserve/decode" in objection
        assert all(uri in objection for uri in uris)
    shown = peers.objection(["spiffe://x/" + "y" * 9000] * 100, decode)
    assert shown is not None
    assert len(shown) < 1000


def load(kind: Any, authority: Authority, *uris: str, **flags: Any) -> Any:
    return load_settings(kind, flags=authority.issue(uris=uris).settings() | flags, environ={})


def test_a_service_whose_certificate_lacks_its_role_does_not_start(authority: Authority) -> None:
    for uris in ((), (role_uri("prefill"),), ("spiffe://example.org/decode",)):
        with pytest.raises(ConfigError, match=r"tls_cert_file .*: no role .*/pdserve/decode.*tls_roles = ignore"):
            load(DecodeSettings, authority, *uris)
        identity = load(DecodeSettings, authority, *uris, tls_roles="ignore").tls()
        assert identity.server.peers is None
        assert identity.client.peers is None
    with pytest.raises(ConfigError, match=r"role decode is in 2 trust domains, a\.example, b\.example"):
        load(DecodeSettings, authority, *(role_uri("decode", None, domain) for domain in ("b.example", "a.example")))


def test_a_certificate_for_one_worker_is_no_others(authority: Authority) -> None:
    load(PrefillSettings, authority, role_uri("prefill", "p1"), worker_id="p1")
    load(PrefillSettings, authority, role_uri("prefill"), worker_id="p7")
    for given, flags in (("'p2'", {"worker_id": "p2"}), ("None", {})):
        with pytest.raises(ConfigError, match=f"prefill/p1, and worker_id is {given}: 'p1' is needed"):
            load(PrefillSettings, authority, role_uri("prefill", "p1"), **flags)


# Calls.


class _EveryMethod(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        async def unary(request: bytes, context: Any) -> bytes:
            return b"let in"

        async def stream(request: Any, context: Any) -> Any:
            yield b"let in"

        if details.method.startswith("/grpc."):
            return None
        if details.method.endswith("/Attach"):
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)


async def ask(address: str, method: str, tls: Any) -> str:
    """The answer to a call, or the error of a refused one."""
    async with make_channel(address, tls) as channel:
        try:
            if method.endswith("/Attach"):
                attach: Any = channel.stream_stream(method)
                # nothing is written: a write to a call that has been refused ends it with an error of the client's own
                first: bytes = await attach().read()
                return first.decode()
            ask_once: Any = channel.unary_unary(method)
            answer: bytes = await ask_once(b"x", timeout=HANG_S)
            return answer.decode()
        except grpc.aio.AioRpcError as error:
            refused = from_rpc_error(error)
            return refused.message if isinstance(refused, PermissionDenied) else repr(error)


class Served:
    """A worker's server, without a worker."""

    def __init__(self, authority: Authority, **roles: Any) -> None:
        identity = authority.issue().identity(**roles)
        self.server = make_server(RoleGuard(CallerRoles(identity.server), abort_with))
        self.server.add_generic_rpc_handlers((_EveryMethod(),))
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), self.server)
        reflection.enable_server_reflection([reflection.SERVICE_NAME], self.server)
        self.address = f"127.0.0.1:{bind(self.server, '127.0.0.1', 0, identity.server)}"

    async def __aenter__(self) -> Served:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(None)


async def test_each_method_is_called_by_its_role_alone(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    callers: dict[str, ClientTls] = {role: authority.issue(uris=[role_uri(role)]).identity().client for role in ROLES}
    callers["none"] = authority.issue(uris=[]).identity().client
    callers["another domain's"] = (
        authority.issue(uris=[role_uri(role, None, "elsewhere.example") for role in ROLES]).identity().client
    )
    async with Served(authority, role=ServiceRole.PREFILL) as served:
        for method, roles in METHODS.items():
            named = " or ".join(f"spiffe://pdserve.internal/pdserve/{role}" for role in roles)
            for caller, tls in callers.items():
                heard = await ask(served.address, method, tls)
                if caller in roles:
                    assert heard == "let in", (method, caller)
                else:
                    assert f"its certificate has no role {named}" in heard
        for tls in callers.values():
            assert "no role" in await ask(served.address, "/pdserve.v1.InferenceService/GetModel", tls)
    assert "127.0.0.1 called /pdserve.v1.KvSourceService/Attach and was refused" in caplog.text
    assert len(caplog.records) == len(METHODS) + 1, "once for each method"


async def test_health_and_reflection_are_for_every_role(authority: Authority) -> None:
    async with Served(authority, role=ServiceRole.DECODE) as served:
        for uris, is_let_in in ((ALL_ROLES[1:2], True), ((), False)):
            tls = authority.issue(uris=uris).identity().client
            async with make_channel(served.address, tls) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                request = health_pb2.HealthCheckRequest()
                watch = stub.Watch(request)
                if is_let_in:
                    assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
                    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
                    watch.cancel()
                    continue
                for call in (stub.Check(request), watch.read()):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call
                    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_roles_do_not_count_where_they_are_ignored(authority: Authority) -> None:
    async with Served(authority) as served:
        for method in METHODS:
            assert await ask(served.address, method, authority.issue(uris=[]).identity().client) == "let in"


def test_every_service_of_a_worker_has_its_callers() -> None:
    services = {
        name
        for module in (step_stream_pb2_grpc, worker_pb2_grpc, kv_source_pb2_grpc)
        for name in module.__dict__
        if name.endswith("ServiceServicer")
    }
    assert {f"pdserve.v1.{name.removesuffix('Servicer')}" for name in services} == {
        name for name in CALLERS if name.startswith("pdserve.")
    }
