"""`GrammarMask`: the tokens that the grammars of a step's rows allow, applied in one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.sampling.placed_arrays import PlacedArrays
from pdserve.engine.scheduler_output import GrammarOutput

_BITS = 8


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """The grammar masks of one step's rows."""

    places: NDArray[np.int64]
    """Rows of the logits that have a grammar, `[M]`."""
    packed: NDArray[np.uint8]
    """`[M, ceil(V / 8)]`: one bit per token, lowest bit first; 1 for allowed tokens."""

    def arrays(self) -> list[NDArray[Any]]:
        """Arrays that `apply` needs on the logits' device: an eighth of a byte per token."""
        return [self.places, self.packed]

    def apply(self, logits: Tensor, placed: PlacedArrays) -> None:
        """logits `[N, V]`; changed in place: tokens that a row's grammar does not allow get -inf."""
        allowed, never = self._allowed(logits, placed), logits.new_full((), -torch.inf)
        if len(self.places) == len(logits):
            torch.where(allowed, logits, never, out=logits)
        else:
            places = placed(self.places)
            logits[places] = torch.where(allowed, logits[places], never)

    def _allowed(self, logits: Tensor, placed: PlacedArrays) -> Tensor:
        """`[M, V]` bool."""
        vocab_size = logits.shape[1]
        if logits.device.type == "cpu":
            bits = np.unpackbits(self.packed, axis=1, count=vocab_size, bitorder="little")
            return torch.from_numpy(bits.view(np.bool_))
        shifts = torch.arange(_BITS, dtype=torch.uint8, device=logits.device)
        unpacked = (placed(self.packed).unsqueeze(-1) >> shifts) & 1
        return unpacked.flatten(1)[:, :vocab_size] != 0

    @classmethod
    def of_step(
        cls,
        grammar: GrammarOutput,
        row_of: Mapping[str, int],
        rows: NDArray[np.int64],
        offsets: NDArray[np.int64] | None = None,
    ) -> GrammarMask | None:
        """The mask for logits whose row i is the batch's row `rows[i]`; None if no row has a grammar.

        row_of: req_id -> row of the batch. At the end of a prompt, all sequences that continue it have the prompt's row.
        offsets: by row of the logits, number of drafts before its position; None: no row has drafts. Positions without a mask
        are left as they are.
        """
        mask_of: dict[tuple[int, int], int] = {}
        seen: Counter[str] = Counter()
        for number, req_id in enumerate(grammar.structured_output_request_ids):
            mask_of[row_of[req_id], seen[req_id]] = number
            seen[req_id] += 1
        positions = zip(rows.tolist(), [0] * len(rows) if offsets is None else offsets.tolist(), strict=True)
        found = [(place, mask_of[position]) for place, position in enumerate(positions) if position in mask_of]
        if not found:
            return None
        places, masks = zip(*found, strict=True)
        packed = np.frombuffer(b"".join(grammar.grammar_bitmask), np.uint8).reshape(len(mask_of), -1)
        return cls(np.array(places), packed[list(masks)])
