"""Which tokens the grammars of a step's rows allow: one bitmask for the batch, filled in one call, applied in another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.request import Request

if TYPE_CHECKING:
    from pdserve.engine.sequence_grammar import BitmaskFill, SequenceGrammar


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


class GrammarMaskTable:
    """The grammars of the sequences in the batch, by row."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_rows = num_rows
        self._grammars: dict[int, SequenceGrammar] = {}
        self._has_grammar = np.zeros(num_rows, dtype=np.bool_)
        self._bitmask: Tensor | None = None
        """`[num_rows, ceil(V / 32)]` int32, made with the first grammar; a bit a token, the lowest first."""
        self._fill: BitmaskFill | None = None

    def add(self, row: int, request: Request) -> None:
        if request.grammar is not None:
            self._grammars[row] = request.grammar
            self._has_grammar[row] = True

    def remove(self, row: int) -> None:
        """Harmless when it has none."""
        if self._grammars.pop(row, None) is not None:
            self._has_grammar[row] = False

    def of_step(self, rows: NDArray[np.int64]) -> GrammarMask | None:
        """For logits whose row i is the batch's row `rows[i]`; None when no row has a grammar."""
        if not self._grammars:
            return None
        places = np.flatnonzero(self._has_grammar[rows]).tolist()
        if not places:
            return None
        if self._bitmask is None or self._fill is None:
            from pdserve.engine.sequence_grammar import BitmaskFill  # here, because the module costs a second

            self._bitmask = torch.zeros(self._num_rows, -(-self._vocab_size // 32), dtype=torch.int32)
            self._fill = BitmaskFill(torch.get_num_threads())
        # at the end of a prompt all sequences that continue it have its row
        masked, of_place = np.unique(rows[places], return_inverse=True)
        self._fill([self._grammars[row] for row in masked.tolist()], self._bitmask)
        words = self._bitmask[: len(masked)].numpy().view(np.uint8)
        bits = np.unpackbits(words, axis=1, count=self._vocab_size, bitorder="little")
        return GrammarMask(places, torch.from_numpy(bits.view(np.bool_)[of_place]))
