"""Files that hold a secret: whether others on this machine can read them."""

from __future__ import annotations

import stat
from pathlib import Path

from pdserve.cli.doctor.finding import Finding, warning

_OTHERS = stat.S_IRGRP | stat.S_IROTH


def exposed(file: str | None) -> list[Finding]:
    """A warning if the file exists and other users can read it, else an empty list."""
    if file is None or not Path(file).stat().st_mode & _OTHERS:
        return []
    return [warning(f"{file} can be read by other users", f"chmod 600 {file}")]
