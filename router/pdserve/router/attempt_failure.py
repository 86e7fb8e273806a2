"""How an attempt can end without having served its request."""

from __future__ import annotations

from pdserve.common.errors import PdServeError
from pdserve.router.worker import Worker


class AttemptFailed(Exception):
    """Why an attempt failed, and who is to blame."""

    def __init__(
        self, error: PdServeError, blamed: Worker | None = None, *, died: bool = False, in_transfer: bool = False
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.blamed = blamed
        self.died = died
        """The blamed worker is gone, or its connection is."""
        self.in_transfer = in_transfer
        """The prompt's KV did not come across: settings say what then."""


class PrefillNeeded(Exception):
    """Decode did nothing, because too much of the prompt is uncached there."""

    def __init__(self, uncached_tokens: int) -> None:
        super().__init__(f"{uncached_tokens} tokens are uncached")
        self.uncached_tokens = uncached_tokens
