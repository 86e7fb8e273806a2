"""Users, passwords and TLS; and no password in any log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest
from redis import exceptions

from pdserve.common.registry.redis_connection import make_redis
from pdserve.common.registry.redis_url import parse_redis_url
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings
from tests.support.processes.redis_server import RedisServer
from tests.support.run.waiting import HANG_S, eventually
from tests.support.transfers.registry_world import World, lines, settled

PASSWORD = "s3cret/with@odd:signs"
COMMANDS = [
    "set",
    "getrange",
    "hmget",
    "hget",
    "hset",
    "scard",
    "sscan",
    "sadd",
    "srem",
    "del",
    "type",
    "time",
    "zadd",
    "zrevrange",
    "zremrangebyscore",
    "zrem",
    "xadd",
    "xread",
    "xrevrange",
    "pexpire",
    "memory|usage",
    "multi",
    "exec",
    "watch",
    "unwatch",
    "ping",
]
"""All that services ask of Redis (docs/protocol.md)."""


class Door:
    """Stands in for the server in a `World`, with another URL."""

    def __init__(self, server: RedisServer, url: str) -> None:
        self.url, self.do = url, server.do


def allow(server: RedisServer) -> None:
    """A user that may do no more than it must, under its own namespace."""
    server.do("ACL", "SETUSER", "pd", "reset", "on", f">{PASSWORD}", "~{test}:*", *(f"+{name}" for name in COMMANDS))


async def test_a_user_with_the_least_rights(own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    allow(own_redis)
    url = f"redis://pd:{quote(PASSWORD, safe='')}@127.0.0.1:{own_redis.port}/0"
    world = World(Door(own_redis, url))  # type: ignore[arg-type]
    try:
        worker = await world.worker()
        worker.change(stored=range(20))
        router = await world.router()
        await settled(world, router, worker)
        # also what repairs needs
        own_redis.do("SET", "{test}:workers", "x")
        await eventually(lambda: lines(caplog, "foreign values stood"))
        await settled(world, router, worker)
        assert not worker.publisher.breaker.errors["denied"]
    finally:
        await world.close()
    assert PASSWORD not in caplog.text
    assert quote(PASSWORD, safe="") not in caplog.text


@pytest.mark.parametrize("who", [f"pd:wrong-{PASSWORD[:6]}", f":{PASSWORD[:6]}"], ids=["user", "default"])
async def test_a_wrong_password_is_one_line(own_redis: RedisServer, who: str, caplog: pytest.LogCaptureFixture) -> None:
    allow(own_redis)
    own_redis.do("CONFIG", "SET", "maxmemory", "0")
    own_redis.do("ACL", "SETUSER", "default", "off")
    world = World(Door(own_redis, f"redis://{who}@127.0.0.1:{own_redis.port}/0"))  # type: ignore[arg-type]
    try:
        await world.worker()
        await world.router()
        await eventually(lambda: len(lines(caplog, "cannot be used (denied")) == 2)
        await asyncio.sleep(0.5)
        assert len(lines(caplog, "cannot be used")) == 2
        assert PASSWORD[:6] not in caplog.text
    finally:
        await world.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(certificate, key) for 127.0.0.1, signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=redis", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@pytest.fixture
async def tls_port(own_redis: RedisServer, certificate: tuple[Path, Path]) -> AsyncIterator[int]:
    """Before the server, what ends TLS and passes bytes on: not every build of the server has TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    carried: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", own_redis.port)
        for pair in ((reader, inner_writer), (inner_reader, writer)):
            carried.add(asyncio.create_task(carry(*pair)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for task in carried:
        task.cancel()
    await asyncio.gather(*carried, return_exceptions=True)


async def test_tls(
    own_redis: RedisServer, tls_port: int, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # as if the system trusted it: what the setting does is tested with the client alone
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    world = World(Door(own_redis, f"rediss://127.0.0.1:{tls_port}/0"))  # type: ignore[arg-type]
    try:
        worker = await world.worker()
        worker.change(stored=range(20))
        await settled(world, await world.router(), worker)
    finally:
        await world.close()


async def test_tls_with_certificates_of_ones_own(tls_port: int, certificate: tuple[Path, Path]) -> None:
    flags = {"redis": f"rediss://127.0.0.1:{tls_port}", "redis_ca_file": str(certificate[0])}
    load_settings(DecodeSettings, flags=flags, environ={}).verify()
    client = make_redis(parse_redis_url(f"rediss://127.0.0.1:{tls_port}"), str(certificate[0]))
    try:
        async with asyncio.timeout(HANG_S):
            while True:
                # handshakes of both sides happen in this thread: on a busy machine they can take longer than one try may
                with contextlib.suppress(exceptions.TimeoutError):
                    assert await client.ping()
                    break
    finally:
        await client.aclose()


async def test_a_certificate_that_nobody_trusts_is_refused(
    own_redis: RedisServer, tls_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(Door(own_redis, f"rediss://127.0.0.1:{tls_port}/0"))  # type: ignore[arg-type]
    try:
        worker = await world.worker()
        await eventually(lambda: lines(caplog, "cannot be used (unreachable"))
        assert "CERTIFICATE_VERIFY_FAILED" in lines(caplog, "cannot be used (unreachable")[0]
        assert not own_redis.do("KEYS", "*")
        assert worker.publisher.breaker.errors["unreachable"]
    finally:
        await world.close()
