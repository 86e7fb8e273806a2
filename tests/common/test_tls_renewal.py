"""Certificates change under a running service: new connections get the new ones, open ones live on, broken files change nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import uvloop
from cryptography import x509

from pdserve.common.net import tls_renewal
from pdserve.common.net.http_server import HttpServer, listening_socket
from pdserve.common.net.renewed_channel import RenewedChannel
from pdserve.common.net.rpc import bind, make_channel, make_server
from pdserve.common.net.tls_renewal import TlsRenewal
from pdserve.common.security.tls import ServerTls, TlsIdentity
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import PrefillSettings
from pdserve.common.tasks.background_task import background_task
from pdserve.common.telemetry.metrics import tls_families
from pdserve.kv_transfer.tcp.tcp_stream import TcpStream, dial
from pdserve.kv_transfer.tcp.tls_stream import TlsStream
from tests.support.processes.tls_authority import Authority, IssuedFiles, role_uri
from tests.support.run.waiting import HANG_S, eventually

HOST = "127.0.0.1"
POLL_S = 0.05


class Files:
    """The files that a service was started with; others take their names."""

    def __init__(self, folder: Path, issued: IssuedFiles) -> None:
        folder.mkdir()
        self.held = IssuedFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
        self.replace(issued)

    def replace(self, issued: IssuedFiles, *cas: Path) -> None:
        """cas: trusted instead of the CA of `issued`."""
        self.put(self.held.cert, issued.cert.read_bytes())
        self.put(self.held.key, issued.key.read_bytes())
        self.put(self.held.ca, b"".join(ca.read_bytes() for ca in cas or (issued.ca,)))

    @staticmethod
    def put(path: Path, content: bytes) -> None:
        """Under another name first, as secrets are replaced."""
        other = path.with_suffix(".new")
        other.write_bytes(content)
        os.replace(other, path)  # noqa: PTH105


@pytest.fixture
def files(tmp_path: Path, authority: Authority) -> Files:
    return Files(tmp_path / "held", authority.issue())


@pytest.fixture(autouse=True)
def quick_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_renewal, "POLL_S", POLL_S)


@asynccontextmanager
async def renewing(files: Files) -> AsyncIterator[tuple[TlsIdentity, TlsRenewal]]:
    settings = load_settings(PrefillSettings, flags=files.held.settings(), environ={})
    identity = settings.tls()
    assert identity is not None
    renewal = TlsRenewal(settings, identity)
    task = background_task("certificates", renewal.run)
    try:
        yield identity, renewal
    finally:
        task.cancel()
        await asyncio.wait({task})


def serial(certificate: bytes) -> int:
    return x509.load_pem_x509_certificates(certificate)[0].serial_number


def shown_serial(port: int, client: ssl.SSLContext) -> int:
    """Serial number of the certificate that a server shows now."""
    with (
        socket.create_connection((HOST, port), HANG_S) as sock,
        client.wrap_socket(sock, server_hostname=HOST) as secured,
    ):
        shown = secured.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown).serial_number


def client_context(issued: IssuedFiles, *cas: Path) -> ssl.SSLContext:
    """cas: trusted instead of the CA of `issued`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for ca in cas or (issued.ca,):
        context.load_verify_locations(ca)
    context.load_cert_chain(issued.cert, issued.key)
    return context


# The files.


