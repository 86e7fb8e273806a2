"""`NonceMemory`: the nonces of the calls of the last minutes, in bounded memory, so that no call is taken twice."""

from __future__ import annotations

MAX_NONCES = 1 << 17
"""About 12 MiB. A worker that takes 1,000 calls per second for two minutes has seen as many."""


class NonceMemory:
    """Keeps nonces by the second of their time stamp, and forgets whole seconds.

    When it is full, the oldest second is dropped, and from then on calls with an older stamp are refused: memory is bounded,
    and a replay remains impossible. Current calls are served in any case.
    """

    def __init__(self, window_s: int, max_nonces: int = MAX_NONCES) -> None:
        """window_s: how far a stamp may be from this process's clock, either way."""
        self._window_s = window_s
        self._max_nonces = max_nonces
        self._seconds: dict[int, set[bytes]] = {}
        self._num_nonces = 0
        self._oldest = 0
        """Stamps before this second are refused."""

    def __len__(self) -> int:
        return self._num_nonces

    def is_new(self, nonce: bytes, stamp_s: float, now_s: float) -> bool:
        """Remember a nonce; False when it was seen before, or when its stamp is too old to decide.

        The caller has checked that the stamp is within the window.
        """
        second = int(stamp_s)
        self._forget_before(int(now_s) - self._window_s)
        if second < self._oldest:
            return False
        seen = self._seconds.setdefault(second, set())
        if nonce in seen:
            return False
        seen.add(nonce)
        self._num_nonces += 1
        while self._num_nonces > self._max_nonces:
            self._forget_before(min(self._seconds) + 1)
        return True

    def _forget_before(self, second: int) -> None:
        if second <= self._oldest:
            return
        self._oldest = second
        for old in [each for each in self._seconds if each < second]:
            self._num_nonces -= len(self._seconds.pop(old))
