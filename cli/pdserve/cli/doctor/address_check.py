"""Addresses that peers connect to, and addresses that this service connects to."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import time
from collections.abc import Iterator
from functools import partial

from pdserve.cli.doctor.examination import in_background
from pdserve.cli.doctor.finding import Finding, failed, ok, warning
from pdserve.common.address.host_address import is_wildcard
from pdserve.common.errors import ConfigError
from pdserve.common.security.deployment_key import host_of, is_loopback
from pdserve.common.security.tls import ClientTls, tls_problem
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.worker_settings import WorkerSettings

CONNECT_S = 2.0
ANSWER_S = 12.0
"""Limit for all workers together; resolving a name has no limit of its own."""
_TLS = "all services need certificates of the CA in tls_ca_file, made out to the host that is connected to"


class _HungUp(Exception):
    """The worker closed the connection before it sent any byte."""


def check_addresses(settings: WorkerSettings | RouterSettings) -> Iterator[Finding]:
    """Check the address of a worker that peers connect to, or the workers' addresses that a router connects to."""
    if isinstance(settings, RouterSettings):
        yield from _workers(settings)
    else:
        yield _advertised(settings)


def _advertised(settings: WorkerSettings) -> Finding:
    try:
        host = settings.peers_host
    except ConfigError as error:
        return failed(error.message, "set advertise_host to the address by which other machines reach this one")
    peers = f"peers connect to {host}"
    try:
        addresses = _resolve(host)
    except OSError as error:
        return failed(f"{peers}, which does not resolve: {error.strerror or error}", "correct advertise_host or DNS")
    if is_loopback(addresses[0]):
        if settings.redis is not None:
            advice = "set host (and advertise_host) where workers or routers run on other machines"
            return warning(f"{peers}: loopback, which services on other machines cannot reach", advice)
        return ok(f"{peers}: loopback, for a cluster on this machine")
    if addresses != [host]:
        peers += f" ({', '.join(addresses)})"
    if not any(_is_ours(address) for address in addresses):
        advice = (
            "expected behind NAT or a published container port, else set advertise_host to an address of this machine"
        )
        return warning(f"{peers}, which is not an address of this machine", advice)
    if not is_wildcard(settings.host) and settings.host not in addresses and not _same(settings.host, addresses):
        advice = "listen on 0.0.0.0, or advertise the address that is listened on"
        return failed(f"{peers}, but this worker listens on {settings.host} alone", advice)
    return ok(peers)


def _workers(settings: RouterSettings) -> Iterator[Finding]:
    named = [*(("prefill", one) for one in settings.prefill), *(("decode", one) for one in settings.decode)]
    if settings.redis is None and not settings.decode:
        kind, names = ("decode worker", "decode") if named else ("worker", "prefill and decode")
        yield failed(f"no {kind} is named and no Redis is given", f"set {names}, or redis")
        return
    if not named:
        yield ok("workers are found through Redis")
        return
    identity = settings.tls()
    tls = identity.client if identity is not None else None
    answers = [in_background(partial(_reach, role, address, tls), f"reach-{address}") for role, address in named]
    ends = time.monotonic() + ANSWER_S
    for answer, (_, address) in zip(answers, named, strict=True):
        try:
            yield answer.get(timeout=max(0.0, ends - time.monotonic()))
        except queue.Empty:
            yield failed(f"{address}: nothing within {ANSWER_S:g} s", "look at the name service")


def _reach(role: str, address: str, tls: ClientTls | None) -> Finding:
    host, port = host_of(address), int(address.rpartition(":")[2])
    started = time.monotonic()
    try:
        with socket.create_connection((host, port), CONNECT_S) as connection:
            if tls is not None:
                _shake_hands(connection, tls.server_name or host, tls)
    except socket.gaierror as error:
        return failed(f"{role} worker {address} does not resolve: {error.strerror}", "correct the name, or DNS")
    except ssl.SSLError as error:
        return failed(f"{role} worker {address} is there, and cannot be spoken to over {tls_problem(error)}", _TLS)
    except _HungUp:
        what = f"{role} worker {address} hangs up: it does not take our certificate, or speaks no TLS"
        return failed(what, _TLS)
    except OSError as error:
        why = error.strerror or str(error) or "no answer"
        return warning(
            f"{role} worker {address} cannot be reached: {why}",
            "start it (the order does not matter), or look at the address and at firewalls",
        )
    return ok(f"{role} worker {address} answers after {(time.monotonic() - started) * 1e3:.1f} ms")


def _shake_hands(connection: socket.socket, name: str, tls: ClientTls) -> None:
    """Wait for the worker's first bytes, which it sends only if it accepts our certificate.

    Raises: SSLError, _HungUp, or another OSError.
    """
    tls.context.set_alpn_protocols(["h2"])
    with tls.context.wrap_socket(connection, server_hostname=name) as secured:
        try:
            first = secured.recv(1)
        except ConnectionError as error:
            raise _HungUp from error
        if not first:
            raise _HungUp


def _resolve(host: str) -> list[str]:
    """Raises: OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def _same(host: str, addresses: list[str]) -> bool:
    with contextlib.suppress(OSError):
        return bool(set(_resolve(host)) & set(addresses))
    return False


def _is_ours(address: str) -> bool:
    """True if the address belongs to an interface of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
