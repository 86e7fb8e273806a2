"""The deployment key: given or the public one, and kept from others."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

from pdserve.cli.doctor.finding import Finding, failed, ok, warning
from pdserve.common.deployment_key import key_check
from pdserve.common.errors import ConfigError
from pdserve.common.settings import ServiceSettings

_OTHERS = stat.S_IRGRP | stat.S_IROTH


@dataclass(frozen=True, slots=True)
class KeyCheck:
    """A `Check`."""

    settings: ServiceSettings
    name: str = "key"
    deadline_s: float = 5.0

    def run(self) -> list[Finding]:
        """As `Check.run`."""
        try:
            key, is_public = self.settings.key()
        except ConfigError as error:
            advice = "make one with `openssl rand -hex 32`, and give it to every service of this deployment"
            return [failed(error.message, advice)]
        if is_public:
            return [
                warning(
                    "the public development key: whoever reaches a port of this machine's loopback can ask workers",
                    "set PDSERVE_DEPLOYMENT_KEY when other users share this machine, and before leaving loopback",
                )
            ]
        findings = [ok(f"given; every service of this deployment must show the check value {key_check(key)}")]
        file = self.settings.deployment_key_file
        if file is not None and Path(file).stat().st_mode & _OTHERS:
            findings.append(warning(f"{file} can be read by other users", f"chmod 600 {file}"))
        return findings