async def test_new_files_take_over_and_the_metric_follows(
    files: Files, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with renewing(files) as (identity, renewal):
        renewal.log_expiry()
        assert "the certificate for services" in caplog.text
        assert "for 30.0 days" in caplog.text
        first = identity.server.valid_until
        assert renewal.expiries() == {"services": first}
        soon = authority.issue(not_after=datetime.now(UTC) + timedelta(days=3))
        files.replace(soon)
        await eventually(lambda: identity.server.current is not identity.server)
        assert identity.server.current.certificate == soon.cert.read_bytes()
        assert identity.client.current.key == soon.key.read_bytes()
        [family] = tls_families(renewal.expiries())
        assert [(sample.labels, sample.value) for sample in family.samples] == [
            ({"peers": "services"}, identity.server.current.valid_until)
        ]
        assert identity.server.current.valid_until < first
        await eventually(lambda: "was read again and is valid until" in caplog.text)
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "for 3.0 days" in warning.getMessage()


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ["half of a pair", "no PEM", "gone", "another role", "expired"])
async def test_files_that_cannot_be_used_are_told_of_once_and_change_nothing(
    files: Files, authority: Authority, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    good = authority.issue()
    async with renewing(files) as (identity, _):
        match what:
            case "half of a pair":
                files.put(files.held.cert, good.cert.read_bytes())
            case "no PEM":
                files.put(files.held.key, b"half a file")
            case "gone":
                files.held.ca.unlink()
            case "another role":
                files.replace(authority.issue(uris=[role_uri("decode")]))
            case "expired":
                dates = (datetime(2020, 1, 1, tzinfo=UTC), datetime(2021, 1, 1, tzinfo=UTC))
                files.replace(authority.issue(not_before=dates[0], not_after=dates[1]))
        await eventually(lambda: "the old one stays" in caplog.text)
        await asyncio.sleep(4 * POLL_S)
        assert identity.server.current is identity.server
        assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
        files.replace(good)
        await eventually(lambda: identity.server.current.certificate == good.cert.read_bytes())


async def test_files_are_not_read_while_they_are_being_written(
    files: Files, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """A pair is two files, which nobody writes at one moment."""
    new = authority.issue()
    async with renewing(files) as (identity, _):
        for _ in range(6):
            files.put(files.held.cert, new.cert.read_bytes())
            files.held.cert.touch()
            await asyncio.sleep(POLL_S / 4)
        files.put(files.held.key, new.key.read_bytes())
        await eventually(lambda: identity.server.current.certificate == new.cert.read_bytes())
    assert "cannot be used" not in caplog.text


async def test_links_that_change_their_target_are_new_files(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """As Kubernetes mounts secrets."""
    generations = [tmp_path / "1", tmp_path / "2"]
    for folder in generations:
        Files(folder, authority.issue())
    current = tmp_path / "current"
    current.symlink_to(generations[0])
    held = Files.__new__(Files)
    held.held = IssuedFiles(*(current / name for name in ("cert.pem", "key.pem", "ca.pem")))
    async with renewing(held) as (identity, _):
        other = tmp_path / "other"
        other.symlink_to(generations[1])
        other.replace(current)
        await eventually(lambda: identity.server.current.certificate == (generations[1] / "cert.pem").read_bytes())


# gRPC.


class _Echo(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        async def echo(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
            async for request in requests:
                yield request

        return grpc.stream_stream_rpc_method_handler(echo)


@asynccontextmanager
async def served(tls: ServerTls) -> AsyncIterator[int]:
    server = make_server()
    server.add_generic_rpc_handlers((_Echo(),))
    port = bind(server, HOST, 0, tls)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def echoed(call: Any, message: bytes) -> bytes:
    await call.write(message)
    answer: bytes = await asyncio.wait_for(call.read(), HANG_S)
    return answer


async def test_both_sides_of_grpc_change_to_another_ca_while_calls_go_on(
    files: Files, tmp_path: Path, authority: Authority, other_authority: Authority
) -> None:
    """First both CAs, then new certificates, then the new CA alone: no call is lost, and in the end the old is out."""
    client_files = Files(tmp_path / "client", authority.issue())
    both = (authority.ca_file, other_authority.ca_file)
    async with (
        renewing(files) as (server, _),
        renewing(client_files) as (client, _),
        served(server.server) as port,
        make_channel(f"{HOST}:{port}", client.client) as channel,
    ):
        assert isinstance(channel, RenewedChannel)
        method = channel.stream_stream("/x/echo")
        old = method()
        assert await echoed(old, b"before") == b"before"
        steps = [
            (authority.issue(), authority.issue(), both),
            (other_authority.issue(), authority.issue(), both),
            (other_authority.issue(), other_authority.issue(), both),
            (other_authority.issue(), other_authority.issue(), (other_authority.ca_file,)),
        ]
        for server_files, new_client_files, cas in steps:
            files.replace(server_files, *cas)
            client_files.replace(new_client_files, *cas)
            await eventually(lambda: server.server.current.certificate == files.held.cert.read_bytes())
            await eventually(lambda: client.client.current.certificate == client_files.held.cert.read_bytes())
            await eventually(lambda: server.server.current.client_ca == files.held.ca.read_bytes())
            await eventually(lambda: client.client.current.ca == client_files.held.ca.read_bytes())
            new = method()
            assert await echoed(new, b"now") == b"now"
            new.cancel()
            assert await echoed(old, b"still") == b"still"
        assert len(channel._retired) == 1, "the one that carries the old call"
        await old.done_writing()
        assert await asyncio.wait_for(old.read(), HANG_S) is grpc.aio.EOF
        await eventually(lambda: not channel._retired)
        stale = authority.issue().identity().client
        async with make_channel(f"{HOST}:{port}", stale) as refused:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await refused.stream_stream("/x/echo")().read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_grpc_server_shows_the_new_certificate(files: Files, authority: Authority) -> None:
    context = client_context(authority.issue())
    context.set_alpn_protocols(["h2"])
    async with renewing(files) as (identity, _), served(identity.server) as port:
        assert await asyncio.to_thread(shown_serial, port, context) == serial(identity.server.certificate)
        files.replace(new := authority.issue())
        await eventually(lambda: identity.server.current is not identity.server)
        assert await asyncio.to_thread(shown_serial, port, context) == serial(new.cert.read_bytes())


async def test_closing_a_renewed_channel_ends_every_generation(files: Files, authority: Authority) -> None:
    async with renewing(files) as (identity, _), served(identity.server) as port:
        channel = make_channel(f"{HOST}:{port}", identity.client)
        calls: list[Any] = []
        for _ in range(3):
            calls.append(channel.stream_stream("/x/echo")())
            assert await echoed(calls[-1], b"x") == b"x"
            before = identity.client.current
            files.replace(authority.issue())
            await eventually(lambda: identity.client.current is not before)  # noqa: B023
        await channel.close()
        for call in calls:
            with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
                await call.read()


# HTTP and the data plane.


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.few(1)
@pytest.mark.parametrize("loop_policy", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_the_http_front_changes_certificate_and_clients_ca(
    tmp_path: Path, authority: Authority, other_authority: Authority, loop_policy: Callable[[], Any]
) -> None:
    with asyncio.Runner(loop_factory=loop_policy) as runner:
        runner.run(_http_front(tmp_path, authority, other_authority))


async def _http_front(tmp_path: Path, authority: Authority, other_authority: Authority) -> None:
    files = Files(tmp_path / "front", authority.issue())
    names = ("front_tls_cert_file", "front_tls_key_file", "front_tls_client_ca_file")
    flags = dict(zip(names, map(str, (files.held.cert, files.held.key, files.held.ca)), strict=True))
    settings = load_settings(RouterSettings, flags=flags, environ={})
    front = settings.front_tls()
    assert front is not None
    renewal = TlsRenewal(settings, None, front, settings.front_tls)
    assert list(renewal.expiries()) == ["clients"]
    task = background_task("certificates", renewal.run)
    http_socket = listening_socket(HOST, 0)
    server = HttpServer(answer, 5, 1, front)
    serving = asyncio.create_task(server.serve(sockets=[http_socket]))
    await server.listening.wait()
    port = http_socket.getsockname()[1]
    old, new = client_context(authority.issue()), client_context(other_authority.issue(), authority.ca_file)
    kept = await asyncio.open_connection(HOST, port, ssl=old)
    assert await _get(*kept)
    assert not await asyncio.to_thread(_is_let_in, port, new)
    issued = authority.issue()
    files.replace(issued, other_authority.ca_file)
    await eventually(lambda: front.current is not front)
    assert await asyncio.to_thread(shown_serial, port, new) == serial(issued.cert.read_bytes())
    assert await asyncio.to_thread(_is_let_in, port, new)
    assert not await asyncio.to_thread(_is_let_in, port, old), "its CA is trusted no more"
    assert await _get(*kept), "what is open lives on"
    kept[1].close()
    server.stop()
    await serving
    http_socket.close()
    task.cancel()
    await asyncio.wait({task})


async def _get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    return (await asyncio.wait_for(reader.readuntil(b"ok"), HANG_S)).startswith(b"HTTP/1.1 200")


def _is_let_in(port: int, context: ssl.SSLContext) -> bool:
    """Under TLS 1.3 a client hears with its first answer what the server thinks of its certificate."""
    with socket.create_connection((HOST, port), HANG_S) as sock:
        try:
            with context.wrap_socket(sock, server_hostname=HOST) as secured:
                secured.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                return secured.recv(4) == b"HTTP"
        except (ssl.SSLError, ConnectionError):
            return False


async def test_the_data_plane_shakes_hands_with_what_is_current(
    files: Files, authority: Authority, other_authority: Authority
) -> None:
    async with renewing(files) as (identity, _):
        old = client_context(authority.issue())
        assert await asyncio.to_thread(_shake_hands, identity.server, old) == serial(identity.server.certificate)
        issued = other_authority.issue()
        files.replace(issued)
        await eventually(lambda: identity.server.current is not identity.server)
        new = client_context(other_authority.issue())
        assert await asyncio.to_thread(_shake_hands, identity.server, new) == serial(issued.cert.read_bytes())
        stale = client_context(authority.issue(), other_authority.ca_file)
        assert await asyncio.to_thread(_shake_hands, identity.server, stale) is None, "its CA is trusted no more"


def _shake_hands(tls: ServerTls, client: ssl.SSLContext) -> int | None:
    """The serial of the certificate that a source shows; None when it does not take the client's."""
    with socket.create_server((HOST, 0)) as listener:
        sides: list[Any] = []

        def serve() -> None:
            accepted, _ = listener.accept()
            stream = TcpStream(accepted, 5.0, 5.0)
            try:
                sides.append(TlsStream(stream, tls.context, 5.0))
            except Exception as error:
                sides.append(error)
            stream.close()

        thread = threading.Thread(target=serve)
        thread.start()
        stream = dial(HOST, listener.getsockname()[1], 5.0, 5.0, 5.0)
        reader = TlsStream(stream, client, 5.0, HOST)
        shown = reader._ssl.getpeercert(binary_form=True)
        thread.join()
        reader.close()
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number if isinstance(sides[0], TlsStream) else None
