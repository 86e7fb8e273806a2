"""Ports that a service listens on, and the number of connections that it may have open."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pdserve.cli.doctor.finding import Finding, failed, ok, warning
from pdserve.common.address.descriptors import ENOUGH_DESCRIPTORS, KEPT_BACK
from pdserve.common.address.host_address import host_and_port, overlap
from pdserve.common.errors import ConfigError
from pdserve.common.net.http_server import listening_socket
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.worker_settings import PrefillSettings, WorkerSettings

FEW_DESCRIPTORS = 4096
_RAISE = "raise the hard limit: `ulimit -Hn`, `LimitNOFILE=` of systemd, `ulimits: nofile` of a container"


class Port(NamedTuple):
    """A port that a service will listen on; number 0 for a free one."""

    setting: str
    purpose: str
    host: str
    number: int


def ports_of(settings: WorkerSettings | RouterSettings) -> list[Port]:
    """All ports on which a service with these settings listens."""
    metrics = Port("metrics_port", "metrics", settings.metrics_at, settings.metrics_port)
    if isinstance(settings, RouterSettings):
        return [
            Port("port", "OpenAI HTTP", settings.host, settings.port),
            Port("grpc_port", "gRPC", settings.host, settings.grpc_port),
            metrics,
        ]
    ports = [
        Port("port", "gRPC", settings.host, settings.port),
        Port("data_port", "KV blocks over TCP", settings.host, settings.data_port),
        metrics,
    ]
    if settings.engine_process and isinstance(settings, PrefillSettings):
        ports.append(Port("attach_port", "gRPC of the engine's process", settings.host, settings.attach_port))
    return ports


def check_ports(settings: WorkerSettings | RouterSettings) -> Iterator[Finding]:
    """Each port is free, allowed, on an address of this machine, and distinct. Each is listened on for a moment."""
    ports = ports_of(settings)
    yield from map(_listen, ports)
    for conflict in conflicts(ports):
        yield failed(conflict, "give each a number of its own")


def conflicts(ports: Sequence[Port]) -> Iterator[str]:
    """One sentence per number that two of the ports have at addresses that overlap."""
    for number in sorted({port.number for port in ports if port.number}):
        equal = [port for port in ports if port.number == number]
        names = [
            port.setting
            for port in equal
            if any(other is not port and overlap(port.host, other.host) for other in equal)
        ]
        if names:
            yield f"{' and '.join(names)} are both {number}"


def _listen(port: Port) -> Finding:
    named = f"{port.setting} ({port.purpose})"
    if not 0 <= port.number < 65536:
        return failed(f"{port.setting} is {port.number}", "use 0 to 65535")
    try:
        listening_socket(port.host, port.number).close()
    except ConfigError as error:
        return failed(f"{named}: {error.message}", advice_for(error, port))
    if port.number:
        return ok(f"{port.setting} {host_and_port(port.host, port.number)} ({port.purpose}) is free")
    if is_loopback(port.host) or port.setting == "metrics_port":
        return ok(f"{named} is drawn at each start")
    return warning(
        f"{named} is chosen at each start, and other machines must reach it",
        f"set {port.setting} if there is a firewall between the machines, or if routers are configured with addresses",
    )


def advice_for(error: ConfigError, port: Port) -> str:
    """Advice for a port that cannot be listened on. error: of the attempt."""
    reason = error.message.lower()
    if "in use" in reason:
        return f"end what listens there (`ss -ltnp 'sport = :{port.number}'` names it), or set another {port.setting}"
    if "permission" in reason:
        return f"ports below 1024 are root's: set another {port.setting}"
    return "`host` must be an address of this machine, or 0.0.0.0 with `advertise_host`"


def check_descriptors(settings: WorkerSettings | RouterSettings) -> Iterator[Finding]:
    """How many connections a service may have open; it raises its soft limit to the hard one when it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_DESCRIPTORS)
    needed = 0
    if isinstance(settings, RouterSettings) and settings.limits.max_connections is not None:
        needed = 2 * settings.limits.max_connections + KEPT_BACK
    shown = f"at most {limit} files may be open"
    if needed > limit:
        what = f"{shown}, and max_connections of two front ends with what workers need are {needed}"
        yield failed(what, f"lower max_connections, or {_RAISE}")
    elif limit < FEW_DESCRIPTORS:
        yield warning(f"{shown}, and each connection is one", _RAISE)
    else:
        yield ok(f"{limit} files may be open")
