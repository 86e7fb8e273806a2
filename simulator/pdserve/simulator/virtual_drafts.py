"""`DraftedSequences`: sequences of a simulated engine, of whose drafts a given part is accepted."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdserve.common.errors import InternalError
from pdserve.engine.arrays import IntArray
from pdserve.engine.config import EngineConfig
from pdserve.engine.runner.drafts.drafting import Drafting
from pdserve.engine.scheduler_output import ModelRunnerOutput, NewRequestData
from pdserve.engine.speculation.confirmed_runs import NO_DRAFT, confirmed_lengths
from pdserve.engine.speculation.drafter import DraftRows

FIRST_TOKEN_ID = 3
"""Tokens are drawn from here on, above the ids that most tokenizers have for the ends of texts."""
_DRAWS = 1 << 32


@dataclass(slots=True, eq=False)
class VirtualSequence:
    """A sequence of the batch. Its tokens are the same wherever they are computed, and so is which of them a draft would have."""

    num_known: int
    """Tokens of prompt and output."""
    num_computed: int
    num_sequences: int
    """That continue its prompt."""
    index: int
    num_speculative: int
    """Tokens to draft, at most."""
    prompt: bytes
    """Digest of its prompt, where something is drafted."""

    @classmethod
    def of(cls, new: NewRequestData) -> VirtualSequence:
        prompt = b""
        if new.num_speculative_tokens:
            prompt = hashlib.blake2b(
                array("I", new.token_ids[: new.num_prompt_tokens]).tobytes(), digest_size=16
            ).digest()
        return cls(
            len(new.token_ids),
            new.num_computed_tokens,
            new.num_sequences,
            new.index,
            new.num_speculative_tokens,
            prompt,
        )

    def token(self, place: int, vocab_size: int, number: int = 0) -> int:
        """The token at a place. number: of the sequences that continue the prompt."""
        drawn = place * 7919 + (self.index + number) * 104_729
        return FIRST_TOKEN_ID + drawn % (vocab_size - FIRST_TOKEN_ID)

    def draft(self, place: int, vocab_size: int, acceptance: float) -> int:
        """The draft of the token at a place, which is right in `acceptance` of the places."""
        key = f"{self.index} {place}".encode()
        drawn = int.from_bytes(hashlib.blake2b(key, key=self.prompt, digest_size=4).digest(), "big")
        # the token at the next place is another one
        return self.token(place if drawn < acceptance * _DRAWS else place + 1, vocab_size)

    def accept(self, drafts: Sequence[int], vocab_size: int) -> list[int]:
        """The tokens that a step with these drafts adds, which are known from now on."""
        first, length = self.num_known, len(drafts) + 1
        token_ids = np.array([self.token(place, vocab_size) for place in range(first, first + length)])
        padded = np.array([*drafts, NO_DRAFT])
        [count] = confirmed_lengths(token_ids, padded, np.ones(length, np.bool_), np.array([length]))
        self.num_known += int(count)
        accepted: list[int] = token_ids[:count].tolist()
        return accepted


class _Batch:
    """A `DraftedBatch` of the sequences that are there."""

    def __init__(self, sequences: Mapping[str, VirtualSequence]) -> None:
        self.rows = {req_id: row for row, req_id in enumerate(sequences)}
        self.num_speculative = np.array([sequence.num_speculative for sequence in sequences.values()], np.int64)
        self.num_tokens = np.array([sequence.num_known for sequence in sequences.values()], np.int64)
        self.token_ids: IntArray = np.zeros((len(sequences), 0), np.int64)

    def sampling_parameters(self, rows: IntArray, num_drafts: int) -> Any:
        """Raises: InternalError: drafts of a simulation are not sampled."""
        raise InternalError("the drafts of a simulation are not sampled")


class VirtualDrafting:
    """Drafts for the next step of an engine, as the product asks for them."""

    def __init__(self, config: EngineConfig, vocab_size: int, acceptance: float) -> None:
        """acceptance: the part of drafts that is accepted, of those whose predecessors are."""
        setting = config.speculative_config
        self._drafting = None if setting is None else Drafting(self, setting.disable_by_batch_size)
        self._vocab_size = vocab_size
        self._acceptance = acceptance
        self._sequences: list[VirtualSequence] = []

    def add(self, sequences: Mapping[str, VirtualSequence], output: ModelRunnerOutput) -> None:
        """Write the drafts of the next step into the result of the last one."""
        if self._drafting is not None:
            self._sequences = list(sequences.values())
            self._drafting.propose(_Batch(sequences), output)

    def propose(self, wanted: DraftRows) -> list[list[int]]:
        """As of `Drafter`."""
        return [
            [
                self._sequences[row].draft(place, self._vocab_size, self._acceptance)
                for place in range(num_known, num_known + limit)
            ]
            for row, num_known, limit in zip(
                wanted.rows.tolist(), wanted.num_tokens[wanted.rows].tolist(), wanted.limits.tolist(), strict=True
            )
        ]
