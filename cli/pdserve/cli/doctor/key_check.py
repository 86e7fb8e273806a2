"""Deployment key: whether it is set, and whether other users can read it."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.cli.doctor.finding import Finding, failed, ok, warning
from pdserve.cli.doctor.secret_file import exposed
from pdserve.common.errors import ConfigError
from pdserve.common.settings.service_settings import ServiceSettings


@dataclass(frozen=True, slots=True)
class KeyCheck:
    """Checks the deployment key and its file. Implements `Check`."""

    settings: ServiceSettings
    name: str = "key"
    deadline_s: float = 5.0

    def run(self) -> list[Finding]:
        """See `Check.run`."""
        try:
            key, is_public = self.settings.key()
        except ConfigError as error:
            advice = "make one with `openssl rand -hex 32`, and give it to every service of this deployment"
            return [failed(error.message, advice)]
        if is_public:
            return [
                warning(
                    "the public development key: any process on this machine can send requests to workers",
                    "set PDSERVE_DEPLOYMENT_KEY when other users share this machine, and before leaving loopback",
                )
            ]
        given = ok(f"given; every service of this deployment must show the check value {key.fingerprint}")
        return [given, *exposed(self.settings.deployment_key_file)]
