"""`ChildAnswers`: how a probe's process answers its parent, one JSON line each, whatever its libraries print."""

from __future__ import annotations

import os

import msgspec


class ChildAnswers:
    """Takes standard output for itself; from now on what others print there goes to standard error."""

    def __init__(self) -> None:
        self._descriptor = os.dup(1)
        os.dup2(2, 1)

    def say(self, value: object) -> None:
        """A line. Raises: OSError when the parent is gone."""
        line = msgspec.json.encode(value) + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]
