"""API keys: whether clients need one, and whether the configured keys are valid."""

from __future__ import annotations

import datetime
import stat
from dataclasses import dataclass
from pathlib import Path

from pdserve.cli.doctor.finding import Finding, failed, ok, warning
from pdserve.common.errors import ConfigError
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.settings.api_key_file import KeyEntry, read_keys
from pdserve.common.settings.router_settings import RouterSettings

EXPIRES_SOON = datetime.timedelta(days=14)
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class AuthCheck:
    """Checks whether API keys are required, and the file that lists them. Implements `Check`."""

    settings: RouterSettings
    name: str = "clients"
    deadline_s: float = 5.0

    def run(self) -> list[Finding]:
        """See `Check.run`."""
        settings = self.settings
        if settings.api_keys_file is not None:
            return self._of_file(Path(settings.api_keys_file))
        if settings.api_keys is not None:
            return [ok(f"{len(settings.api_keys)} API key(s) in the settings, each a tenant without limits of its own")]
        if settings.front_tls_client_ca_file is not None:
            return [ok("no API key is needed; clients show a certificate, and are one tenant")]
        if is_loopback(settings.host):
            return [ok("no API key is needed; only this machine reaches the router")]
        return [
            warning(
                f"no API key is needed: anybody who reaches {settings.host} may ask",
                "make keys with `pdserve keys new NAME`, and name their file in api_keys_file",
            )
        ]

    def _of_file(self, path: Path) -> list[Finding]:
        try:
            entries = read_keys(path)
        except ConfigError as error:
            return [failed(error.message, "make an entry with `pdserve keys new NAME`")]
        tenants = {entry.tenant for entry in entries}
        return [
            ok(f"{len(entries)} API key(s) of {len(tenants)} tenant(s) in {path}"),
            *_expiring(entries),
            *(
                [warning(f"{path} can be written by other users, so they could add keys", f"chmod go-w {path}")]
                if path.stat().st_mode & _WRITABLE
                else []
            ),
        ]


def _expiring(entries: tuple[KeyEntry, ...]) -> list[Finding]:
    now = datetime.datetime.now(datetime.UTC)
    findings = []
    for entry in entries:
        if entry.expires is not None and entry.expires <= now + EXPIRES_SOON:
            verb = "expired" if entry.expires <= now else "expires"
            findings.append(
                warning(
                    f"API key {entry.name} {verb} at {entry.expires.isoformat()}",
                    "add a second key of the same tenant, hand it out, then remove this one",
                )
            )
    return findings
