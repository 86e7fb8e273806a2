"""`with_steps`: the samples of a profile out of times of whole steps.

    tokens(T)       a chunk of T tokens with nothing before it and no output, less what its own tokens attend to
    outputs(n)      n chunks with an output each, less the same chunks without
    attention(...)  what a step takes more than its tokens and outputs

What a chunk's own tokens attend to is as much as if half of it stood before it. So the profile gives back the time of each measured
chunk without outputs, of each step of single tokens, and of each mixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import msgspec

from pdserve.simulator.profile import LEVELS, AttentionTime, CountTime, Curve, Level, Profile, Spread
from pdserve.simulator.step_times import Chunk


class StepShape(NamedTuple):
    """What one measured step computes."""

    chunk: int = 0
    """Tokens of each chunk; 0: there are none."""
    before: int = 0
    """Tokens before each chunk."""
    sequences: int = 0
    """That compute one token each, and get an output for it."""
    context: int = 0
    """Tokens before that of each of these."""
    chunks: int = 1
    are_last: bool = False
    """True if each chunk ends its prompt, with an output."""

    @property
    def num_chunks(self) -> int:
        return self.chunks if self.chunk else 0

    @property
    def num_tokens(self) -> int:
        return self.chunk * self.num_chunks + self.sequences

    @property
    def num_outputs(self) -> int:
        return self.sequences + (self.num_chunks if self.are_last else 0)

    def parts(self) -> list[Chunk]:
        """As `StepTimes` takes them."""
        chunks = [Chunk(self.chunk, self.before, int(self.are_last))] * self.num_chunks
        return chunks + [Chunk(1, self.context, 1)] * self.sequences


def with_steps(profile: Profile, steps: Mapping[StepShape, Spread]) -> Profile:
    """The profile with samples of these steps, in place of its own.

    steps: of each count of outputs both the step with them and the one without; at least one count, one chunk with nothing before
    it, and one step of a single sequence.
    """
    alone = {shape: time for shape, time in steps.items() if shape.chunks == 1 and not shape.are_last}
    chunks = {(shape.chunk, shape.before): time for shape, time in alone.items() if shape.chunk and not shape.sequences}
    within = {chunk: _within(chunk, chunks) for chunk, before in chunks if not before}
    tokens = {chunk: chunks[chunk, 0].map(partial(_less, own_s=own_s)) for chunk, own_s in within.items()}
    outputs = {
        shape.chunks: _difference(time, steps[shape._replace(are_last=False)])
        for shape, time in steps.items()
        if shape.are_last
    }

    curves = {
        level: tuple(Curve({count: time.at(level) for count, time in times.items()}) for times in (tokens, outputs))
        for level in LEVELS
    }

    def rest(shape: StepShape, seconds: float, level: Level) -> float:
        of_tokens, of_outputs = curves[level]
        seconds -= of_tokens(shape.num_tokens)
        return seconds - of_outputs(shape.num_outputs) if shape.num_outputs else seconds

    return msgspec.structs.replace(
        profile,
        tokens=_sorted(tokens),
        outputs=_sorted(outputs),
        attention=tuple(
            AttentionTime(*shape[:4], time.map(partial(rest, shape))) for shape, time in sorted(alone.items())
        ),
        whole_steps=True,
        further_chunk_s=_further_chunk_s(steps, tokens, within),
    )


def _further_chunk_s(
    steps: Mapping[StepShape, Spread], tokens: Mapping[int, Spread], within: Mapping[int, float]
) -> float:
    """By the step with the most chunks."""
    without = [shape for shape in steps if shape.chunks > 1 and not shape.are_last]
    if not without:
        return 0.0
    most = max(without, key=lambda shape: shape.chunks)
    of_tokens = Curve({count: time.median_s for count, time in tokens.items()})(most.num_tokens)
    rest = steps[most].median_s - of_tokens - most.chunks * Curve(within)(most.chunk)
    return max(0.0, rest / (most.chunks - 1))


def _less(seconds: float, level: Level, own_s: float) -> float:
    return seconds - own_s


def _sorted(times: Mapping[int, Spread]) -> tuple[CountTime, ...]:
    return tuple(CountTime(count, times[count]) for count in sorted(times))


def _difference(with_outputs: Spread, without: Spread) -> Spread:
    """Sampling takes no less than nothing, whatever the noise says."""
    return with_outputs.map(lambda seconds, level: max(0.0, seconds - without.at(level)))


def _within(chunk: int, chunks: Mapping[tuple[int, int], Spread]) -> float:
    """Seconds for what a chunk's own tokens attend to, by the chunk with the most before it: the others are closer to the noise."""
    first_s = chunks[chunk, 0].median_s
    most = max(before for count, before in chunks if count == chunk)
    if not most:
        return 0.0
    slope = (chunks[chunk, most].median_s - first_s) / most
    return min(max(0.0, slope * chunk / 2), first_s)
