"""`warn_of_secrets`: warns of secrets in the command line, which every user of the machine can read."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from pdserve.common.settings.settings import ENV_PREFIX, SECRETS

_URLS = ("redis", "otlp")


def secrets_among(given: Mapping[str, object]) -> list[str]:
    """Names of the settings whose values are secrets, or URLs with a password. given: settings of the command line."""
    return [
        name for name, value in given.items() if value and (name in SECRETS or (name in _URLS and "@" in str(value)))
    ]


def warn_of_secrets(given: Mapping[str, object]) -> None:
    """One line on standard error per secret, without the secret."""
    for name in secrets_among(given):
        print(
            f"pdserve: {name} is in the command line, which every user of this machine can read: "
            f"give it as {ENV_PREFIX}{name.upper()} or in a file with --config",
            file=sys.stderr,
        )
