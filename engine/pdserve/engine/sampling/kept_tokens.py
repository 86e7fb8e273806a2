"""The tokens that min_p, top_k and top_p keep, found by thresholds: the vocabulary is never sorted.

The rule applies to this module and to GPU kernels. Tokens are ordered by their logit, the highest first, and equal logits by their
id, the lowest first; every kept set is a beginning of that order. With `y = (logit - highest logit) / temperature` in float32:

    min_p  keeps the tokens with y >= float32(ln(min_p))
    top_k  keeps the first top_k tokens
    top_p  keeps, of the tokens that these two leave, the shortest beginning whose mass is at least top_p of the mass left

A token's mass is the integer `round(exp(y) 2^34)` (exp in float32, halves to even): float64 adds masses without rounding up to a
vocabulary of 2^19, so no order of summation, batch or number of threads moves a border. A token 3.4e10 times less likely than the
most likely has mass 0. A token with y = -inf, which rules and grammars give to most tokens, is in no kept set: it is never drawn. A
kept set is represented by its border: the logit of its last token, and that token's id. A histogram of the masses over y gives the
bucket that contains the border of top_p; a digit-by-digit selection over the ordered integers of the float32 logits in that bucket
gives the border.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.arrays import FloatArray, IntArray
from pdserve.engine.sampling.scratch import Scratch

MASS_OF_HIGHEST = 2.0**34
_NO_MASS = np.float32(-25)
"""Scaled logit y below which a token has no mass."""
LOWEST = np.finfo(np.float32).min
"""The lowest finite float32."""
FEW = 32
"""If at most 1 / FEW of the tokens are candidates, a list of them costs less than passes over the whole vocabulary."""
_BUCKETS = 2048
_DIGIT_BITS = 11
_FEWEST_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class Cut:
    """Parameters of R rows, `[R]` each."""

    temperature: FloatArray
    """Above 0."""
    top_p: FloatArray
    """Above 0."""
    top_k: IntArray
    """Vocabulary size: no limit."""
    min_p: FloatArray

    def of(self, rows: slice | IntArray) -> Cut:
        """Parameters of some of the rows."""
        return Cut(self.temperature[rows], self.top_p[rows], self.top_k[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class Border:
    """The last kept token of R rows. A token is kept if its logit is higher, or equal with an id not above `token_id`."""

    logit: FloatArray
    """`[R]`"""
    token_id: IntArray
    """`[R]`"""

    @classmethod
    def of_all(cls, num_rows: int, vocab_size: int) -> Border:
        """A border that keeps all tokens with a finite logit."""
        return cls(np.full(num_rows, LOWEST, dtype=np.float32), np.full(num_rows, vocab_size))

    def keeps(self, logits: FloatArray, rows: IntArray, token_ids: IntArray) -> NDArray[np.bool_]:
        """`[K]` bool: True if the token is kept. rows, token_ids `[K]`."""
        logit = self.logit[rows]
        kept: NDArray[np.bool_] = (logits > logit) | ((logits == logit) & (token_ids <= self.token_id[rows]))
        return kept


def border(logits: FloatArray, highest: FloatArray, cut: Cut, scratch: Scratch) -> Border:
    """Borders of R rows. logits `[R, V]`; highest `[R]`, each row's highest logit, finite.

    The rows must be of one kind: for all of them only top_p is set, or for all of them min_p or top_k is set.
    """
    scaled = scratch.array("scaled", logits.shape, np.float32)
    with np.errstate(over="ignore"):
        np.subtract(logits, highest[:, None], out=scaled)
        np.divide(scaled, cut.temperature[:, None], out=scaled)
    num_rows, vocab_size = logits.shape
    reaches_floor = scratch.array("mask", logits.shape, np.bool_)
    np.greater_equal(scaled, _floor(scaled, cut)[:, None], out=reaches_floor)
    are_many = np.count_nonzero(reaches_floor) * FEW > reaches_floor.size
    if are_many and top_p_alone(cut, vocab_size).all():
        return _border_of_top_p(logits, scaled, cut.top_p.astype(np.float64), scratch)
    listed = _Listed.of(np.flatnonzero(reaches_floor), logits, scaled)
    found = Border(np.minimum.reduceat(listed.logits, listed.starts()), np.full(num_rows, vocab_size))
    if (cut.top_k < vocab_size).any():
        found = listed.border(np.ones(len(listed.logits)), cut.top_k.astype(np.float64), found)
    if (cut.top_p < 1).any():
        listed = listed.within(found)
        weights = masses(listed.scaled)
        wanted = cut.top_p.astype(np.float64) * np.add.reduceat(weights, listed.starts())
        found = listed.border(weights, np.where(cut.top_p < 1, wanted, np.inf), found)
    return found


def masses(scaled: FloatArray, out: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Masses as whole numbers, in the shape of `scaled`, which is overwritten."""
    np.exp(scaled, out=scaled)
    np.multiply(scaled, np.float32(MASS_OF_HIGHEST), out=scaled)
    return np.rint(scaled, out=np.empty(scaled.shape) if out is None else out)


def top_p_alone(cut: Cut, vocab_size: int) -> NDArray[np.bool_]:
    """`[R]` bool: True for rows with top_p and neither min_p nor top_k."""
    return (cut.top_p < 1) & (cut.top_k >= vocab_size) & (cut.min_p <= 0)


