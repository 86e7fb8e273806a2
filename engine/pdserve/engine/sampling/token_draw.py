"""Draws one of the kept tokens: the highest sum `y + gumbel`, in float32; of equal sums the lowest id.

`y` is the scaled logit (`kept_tokens.py`), `gumbel` the token's noise (`seeded_uniform.py`). Each kept token has the highest sum
with its probability among the kept tokens.

Noise is computed only for tokens that can win. The noise decreases as `v` grows, so a token with lead 1 or more has less noise than
any token with lead 0. Let z be the highest y among the kept tokens with lead 0: a token with lead 1 or more and a lower y loses
against that token. Noise is therefore computed for tokens with lead 0, 1 in 256, and for tokens with y of at least z, 256 on
average. z is lowered by 0.001, a hundred times the rounding of the sums, so the result is always the token of the rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.arrays import FloatArray, IntArray
from pdserve.engine.sampling.kept_tokens import FEW, Border
from pdserve.engine.sampling.scratch import Scratch
from pdserve.engine.sampling.seeded_uniform import gumbel, gumbel_of_leads, leads

SLACK = 1e-3
"""Amount by which z is lowered, in units of y."""
_ROUNDING = 1e-6
"""Relative error of rounding to float32 a few times."""


@dataclass(frozen=True, slots=True)
class NoiseRows:
    """The coordinates of R rows' noise, `[R]` each."""

    seeds: IntArray
    indexes: IntArray
    positions: IntArray

    def of(self, rows: slice | IntArray) -> NoiseRows:
        """The noise of some of the rows; a row may occur more than once."""
        return NoiseRows(self.seeds[rows], self.indexes[rows], self.positions[rows])


@dataclass(frozen=True, slots=True)
class KeptRows:
    """R rows of logits, and their kept tokens."""

    logits: FloatArray
    """`[R, V]`"""
    highest: FloatArray
    """`[R]`, each row's highest logit."""
    temperature: FloatArray
    """`[R]`"""
    border: Border

    def listed(self, mask: NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
        """Rows and ids of the kept tokens of the mask, by row and then by id. mask `[R, V]`."""
        places = np.flatnonzero(mask)
        rows = places // mask.shape[1]
        token_ids = places - rows * mask.shape[1]
        kept = self.border.keeps(self.logits[rows, token_ids], rows, token_ids)
        return rows[kept], token_ids[kept]

    def scaled(self, rows: IntArray, token_ids: IntArray) -> FloatArray:
        """`[K]` y of these tokens."""
        with np.errstate(over="ignore"):
            return (self.logits[rows, token_ids] - self.highest[rows]) / self.temperature[rows]

    def surely_below(self, logits: FloatArray) -> FloatArray:
        """`[R]` logits; the y of any token below is lower by more than the rounding of sums. logits `[R]`."""
        highest = self.highest.astype(np.float64)
        lowered = logits - SLACK * self.temperature
        return (lowered - _ROUNDING * (np.abs(highest) + np.abs(lowered))).astype(np.float32)


def draw(kept: KeptRows, noise: NoiseRows, scratch: Scratch) -> IntArray:
    """`[R]` token ids."""
    num_rows, vocab_size = kept.logits.shape
    mask = scratch.array("mask", kept.logits.shape, np.bool_)
    np.greater_equal(kept.logits, kept.border.logit[:, None], out=mask)
    if np.count_nonzero(mask) * FEW <= mask.size:
        # the noise of all kept tokens costs less than the leads of the vocabulary
        rows, token_ids = kept.listed(mask)
        own = noise.of(rows)
        drawn = gumbel(own.seeds, own.indexes, own.positions, token_ids)
        return token_ids[highest_sums(kept.scaled(rows, token_ids) + drawn, rows, num_rows)]
    lead = leads(noise.seeds, noise.indexes, noise.positions, vocab_size, scratch)
    without_lead = scratch.array("without lead", mask.shape, np.bool_)
    rows, token_ids = kept.listed(np.equal(lead, 0, out=without_lead))
    highest_without = np.full(num_rows, -np.inf)
    np.maximum.at(highest_without, rows, kept.logits[rows, token_ids])
    threshold = np.maximum(kept.surely_below(highest_without), kept.border.logit)
    np.greater_equal(kept.logits, threshold[:, None], out=mask)
    rows, token_ids = kept.listed(np.logical_or(mask, without_lead, out=mask))
    own = noise.of(rows)
    drawn = gumbel_of_leads(lead[rows, token_ids], own.seeds, own.indexes, own.positions, token_ids)
    return token_ids[highest_sums(kept.scaled(rows, token_ids) + drawn, rows, num_rows)]


def highest_sums(sums: FloatArray, rows: IntArray, num_rows: int) -> IntArray:
    """`[R]` index of each row's highest sum, the first of equal ones. sums, rows `[K]`, rows ascending; each row has a sum."""
    starts = np.searchsorted(rows, np.arange(num_rows))
    equal = np.flatnonzero(sums == np.maximum.reduceat(sums, starts)[rows])
    return equal[np.searchsorted(equal, starts)]
