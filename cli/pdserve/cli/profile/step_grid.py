"""`step_grid`: which steps are measured, in which order.

Each of their sizes is about a power of two, up to what the engine allows. The ends of all sizes come first, then what halves the
largest gaps, so that the measurement may end at any time after the first round.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import le

from pdserve.common.errors import ConfigError
from pdserve.engine.config import EngineConfig
from pdserve.engine.sequence_blocks import max_sequence_blocks
from pdserve.simulator.whole_steps import StepShape

FEWEST_TOKENS = 2
"""Of a chunk: one of a single token is computed as a decoding sequence is."""
LEAST_CONTEXT = 64
FIRST_MIXED = 2
"""Round of the first steps with chunks and decoding sequences, which are rare where prefill has workers of its own."""
GROWTH = 64
"""Tokens that a measured sequence may have beyond its shape."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What the steps of an engine may have."""

    config: EngineConfig

    @property
    def step_tokens(self) -> int:
        return self.config.max_num_batched_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.room(1)

    def room(self, num_sequences: int, besides: int = 0) -> int:
        """Tokens that each of so many sequences may have, next to one of so many tokens; 0 if there is no room."""
        lengths = range(1, self.config.max_model_len - GROWTH + 1)
        return bisect_left(lengths, True, key=lambda length: not self._fit(num_sequences, length, besides))

    def _fit(self, num_sequences: int, num_tokens: int, besides: int) -> bool:
        config = self.config
        needed = [0] * len(config.num_blocks_by_shape)
        for count, length in ((num_sequences, num_tokens), (1, besides)):
            blocks = max_sequence_blocks(
                config.kv_cache_specs, length + GROWTH, config.block_size, config.largest_chunk
            )
            for shape, number in enumerate(blocks if length else ()):
                needed[shape] += count * number
        # blocks without a sequence, as that for padding
        return all(map(le, needed, (count - 1 for count in config.num_blocks_by_shape)))


def step_grid(limits: StepLimits) -> list[list[StepShape]]:
    """Rounds of shapes; the first is enough for a profile. Raises: ConfigError if the pool is too small for one."""
    rounds: dict[int, list[StepShape]] = {}

    def add(level: int, shape: StepShape) -> None:
        rounds.setdefault(level, []).append(shape)

    chunks = _coarse_first(_powers(FEWEST_TOKENS, min(limits.config.largest_chunk, limits.longest)))
    for chunk, level in chunks.items():
        for before, deeper in _coarse_first(_befores(limits, chunk)).items():
            add(level + deeper, StepShape(chunk, before))
    most = min(limits.config.max_num_seqs, limits.step_tokens)
    counts = _coarse_first([count for count in _powers(1, most) if limits.room(count)])
    for count, level in counts.items():
        if count * FEWEST_TOKENS <= limits.step_tokens:
            for are_last in (False, True):
                add(level, StepShape(FEWEST_TOKENS, chunks=count, are_last=are_last))
        for context, deeper in _coarse_first(_contexts(limits.room(count))).items():
            add(level + deeper, StepShape(sequences=count, context=context))
    for (chunk, of_chunk), (most_alone, of_count) in itertools.product(chunks.items(), counts.items()):
        count = min(most_alone, limits.config.max_num_seqs - 1)
        for before in {0, _befores(limits, chunk)[-1]} if count and chunk + count <= limits.step_tokens else ():
            contexts = _contexts(limits.room(count, besides=before + chunk))
            for context, deeper in _coarse_first(contexts).items():
                add(FIRST_MIXED + of_chunk + of_count + deeper, StepShape(chunk, before, count, context))
    if not chunks or not counts:
        raise ConfigError(
            f"max_model_len is {limits.config.max_model_len}, more than {GROWTH + FEWEST_TOKENS} is needed for a profile"
        )
    # an engine computes chunks of one size
    return [sorted(set(rounds[level])) for level in sorted(rounds)]


def _befores(limits: StepLimits, chunk: int) -> list[int]:
    """Blocks that were computed elsewhere are full."""
    size = limits.config.block_size
    return sorted({before // size * size for before in (0, *_powers(LEAST_CONTEXT, limits.longest - chunk))})


def _contexts(most: int) -> list[int]:
    return _powers(min(LEAST_CONTEXT, most), most) if most else []


def _powers(least: int, most: int) -> list[int]:
    """Powers of two from `least` to `most`, and these two."""
    between = (1 << power for power in range(least.bit_length(), most.bit_length()))
    return sorted({least, *(each for each in between if each < most), most}) if least <= most else []


def _coarse_first(values: Sequence[int]) -> dict[int, int]:
    """Value -> its level: 0 for the first and the last, 1 for that in the middle, 2 for those in the middle of the rest."""
    levels: dict[int, int] = {}

    def halve(low: int, high: int, level: int) -> None:
        if high - low > 1:
            middle = (low + high) // 2
            levels[values[middle]] = level
            halve(low, middle, level + 1)
            halve(middle, high, level + 1)

    if values:
        levels |= {values[0]: 0, values[-1]: 0}
        halve(0, len(values) - 1, 1)
    return levels
