"""`TokenMask`: rules about single tokens: allowed tokens, forbidden tokens, and biases.

A sequence's parameters become arrays when it enters the batch; a step gathers the arrays of the rows that it samples. The cost of a
rule is proportional to the number of tokens that it names, not to the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.common.request.sampling_params import SamplingParams
from pdserve.engine.arrays import FloatArray, IntArray
from pdserve.engine.sampling.placed_arrays import PlacedArrays
from pdserve.engine.sampling.sparse_indices import SparseIndices
from pdserve.engine.sampling.token_texts import BadTexts, TokenTexts

_ANY = -1
"""Padding of a bad word's prefix to the longest prefix, and of positions before the first output token."""
_KNOWN_BAD_TEXTS = 32
"""Lists of bad words whose tokens are cached; the sequences of a request, and the turns of a session, share a list."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Token rules of one step's rows. A field is None if no row has such a rule."""

    allowed: SparseIndices | None = None
    """The only tokens allowed in the rows that have entries here."""
    forbidden: SparseIndices | None = None
    biased: SparseIndices | None = None
    biases: FloatArray | None = None
    """`[E]`, one for each entry of `biased`."""

    def arrays(self) -> list[NDArray[Any]]:
        """Arrays that `apply` needs on the logits' device."""
        indices = [part for part in (self.allowed, self.forbidden, self.biased) if part is not None]
        return [
            *(array for part in indices for array in part.arrays()),
            *([] if self.biases is None else [self.biases]),
        ]

    def apply(self, logits: Tensor, placed: PlacedArrays) -> None:
        """Change logits `[N, V]` in place: first by allowed tokens, then by forbidden ones, then by biases."""
        if self.allowed is not None:
            index = self.allowed.index(placed)
            kept = logits[index]
            if logits.device.type == "cpu":
                logits[torch.from_numpy(np.unique(self.allowed.rows))] = -torch.inf
            else:  # passes over all rows, but needs neither a sort nor another array on the device
                has_list = logits.new_zeros(len(logits), dtype=torch.bool).index_fill_(0, index[0], True)
                logits.masked_fill_(has_list.unsqueeze(-1), -torch.inf)
            logits[index] = kept
        if self.forbidden is not None:
            logits.index_put_(self.forbidden.index(placed), logits.new_full((), -torch.inf))
        if self.biased is not None and self.biases is not None:
            logits.index_put_(self.biased.index(placed), placed(self.biases), accumulate=True)


class BadWords:
    """Token sequences whose last token is forbidden if the output ends with the tokens before it."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, sequences)) - 1
        self._prefixes = np.full((len(sequences), longest), _ANY, dtype=np.int64)
        for row, sequence in enumerate(sequences):
            self._prefixes[row, longest - len(sequence) + 1 :] = sequence[:-1]
        self._last = np.array([sequence[-1] for sequence in sequences], dtype=np.int64)

    def forbidden_after(self, output: IntArray) -> IntArray:
        """Token ids that would complete a forbidden sequence."""
        length = self._prefixes.shape[1]
        end = np.full(length, _ANY, dtype=np.int64)
        known = min(length, len(output))
        end[length - known :] = output[len(output) - known :]
        found: NDArray[np.bool_] = ((self._prefixes == end) | (self._prefixes == _ANY)).all(axis=1)
        return self._last[found]


@dataclass(frozen=True, slots=True)
class _RowRules:
    """One sequence's rules as arrays."""

    allowed: IntArray | None
    bad_words: BadWords | None
    bad_texts: BadTexts | None
    min_tokens: int
    ends: IntArray
    """EOS and stop tokens, forbidden before `min_tokens`."""
    biased: IntArray
    biases: FloatArray


_NO_RULES = _RowRules(None, None, None, 0, np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))


class TokenRuleTable:
    """The rules of the sequences in the batch, by row."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        suppressed: Sequence[int] = (),
        begin_suppressed: Sequence[int] = (),
        texts: TokenTexts | None = None,
    ) -> None:
        """suppressed: tokens that are never sampled. begin_suppressed: tokens that are not sampled first.

        texts: texts of the model's tokens; None: `bad_words` has no effect, only `bad_words_token_ids` has.
        """
        self._vocab_size = vocab_size
        self._rules: dict[int, _RowRules] = {}
        self._has_rules = np.zeros(num_rows, dtype=np.bool_)
        self._suppressed = np.array(suppressed, dtype=np.int64)
        self._begin_suppressed = np.array(begin_suppressed, dtype=np.int64)
        self._bad_texts = None if texts is None else lru_cache(_KNOWN_BAD_TEXTS)(partial(BadTexts, texts))

    def add(self, row: int, params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
        rules = self._row_rules(params, eos_token_ids)
        if rules is None and (len(self._suppressed) or len(self._begin_suppressed)):
            rules = _NO_RULES
        if rules is not None:
            self._rules[row] = rules
            self._has_rules[row] = True

    def remove(self, row: int) -> None:
        """Forget a row; no effect if it has no rules."""
        if self._rules.pop(row, None) is not None:
            self._has_rules[row] = False

    def _row_rules(self, params: SamplingParams, eos_token_ids: Sequence[int]) -> _RowRules | None:
        """The rules of a sequence; None if it has none."""
        if not (
            params.min_tokens
            or params.logit_bias
            or params.bad_words
            or params.bad_words_token_ids
            or params.allowed_token_ids
        ):
            return None
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        bad_texts = None
        if params.bad_words and self._bad_texts is not None:
            without_text = () if params.include_stop_str_in_output else tuple(sorted(ends))
            bad_texts = self._bad_texts(params.bare_bad_words, without_text)
        return _RowRules(
            allowed=None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, dtype=np.int64),
            bad_words=BadWords(params.bad_words_token_ids) if params.bad_words_token_ids else None,
            bad_texts=bad_texts,
            min_tokens=params.min_tokens,
            ends=np.array([token for token in ends if token < self._vocab_size], dtype=np.int64),
            biased=np.array(list(params.logit_bias), dtype=np.int64),
            biases=np.array(list(params.logit_bias.values()), dtype=np.float32),
        )

    def of_step(self, rows: IntArray, lengths: IntArray, token_ids: IntArray, num_prompt: IntArray) -> TokenMask | None:
        """Rules for logits whose row i belongs to the batch's row `rows[i]` after `lengths[i]` tokens; None if there are none.

        token_ids, num_prompt: indexed by the batch's rows.
        """
        if not self._rules:
            return None
        allowed, forbidden, biased, biases = [], [], [], []
        for place in np.flatnonzero(self._has_rules[rows]).tolist():
            row = rows[place]
            rules = self._rules[int(row)]
            output = token_ids[row, num_prompt[row] : lengths[place]]
            if rules.allowed is not None:
                allowed.append((place, rules.allowed))
            if rules.bad_words is not None:
                forbidden.append((place, rules.bad_words.forbidden_after(output)))
            if rules.bad_texts is not None:
                forbidden.append((place, rules.bad_texts.forbidden_after(output)))
            if len(self._suppressed):
                forbidden.append((place, self._suppressed))
            if not len(output) and len(self._begin_suppressed):
                forbidden.append((place, self._begin_suppressed))
            if len(output) < rules.min_tokens:
                forbidden.append((place, rules.ends))
            if len(rules.biased):
                biased.append((place, rules.biased))
                biases.append(rules.biases)
        if not (allowed or forbidden or biased):
            return None
        return TokenMask(
            allowed=SparseIndices.of(allowed),
            forbidden=SparseIndices.of(forbidden),
            biased=SparseIndices.of(biased),
            biases=np.concatenate(biases) if biases else None,
        )
