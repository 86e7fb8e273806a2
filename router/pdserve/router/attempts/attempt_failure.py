"""Ways in which an attempt ends without having served its request."""

from __future__ import annotations

import random

from pdserve.common.errors import Overloaded, PdServeError
from pdserve.router.workers.worker import Worker

BACKOFF_S = 0.02
"""Before the second attempt; doubles, with jitter."""
LONGEST_BACKOFF_S = 1.0
_MAX_DOUBLINGS = 16


def backoff_s(num_failed: int) -> float:
    """Seconds to wait before the next attempt. num_failed: failed attempts, at least 1."""
    return min(LONGEST_BACKOFF_S, BACKOFF_S * 2.0 ** min(_MAX_DOUBLINGS, num_failed - 1)) * random.uniform(0.5, 1.5)


class AttemptFailed(Exception):
    """Why an attempt failed, and who is to blame."""

    def __init__(
        self,
        error: PdServeError,
        blamed: Worker | None = None,
        *,
        died: bool = False,
        never_admitted: bool = False,
        in_transfer: bool = False,
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.blamed = blamed
        self.died = died
        """True if the blamed worker, or its connection, is lost."""
        self.never_admitted = never_admitted
        """True if that worker had not admitted the request: most likely it was lost before, for another reason."""
        self.in_transfer = in_transfer
        """True if the prompt's KV was not transferred: settings decide what follows."""

    @property
    def refused_by(self) -> Worker | None:
        """The worker that had no room and started nothing; None for any other failure."""
        return self.blamed if isinstance(self.error, Overloaded) and self.error.by_peer else None


class PrefillNeeded(Exception):
    """Decode did nothing, because too much of the prompt is uncached there."""

    def __init__(self, uncached_tokens: int) -> None:
        super().__init__(f"{uncached_tokens} tokens are uncached")
        self.uncached_tokens = uncached_tokens
