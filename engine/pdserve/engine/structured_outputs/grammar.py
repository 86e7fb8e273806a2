"""`Grammar`: one sequence's place in its grammar, as scheduler and model runner use it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdserve.common.errors import PdServeError


class Grammar(Protocol):
    """The engine thread alone calls it."""

    @property
    def has_ended(self) -> bool:
        """True if nothing can follow. Without EOS tokens this may become true a step after the last token."""

    @property
    def failure(self) -> PdServeError | None:
        """The error that ends the sequence: its grammar exceeds its budget, or its process has ended. None without one."""

    @property
    def is_prompt(self) -> bool:
        """True if the next mask is there, or the last one was so fast that a step may wait for it."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token. False, with nothing changed, when the token is not allowed here."""

    def allowed(self, until: float) -> NDArray[np.uint8] | None:
        """The tokens that may come next: `[W]` bytes, a bit per token, the lowest first; the caller must not change them.

        until: `time.monotonic()` seconds at which to give up. None: the mask has not arrived by then.
        """

    def fork(self) -> Grammar:
        """Another sequence's place, the same as this one's now."""

    def close(self) -> None:
        """The sequence is over. May be called again."""
