"""`ChildAnswers`: answers of a probe's process to its parent, one JSON line each, apart from its libraries' output."""

from __future__ import annotations

import os

import msgspec


class ChildAnswers:
    """Reserves standard output for answers; other prints go to standard error."""

    def __init__(self) -> None:
        self._descriptor = os.dup(1)
        os.dup2(2, 1)

    def send(self, value: object) -> None:
        """Write one line. Raises: OSError when the parent has ended."""
        line = msgspec.json.encode(value) + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]
