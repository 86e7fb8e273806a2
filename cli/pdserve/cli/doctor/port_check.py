"""Ports that a service listens on: whether they are free, allowed, on an address of this machine, and distinct."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.cli.doctor.finding import Finding, failed, ok, warning
from pdserve.common.address.host_address import host_and_port, overlap
from pdserve.common.errors import ConfigError
from pdserve.common.net.http_server import listening_socket
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.worker_settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class Port:
    """A port that a service will listen on; 0 for a free port. purpose: shown in findings."""

    setting: str
    purpose: str
    host: str
    number: int


def ports_of(settings: WorkerSettings | RouterSettings) -> list[Port]:
    """All ports on which a service with these settings listens."""
    host = settings.host
    if isinstance(settings, RouterSettings):
        return [
            Port("port", "OpenAI HTTP", host, settings.port),
            Port("grpc_port", "gRPC", host, settings.grpc_port),
            Port("metrics_port", "metrics", settings.metrics_at, settings.metrics_port),
        ]
    return [
        Port("port", "gRPC", host, settings.port),
        Port("data_port", "KV blocks over TCP", host, settings.data_port),
        Port("metrics_port", "metrics", settings.metrics_at, settings.metrics_port),
    ]


@dataclass(frozen=True, slots=True)
class PortCheck:
    """Binds each port for a moment. Implements `Check`."""

    settings: WorkerSettings | RouterSettings
    name: str = "ports"
    deadline_s: float = 5.0

    def run(self) -> list[Finding]:
        """See `Check.run`."""
        ports = ports_of(self.settings)
        findings = [self._look(port) for port in ports]
        given = [port for port in ports if port.number]
        for number in sorted({port.number for port in given}):
            equal = [port for port in given if port.number == number]
            names = [
                port.setting
                for port in equal
                if any(other is not port and overlap(port.host, other.host) for other in equal)
            ]
            if names:
                findings.append(failed(f"{' and '.join(names)} are both {number}", "give each a number of its own"))
        return findings

    def _look(self, port: Port) -> Finding:
        where = f"{port.setting} {host_and_port(port.host, port.number)} ({port.purpose})"
        if not 0 <= port.number < 65536:
            return failed(f"{port.setting} is {port.number}", "use 0 to 65535")
        try:
            listening_socket(port.host, port.number).close()
        except ConfigError as error:
            return failed(f"{port.setting} ({port.purpose}): {error.message}", _advice(error, port))
        if port.number:
            return ok(f"{where} is free")
        if self._must_be_known(port):
            return warning(
                f"{port.setting} ({port.purpose}) is chosen at each start, and other machines must reach it",
                f"set {port.setting} if there is a firewall between the machines, or if routers are configured with addresses",
            )
        return ok(f"{port.setting} ({port.purpose}) is drawn at each start")

    def _must_be_known(self, port: Port) -> bool:
        return not is_loopback(port.host) and port.setting != "metrics_port"


def _advice(error: ConfigError, port: Port) -> str:
    reason = error.message.lower()
    if "in use" in reason:
        return f"end what listens there (`ss -ltnp 'sport = :{port.number}'` names it), or set another {port.setting}"
    if "permission" in reason:
        return f"ports below 1024 are root's: set another {port.setting}"
    return "`host` must be an address of this machine, or 0.0.0.0 with `advertise_host`"
