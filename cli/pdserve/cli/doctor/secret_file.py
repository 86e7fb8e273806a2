"""Files that hold a secret: whether others on this machine can read them."""

from __future__ import annotations

import stat
from pathlib import Path

from pdserve.cli.doctor.finding import Finding, warning

_OTHERS = stat.S_IRGRP | stat.S_IROTH


def exposed(file: str | None) -> list[Finding]:
    """A warning about an existing file that others can read; none without a file."""
    if file is None or not Path(file).stat().st_mode & _OTHERS:
        return []
    return [warning(f"{file} can be read by other users", f"chmod 600 {file}")]
