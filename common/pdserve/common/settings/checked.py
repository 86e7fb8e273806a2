"""`Checked`: checks of values that structs of settings share."""

from __future__ import annotations

import msgspec

from pdserve.common.errors import ConfigError


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """Every check raises ConfigError naming the field, its value and what is allowed."""

    def _verify_least(self, least: int, *names: str) -> None:
        """Check that the named fields, unless None, are at least `least`."""
        for name in names:
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{name} is {value}, at least {least} is needed")

    def _verify_most(self, most: int, *names: str) -> None:
        """Check that the named fields, unless None, are at most `most`."""
        for name in names:
            if (value := getattr(self, name)) is not None and value > most:
                raise ConfigError(f"{name} is {value}, at most {most} is possible")

    def _verify_between(self, least: int, most: int, *names: str) -> None:
        """Check that the named fields, unless None, are `least` to `most`."""
        for name in names:
            if (value := getattr(self, name)) is not None and not least <= value <= most:
                raise ConfigError(f"{name} is {value}, {least} to {most} are possible")

    def _verify_ports(self, *names: str) -> None:
        for name in names:
            if not 0 <= (value := getattr(self, name)) < 65536:
                raise ConfigError(f"{name} is {value}, 0 to 65535 is needed")

    def _verify_seconds(self, *names: str) -> None:
        for name in names:
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise ConfigError(f"{name} is {value}, a number of seconds from 0 on is needed")