def _floor(scaled: FloatArray, cut: Cut) -> FloatArray:
    """`[R]` a finite lower bound of y of the tokens that top_k keeps; with min_p only, the exact bound."""
    num_rows, vocab_size = scaled.shape
    with np.errstate(divide="ignore"):
        floor = np.maximum(np.log(cut.min_p.astype(np.float64)).astype(np.float32), LOWEST)
    limited = cut.top_k < vocab_size
    largest = int(cut.top_k[limited].max(initial=0))
    if not 0 < largest <= vocab_size // 8:
        return floor
    # the maxima of k blocks are k tokens, so the k-th highest token is not below the k-th highest maximum
    blocks = min(vocab_size // 2, max(_FEWEST_BLOCKS, 2 * largest))
    maxima = scaled[:, : vocab_size // blocks * blocks].reshape(num_rows, -1, blocks).max(1)
    maxima.sort(-1)
    bound = maxima[np.arange(num_rows), blocks - np.minimum(cut.top_k, blocks)]
    return np.where(limited, np.maximum(floor, bound), floor)


def _border_of_top_p(logits: FloatArray, scaled: FloatArray, top_p: NDArray[np.float64], scratch: Scratch) -> Border:
    """The border of top_p over the whole vocabulary. Overwrites `scaled`."""
    num_rows, vocab_size = logits.shape
    each = np.arange(num_rows)
    np.maximum(scaled, _NO_MASS, out=scaled)
    # buckets of equal width in y, from the highest logit down, as float32, so that a higher logit is never in a later bucket
    width = (scaled.min(-1, keepdims=True, initial=-1e-6) / (_BUCKETS - 1)).astype(np.float32)
    place = np.divide(scaled, width, out=scratch.array("place", logits.shape, np.float32))
    buckets = scratch.array("buckets", logits.shape, np.int64)
    np.copyto(buckets, place, casting="unsafe")
    if num_rows > 1:
        buckets += each[:, None] * _BUCKETS
    weights = masses(scaled, scratch.array("weights", logits.shape, np.float64))
    histogram = np.bincount(buckets.reshape(-1), weights.reshape(-1), num_rows * _BUCKETS).reshape(num_rows, _BUCKETS)
    sums = histogram.cumsum(-1)
    wanted = top_p * sums[:, -1]
    at = (sums >= wanted[:, None]).argmax(-1)
    in_bucket = scratch.array("mask", logits.shape, np.bool_)
    np.equal(buckets, (each * _BUCKETS + at)[:, None], out=in_bucket)
    places = np.flatnonzero(in_bucket)
    listed = _Listed.of(places, logits, scaled)
    missing = wanted - (sums[each, at] - histogram[each, at])
    return listed.border(weights.reshape(-1).take(places), missing, Border.of_all(num_rows, vocab_size))


@dataclass(frozen=True, slots=True)
class _Listed:
    """Some tokens of each row, at least one per row, ordered by row and then by id."""

    vocab_size: int
    places: IntArray
    """`[K]`: row * V + token id."""
    logits: FloatArray
    scaled: FloatArray
    counts: IntArray
    """`[R]`"""

    @classmethod
    def of(cls, places: IntArray, logits: FloatArray, scaled: FloatArray) -> _Listed:
        """logits and scaled `[R, V]`."""
        num_rows, vocab_size = logits.shape
        counts = np.diff(np.searchsorted(places, np.arange(num_rows + 1) * vocab_size))
        return cls(vocab_size, places, logits.reshape(-1).take(places), scaled.reshape(-1).take(places), counts)

    def starts(self) -> IntArray:
        """`[R]`"""
        return np.cumsum(self.counts) - self.counts

    def rows(self) -> IntArray:
        """`[K]`"""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def within(self, border: Border) -> _Listed:
        """The tokens of the list that this border keeps."""
        rows = self.rows()
        chosen = np.flatnonzero(border.keeps(self.logits, rows, self.places % self.vocab_size))
        counts = np.bincount(rows[chosen], minlength=len(self.counts))
        return _Listed(self.vocab_size, self.places[chosen], self.logits[chosen], self.scaled[chosen], counts)

    def border(self, weights: NDArray[np.float64], wanted: NDArray[np.float64], otherwise: Border) -> Border:
        """The border of each row's shortest beginning whose weights reach `wanted`.

        weights: whole numbers `[K]`; wanted `[R]`, above 0; otherwise: border for rows whose total weight is below `wanted`.
        """
        num_rows = len(self.counts)
        each = np.arange(num_rows)
        keys, rows = _descending(self.logits), self.rows()
        totals = np.add.reduceat(weights, self.starts())
        missing = np.minimum(wanted, totals)
        live = np.arange(len(keys))
        shift = int(keys.max()).bit_length()
        while shift > 0:
            bits = min(_DIGIT_BITS, shift)
            shift -= bits
            digits = ((keys[live] >> np.uint32(shift)) & np.uint32((1 << bits) - 1)).astype(np.int64)
            buckets = (rows[live] << bits) + digits
            histogram = np.bincount(buckets, weights[live], num_rows << bits).reshape(num_rows, -1)
            reached = histogram.cumsum(-1)
            digit = (reached >= missing[:, None]).argmax(-1)
            missing = missing - (reached[each, digit] - histogram[each, digit])
            live = live[buckets == ((each << bits) + digit)[rows[live]]]
        # each row's remaining tokens have equal logits; keep as many as reach the wanted weight
        left = np.bincount(rows[live], minlength=num_rows)
        first = np.cumsum(left) - left
        last = live[first + np.ceil(missing / weights[live[first]]).astype(np.int64) - 1]
        reaches = totals >= wanted
        return Border(
            np.where(reaches, self.logits[last], otherwise.logit),
            np.where(reaches, self.places[last] % self.vocab_size, otherwise.token_id),
        )


def _descending(logits: FloatArray) -> NDArray[np.uint32]:
    """`[K]` integers that order the tokens: 0 for the highest logit; equal logits give equal integers."""
    bits = (logits + np.float32(0)).view(np.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
    below: IntArray = ordered.max().astype(np.int64) - ordered
    return below.astype(np.uint32)
