"""A router's doctor and its workers under TLS: who takes whose certificate, and what is in the clear."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pdserve.cli.doctor.address_check import check_addresses
from pdserve.cli.doctor.credentials_check import check_tls
from pdserve.cli.doctor.finding import Finding, Verdict
from pdserve.common.net.rpc import bind, make_server
from pdserve.common.security.tls import ServerTls
from pdserve.common.settings.router_settings import RouterSettings
from tests.support.processes.tls_authority import Authority, IssuedFiles


def verdicts(findings: list[Finding]) -> list[str]:
    assert all(bool(finding.advice) is (finding.verdict is not Verdict.OK) for finding in findings), "advice if not ok"
    return [finding.verdict.value for finding in findings]


def test_a_router_whose_workers_are_beyond_loopback_in_the_clear(authority: Authority) -> None:
    workers: dict[str, Any] = {"prefill": ("127.0.0.1:1",), "decode": ("10.0.0.2:1", "decode-1.example:2")}
    findings = list(check_tls(RouterSettings(**workers)))
    assert verdicts(findings) == ["warning", "ok"]
    assert "connections to 10.0.0.2:1, decode-1.example:2 are not encrypted" in findings[0].what
    assert verdicts(list(check_tls(RouterSettings(decode=("127.0.0.1:1",))))) == ["ok"]
    issued = authority.issue()
    with_tls = list(check_tls(RouterSettings(**workers, **issued.settings(), host="0.0.0.0", insecure=True)))
    in_the_clear = [finding.what for finding in with_tls if "in the clear" in finding.what]
    assert in_the_clear == ["not configured: what clients send to 0.0.0.0 is in the clear"]


@asynccontextmanager
async def served(tls: ServerTls | None) -> AsyncIterator[str]:
    """The address of a worker's gRPC port."""
    server = make_server()
    port = bind(server, "127.0.0.1", 0, tls)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def reach(tls: ServerTls | None, router: IssuedFiles) -> Finding:
    """A router's doctor's finding about a worker."""
    async with served(tls) as address:
        settings = RouterSettings(decode=(address,), **router.settings())
        [finding] = await asyncio.to_thread(lambda: list(check_addresses(settings)))
        return finding


async def test_a_router_shakes_hands_with_its_workers(authority: Authority, other_authority: Authority) -> None:
    router = authority.issue()
    assert (await reach(authority.identity().server, router)).verdict is Verdict.OK
    stranger = await reach(other_authority.identity().server, router)
    assert stranger.verdict is Verdict.FAILED
    assert "unable to get local issuer" in stranger.what
    misnamed = await reach(authority.identity("decode-1.example").server, router)
    assert misnamed.verdict is Verdict.FAILED
    assert "IP address mismatch" in misnamed.what
    plain = await reach(None, router)
    assert plain.verdict is Verdict.FAILED


async def test_a_worker_that_does_not_take_the_routers_certificate(
    authority: Authority, other_authority: Authority, tmp_path: Path
) -> None:
    other = other_authority.issue()
    worker = authority.identity().server
    # it trusts the worker's CA, and shows a certificate of another
    mixed = tmp_path / "both.pem"
    mixed.write_bytes(other.ca.read_bytes() + authority.ca_file.read_bytes())
    finding = await reach(worker, IssuedFiles(other.cert, other.key, mixed))
    assert finding.verdict is Verdict.FAILED, finding
    # the worker sends an alert and closes; whether the alert is read first is the network's affair
    assert "does not take our certificate" in finding.what or "over TLS" in finding.what


def test_a_worker_that_is_silent_is_not_waited_for(authority: Authority) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        settings = RouterSettings(decode=(f"127.0.0.1:{silent.getsockname()[1]}",), **authority.issue().settings())
        [finding] = list(check_addresses(settings))
    assert finding.verdict is Verdict.WARNING
    assert "timed out" in finding.what
