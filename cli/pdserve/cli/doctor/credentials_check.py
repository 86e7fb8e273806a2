"""Deployment key, certificates and API keys: whether they can be used, until when, and who can read or change their files."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pdserve.cli.doctor.finding import Finding, failed, ok, warning
from pdserve.common.errors import ConfigError
from pdserve.common.net.tls_renewal import SOON_S
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.security.tls import ServerTls
from pdserve.common.settings.api_key_file import KeyEntry, read_keys
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.service_settings import ServiceSettings
from pdserve.common.settings.worker_settings import WorkerSettings

EXPIRES_SOON = timedelta(days=14)
_OTHERS_READ = stat.S_IRGRP | stat.S_IROTH
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_HOW_TLS = "certificates, as docs/deploy.md makes them; or keep others from that network"


def check_key(settings: ServiceSettings) -> Iterator[Finding]:
    """Deployment key: whether it is set, and whether other users can read it."""
    try:
        key, is_public = settings.key()
    except ConfigError as error:
        advice = "make one with `openssl rand -hex 32`, and give it to every service of this deployment"
        yield failed(error.message, advice)
        return
    if is_public:
        yield warning(
            "the public development key: any process on this machine can send requests to workers",
            "set PDSERVE_DEPLOYMENT_KEY when other users share this machine, and before leaving loopback",
        )
        return
    yield ok(f"given; every service of this deployment must show the check value {key.fingerprint}")
    yield from _exposed(settings.deployment_key_file)


def check_tls(settings: WorkerSettings | RouterSettings) -> Iterator[Finding]:
    """Say which connections are encrypted and until when the certificates are valid. Unusable files were refused before."""
    identity = settings.tls()
    if identity is not None:
        yield from _shown("services", identity.server, settings.tls_cert_file, settings.tls_key_file)
    if not isinstance(settings, RouterSettings):
        if identity is None:
            yield _in_the_clear(settings)
        return
    # workers found through Redis check themselves
    beyond = [address for address in (*settings.prefill, *settings.decode) if not is_loopback(address)]
    if identity is None and beyond:
        yield warning(f"not configured: connections to {', '.join(beyond)} are not encrypted", _HOW_TLS)
    if (front := settings.front_tls()) is None:
        yield _in_the_clear(settings)
    else:
        yield from _shown("clients", front, settings.front_tls_cert_file, settings.front_tls_key_file)


def _shown(to_whom: str, tls: ServerTls, certificate: str | None, key: str | None) -> Iterator[Finding]:
    until = (
        f"{certificate}, which {to_whom} are shown, is valid until {datetime.fromtimestamp(tls.valid_until, UTC):%F}"
    )
    soon = tls.valid_until - time.time() < SOON_S
    yield warning(until, "renew it: services read new files by themselves") if soon else ok(until)
    yield from _exposed(key)


def _in_the_clear(settings: WorkerSettings | RouterSettings) -> Finding:
    if is_loopback(settings.host):
        return ok("not configured: what goes over this machine's loopback is in the clear")
    where = "what clients send to" if isinstance(settings, RouterSettings) else "what goes over"
    return warning(f"not configured: {where} {settings.host} is in the clear", _HOW_TLS)


def check_clients(settings: RouterSettings) -> Iterator[Finding]:
    """API keys: whether clients need one, and whether the configured keys are valid."""
    if settings.api_keys_file is not None:
        yield from _keys_in(Path(settings.api_keys_file))
    elif settings.api_keys is not None:
        yield ok(f"{len(settings.api_keys)} API key(s) in the settings, each a tenant without limits of its own")
    elif settings.front_tls_client_ca_file is not None:
        yield ok("no API key is needed; clients show a certificate, and are one tenant")
    elif is_loopback(settings.host):
        yield ok("no API key is needed; only this machine reaches the router")
    else:
        yield warning(
            f"no API key is needed: every client that reaches {settings.host} is served",
            "make keys with `pdserve keys new NAME`, and name their file in api_keys_file",
        )


def _keys_in(path: Path) -> Iterator[Finding]:
    try:
        entries = read_keys(path)
    except ConfigError as error:
        yield failed(error.message, "make an entry with `pdserve keys new NAME`")
        return
    yield ok(f"{len(entries)} API key(s) of {len({entry.tenant for entry in entries})} tenant(s) in {path}")
    yield from _expiring(entries)
    if path.stat().st_mode & _OTHERS_WRITE:
        yield warning(f"{path} can be written by other users, so they could add keys", f"chmod go-w {path}")


def _expiring(entries: tuple[KeyEntry, ...]) -> Iterator[Finding]:
    now = datetime.now(UTC)
    for entry in entries:
        if entry.expires is not None and entry.expires <= now + EXPIRES_SOON:
            verb = "expired" if entry.expires <= now else "expires"
            advice = "add a second key of the same tenant, hand it out, then remove this one"
            yield warning(f"API key {entry.name} {verb} at {entry.expires.isoformat()}", advice)


def _exposed(file: str | None) -> Iterator[Finding]:
    """A warning if the file exists and other users can read it, else an empty list."""
    if file is not None and Path(file).stat().st_mode & _OTHERS_READ:
        yield warning(f"{file} can be read by other users", f"chmod 600 {file}")
