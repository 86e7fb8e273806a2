"""Which tokens the grammars of a step's rows allow: their bitmasks together, applied in one call."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.request import Request
from pdserve.engine.structured_outputs.grammar import Grammar


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """What one step's rows may sample."""

    places: list[int]
    """Rows of the logits that have a grammar, `[M]`."""
    allowed: Tensor
    """`[M, V]` bool: whether a token may come."""

    def apply(self, logits: Tensor) -> None:
        """logits `[N, V]`; changed in place: tokens that a row's grammar does not allow get -inf."""
        allowed, never = self.allowed.to(logits.device), logits.new_tensor(-torch.inf)
        if len(self.places) == len(logits):
            torch.where(allowed, logits, never, out=logits)
        else:
            logits[self.places] = torch.where(allowed, logits[self.places], never)


class GrammarBitmask:
    """The grammars of the sequences in the batch, by row."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._grammars: dict[int, Grammar] = {}
        self._has_grammar = np.zeros(num_rows, dtype=np.bool_)

    def add(self, row: int, request: Request) -> None:
        if request.grammar is not None:
            self._grammars[row] = request.grammar
            self._has_grammar[row] = True

    def remove(self, row: int) -> None:
        """Harmless when it has none."""
        if self._grammars.pop(row, None) is not None:
            self._has_grammar[row] = False

    def late(self, rows: NDArray[np.int64], wait_s: float) -> NDArray[np.bool_]:
        """Rows of the batch whose masks have not come after a wait of at most `wait_s` for all together. `[N]`"""
        is_late = np.zeros(len(rows), dtype=np.bool_)
        if self._grammars:
            until = time.monotonic() + wait_s
            for place in np.flatnonzero(self._has_grammar[rows]).tolist():
                is_late[place] = self._grammars[int(rows[place])].allowed(until) is None
        return is_late

    def of_step(self, rows: NDArray[np.int64]) -> GrammarMask | None:
        """For logits whose row i is the batch's row `rows[i]`, none of them late; None when no row has a grammar."""
        if not self._grammars:
            return None
        places = np.flatnonzero(self._has_grammar[rows]).tolist()
        if not places:
            return None
        # at the end of a prompt all sequences that continue it have its row
        masked, of_place = np.unique(rows[places], return_inverse=True)
        words = [self._grammars[row].allowed(0.0) for row in masked.tolist()]
        if any(word is None for word in words):
            raise RuntimeError("a row is sampled whose mask has not come")
        bits = np.unpackbits(
            np.stack([w for w in words if w is not None]), axis=1, count=self._vocab_size, bitorder="little"
        )
        return GrammarMask(places, torch.from_numpy(bits.view(np.bool_)[of_place]))
