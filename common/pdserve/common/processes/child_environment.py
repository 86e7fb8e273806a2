"""Environment variables of processes that handle clients' texts."""

from __future__ import annotations

import os

_INHERITED = ("HOME", "LANG", "PATH", "TMPDIR", "TZ", "VIRTUAL_ENV")
_INHERITED_BEGINNINGS = ("LC_", "LD_", "PYTHON")


def child_environment() -> dict[str, str]:
    """The few variables that such a process needs; it must get no secret."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _INHERITED or name.startswith(_INHERITED_BEGINNINGS)
    }
