"""`RestartBackoff`: how long to wait before something that failed is started again."""

from __future__ import annotations

HEALTHY_AFTER_S = 30.0
"""Run time after which a failure begins again with the first wait."""


class RestartBackoff:
    """Waits that double from `first_s` to `longest_s`, in seconds."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def wait_s(self, ran_s: float) -> float:
        """The wait after a failure. ran_s: time since the last start."""
        wait_s = self._first_s if ran_s >= HEALTHY_AFTER_S else self._next_s
        self._next_s = min(self._longest_s, 2 * wait_s)
        return wait_s
