"""TLS: which connections are encrypted, when certificates expire, and which keys other users can read."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime

from pdserve.cli.doctor.finding import Finding, ok, warning
from pdserve.cli.doctor.secret_file import exposed
from pdserve.common.net.tls_renewal import SOON_S
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.security.tls import ServerTls
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.worker_settings import WorkerSettings

_HOW = "certificates, as docs/deploy.md makes them; or keep others from that network"


@dataclass(frozen=True, slots=True)
class TlsCheck:
    """Checks TLS in valid settings; settings with unusable files were refused before. Implements `Check`."""

    settings: WorkerSettings | RouterSettings
    name: str = "tls"
    deadline_s: float = 5.0

    def run(self) -> list[Finding]:
        """See `Check.run`."""
        settings = self.settings
        identity = settings.tls()
        if identity is None:
            findings = _workers_in_the_clear(settings)
        else:
            findings = _shown("services", identity.server, settings.tls_cert_file, settings.tls_key_file)
        if not isinstance(settings, RouterSettings):
            return findings or [_in_the_clear(settings)]
        if (front := settings.front_tls()) is None:
            return [*findings, _in_the_clear(settings)]
        return [*findings, *_shown("clients", front, settings.front_tls_cert_file, settings.front_tls_key_file)]


def _shown(to_whom: str, tls: ServerTls, certificate: str | None, key: str | None) -> list[Finding]:
    until = (
        f"{certificate}, which {to_whom} are shown, is valid until {datetime.fromtimestamp(tls.valid_until, UTC):%F}"
    )
    finding = (
        warning(until, "renew it: services read new files by themselves")
        if tls.valid_until - time.time() < SOON_S
        else ok(until)
    )
    return [finding, *exposed(key)]


def _workers_in_the_clear(settings: WorkerSettings | RouterSettings) -> list[Finding]:
    """Warn of workers in a router's settings; workers found through Redis check themselves."""
    named = (*settings.prefill, *settings.decode) if isinstance(settings, RouterSettings) else ()
    beyond = [address for address in named if not is_loopback(address)]
    return [warning(f"not configured: connections to {', '.join(beyond)} are not encrypted", _HOW)] if beyond else []


def _in_the_clear(settings: WorkerSettings | RouterSettings) -> Finding:
    if is_loopback(settings.host):
        return ok("not configured: what goes over this machine's loopback is in the clear")
    where = "what clients send to" if isinstance(settings, RouterSettings) else "what goes over"
    return warning(
        f"not configured: {where} {settings.host} is in the clear",
        _HOW,
    )
