"""`GrammarMask`: the tokens that the grammars of a step's rows allow, applied in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.scheduler_output import GrammarOutput


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """The grammar masks of one step's rows."""

    places: list[int]
    """Rows of the logits that have a grammar, `[M]`."""
    allowed: Tensor
    """`[M, V]` bool: True if the token is allowed."""

    def apply(self, logits: Tensor) -> None:
        """logits `[N, V]`; changed in place: tokens that a row's grammar does not allow get -inf."""
        allowed, never = self.allowed.to(logits.device), logits.new_tensor(-torch.inf)
        if len(self.places) == len(logits):
            torch.where(allowed, logits, never, out=logits)
        else:
            logits[self.places] = torch.where(allowed, logits[self.places], never)

    @classmethod
    def of_step(
        cls, grammar: GrammarOutput, row_of: Mapping[str, int], rows: NDArray[np.int64], vocab_size: int
    ) -> GrammarMask | None:
        """The mask for logits `[N, V]` whose row i is the batch's row `rows[i]`; None if no row has a grammar.

        row_of: req_id -> row of the batch. At the end of a prompt, all sequences that continue it have the prompt's row.
        """
        mask_of = {row_of[req_id]: number for number, req_id in enumerate(grammar.structured_output_request_ids)}
        found = [(place, mask_of[row]) for place, row in enumerate(rows.tolist()) if row in mask_of]
        if not found:
            return None
        places, masks = zip(*found, strict=True)
        packed = np.frombuffer(b"".join(grammar.grammar_bitmask), np.uint8).reshape(len(mask_of), -1)
        bits = np.unpackbits(packed, axis=1, count=vocab_size, bitorder="little")
        return cls(list(places), torch.from_numpy(bits.view(np.bool_)[list(masks)]))
