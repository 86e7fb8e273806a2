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
        """Nothing can follow. Without EOS tokens this may turn true a step after the last token."""

    @property
    def failure(self) -> PdServeError | None:
        """What ends the sequence: its grammar costs more than it may, or the process that held it is gone."""

    @property
    def is_prompt(self) -> bool:
        """The mask of the next token is there, or the last one took so little time that a step may wait for it."""

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, and nothing changed, when it cannot come here."""

    def allowed(self, until: float) -> NDArray[np.uint8] | None:
        """Which tokens may come next: `[W]` bytes, a bit per token, the lowest first; the caller must not change them.

        until: `time.monotonic()` seconds at which to give up. None: the mask has not come by then.
        """

    def fork(self) -> Grammar:
        """Another sequence's place, the same as this one's now."""

    def close(self) -> None:
        """The sequence is over. May be called again."""
