"""`Profile`: how long a worker's steps, transfers and start take on some device, as a file. `ProfileStepTimes` reads steps off it.

A step takes the time of its tokens, of the tokens that are sampled, and of what its tokens attend to:

    step = tokens(all tokens) + outputs(sampled tokens) + attention(chunks of prompts, single tokens)

A sample of attention has four numbers: the tokens of a chunk and those before it, and the number of sequences that compute a
single token and the mean of what each attends to. Where both kinds were measured in one step, the sample has what they take
together; where they were not, it is taken for the sum.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from pdserve.common.bounded_file import read_bounded
from pdserve.common.errors import ConfigError
from pdserve.simulator.step_times import Chunk, StepTimes

FORMAT = 1
MAX_BYTES = 256 << 20
"""Of a file."""
Level = Literal["low", "median", "high"]
LEVELS: tuple[Level, ...] = ("low", "median", "high")


class Spread(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Seconds of repetitions of the same thing. Of a single one, all three are equal."""

    median_s: float
    low_s: float
    """A tenth was faster."""
    high_s: float
    """A tenth was slower."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """seconds: at least one."""
        low, median, high = np.quantile(seconds, (0.1, 0.5, 0.9))
        return cls(float(median), float(low), float(high))

    def at(self, level: Level) -> float:
        return {"low": self.low_s, "median": self.median_s, "high": self.high_s}[level]

    def map(self, change: Callable[[float, Level], float]) -> Spread:
        """change: takes the seconds of a level."""
        return Spread(change(self.median_s, "median"), change(self.low_s, "low"), change(self.high_s, "high"))


class CountTime(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The time of so many tokens."""

    count: int
    time: Spread


class AttentionTime(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The time of what a step's tokens attend to."""

    chunk: int
    """Tokens of the prompt's chunk; 0 for none."""
    before: int
    """Tokens before the chunk."""
    sequences: int
    """That compute one token each."""
    context: int
    """Tokens before that of each of these."""
    time: Spread


class TransferTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of KV blocks from one worker to another."""

    bytes_per_s: float
    latency_s: float


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured of a worker."""

    format: int = FORMAT
    model: str
    device: str
    settings: Mapping[str, str | int | float | bool | None] = {}
    """Of the worker, as far as they change its times."""
    conditions: str = ""
    """When and how it was measured, for readers."""
    tokens: tuple[CountTime, ...]
    outputs: tuple[CountTime, ...]
    attention: tuple[AttentionTime, ...]
    whole_steps: bool = False
    """True if whole steps were measured, so that attention is what they take more than their tokens; False if attention was."""
    further_chunk_s: float = 0.0
    """Seconds that each chunk of a step but the first takes by itself."""
    transfer: TransferTime | None = None
    start_s: Spread | None = None
    """From the start of a worker's process until it serves."""

    def verify(self) -> None:
        """Raises: ConfigError naming the field, its value and its limit."""
        if self.format != FORMAT:
            raise ConfigError(f"format is {self.format}, this version reads {FORMAT}")
        for field in ("tokens", "outputs", "attention"):
            if not getattr(self, field):
                raise ConfigError(f"{field} has no samples")
        counted = [
            (field, number, each) for field in ("tokens", "outputs") for number, each in enumerate(getattr(self, field))
        ]
        for field, number, each in counted:
            if each.count < 1:
                raise ConfigError(f"{field}[{number}] has a count of {each.count}, at least 1 is needed")
            _verify_spread(f"{field}[{number}]", each.time)
        for number, sample in enumerate(self.attention):
            for name in ("chunk", "before", "sequences", "context"):
                if not 0 <= (value := getattr(sample, name)) < 1 << 40:
                    raise ConfigError(f"attention[{number}] has {name} {value}, 0 to {(1 << 40) - 1} are needed")
            if not sample.chunk and not sample.sequences:
                raise ConfigError(f"attention[{number}] has neither a chunk nor sequences")
            _verify_spread(f"attention[{number}]", sample.time)
        if not 0 <= self.further_chunk_s < math.inf:
            raise ConfigError(f"further_chunk_s is {self.further_chunk_s:g}, at least 0 is needed")
        if self.transfer is not None:
            if not 0 < self.transfer.bytes_per_s < math.inf:
                raise ConfigError(f"transfer.bytes_per_s is {self.transfer.bytes_per_s:g}, above 0 is needed")
            if not 0 <= self.transfer.latency_s < math.inf:
                raise ConfigError(f"transfer.latency_s is {self.transfer.latency_s:g}, at least 0 is needed")
        if self.start_s is not None:
            _verify_spread("start_s", self.start_s)


def _verify_spread(field: str, spread: Spread) -> None:
    """Raises: ConfigError."""
    for name in ("median_s", "low_s", "high_s"):
        # the attention of a step may be measured as a difference, and be less than nothing by its noise
        if not math.isfinite(value := getattr(spread, name)):
            raise ConfigError(f"{field} has {name} {value}, a number is needed")


def read_profile(path: Path) -> Profile:
    """Raises: ConfigError for a file that cannot be read or is not a profile."""
    data = read_bounded(path, MAX_BYTES, "profile")
    try:
        profile = msgspec.json.decode(data, type=Profile)
        profile.verify()
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"profile {path}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"profile {path}: {error.message}") from error
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    """Raises: ConfigError if it cannot be written."""
    try:
        path.write_bytes(msgspec.json.encode(profile))
    except OSError as error:
        raise ConfigError(f"profile {path}: {error.strerror}") from error


def _line(count: float, low: tuple[int, float], high: tuple[int, float]) -> float:
    """The value at `count` of the line through two samples. Above both it does not fall, and below both it stays above nothing
    if they do: by noise the last of many samples may be less than the one before."""
    slope = (high[1] - low[1]) / (high[0] - low[0])
    if count > high[0]:
        return high[1] + max(0.0, slope) * (count - high[0])
    if count < low[0]:
        return max(min(0.0, low[1]), low[1] + slope * (count - low[0]))
    # at each sample exactly its value
    return low[1] + slope * (count - low[0]) if count < high[0] else high[1]


class Curve:
    """A function of one number by straight lines between samples, which go on beyond them."""

    def __init__(self, samples: Mapping[int, float]) -> None:
        """samples: at least one."""
        self.counts = sorted(samples)
        self.values = [samples[count] for count in self.counts]

    def __call__(self, count: float) -> float:
        if len(self.counts) == 1:
            return self.values[0]
        above = min(max(bisect.bisect_left(self.counts, count), 1), len(self.counts) - 1)
        low, high = ((self.counts[place], self.values[place]) for place in (above - 1, above))
        return _line(count, low, high)


class _Surface:
    """A function of two numbers that is linear in each between samples, and beyond them."""

    def __init__(self, samples: Mapping[tuple[int, int], float]) -> None:
        rows: dict[int, dict[int, float]] = {}
        for (first, second), value in samples.items():
            rows.setdefault(first, {})[second] = value
        self.firsts = sorted(rows)
        self._rows = [Curve(rows[first]) for first in self.firsts]

    def __call__(self, first: float, second: float) -> float:
        if len(self._rows) == 1:
            return self._rows[0](second)
        above = min(max(bisect.bisect_left(self.firsts, first), 1), len(self._rows) - 1)
        low, high = ((self.firsts[place], self._rows[place](second)) for place in (above - 1, above))
        return _line(first, low, high)


class _Mix(NamedTuple):
    chunk: float
    before: float
    sequences: float
    context: float


class _Mixing:
    """What chunks and single tokens in the same step take, as a factor on the sum of what each kind takes."""

    def __init__(self, samples: Mapping[_Mix, float]) -> None:
        self._axes = [sorted({key[number] for key in samples}) for number in range(4)]
        # between powers of two the factor changes evenly
        self._log_axes = [[math.log2(1 + value) for value in axis] for axis in self._axes]
        grid = np.full([len(axis) for axis in self._axes], np.nan)
        places = [{value: place for place, value in enumerate(axis)} for axis in self._axes]
        for key, factor in samples.items():
            grid[tuple(place[value] for place, value in zip(places, key, strict=True))] = factor
        self._grid = _filled(grid)

    def __call__(self, mix: _Mix) -> float:
        corners: list[tuple[tuple[int, float], ...]] = []
        for axis, value in zip(self._log_axes, mix, strict=True):
            place = min(max(math.log2(1 + value), axis[0]), axis[-1])
            above = bisect.bisect_left(axis, place)
            if axis[above] == place:
                corners.append(((above, 1.0),))
            else:
                share = (place - axis[above - 1]) / (axis[above] - axis[above - 1])
                corners.append(((above - 1, 1.0 - share), (above, share)))
        return sum(
            float(self._grid[tuple(place for place, _ in corner)]) * math.prod(share for _, share in corner)
            for corner in itertools.product(*corners)
        )


def _filled(grid: np.ndarray) -> np.ndarray:
    """Samples that are missing take the value of the nearest one along an axis, the last axis first."""
    for axis in reversed(range(grid.ndim)):
        rows = np.moveaxis(grid, axis, -1)
        for place in np.ndindex(rows.shape[:-1]):
            row = rows[place]
            known = np.flatnonzero(~np.isnan(row))
            if len(known):
                nearest = known[np.abs(np.arange(len(row))[:, None] - known).argmin(axis=1)]
                rows[place] = row[nearest]
    return grid


class ProfileStepTimes(StepTimes):
    """The `StepTimes` of a profile."""

    def __init__(self, profile: Profile, level: Level = "median") -> None:
        """level: which of the measured times."""
        self._tokens = Curve({each.count: each.time.at(level) for each in profile.tokens})
        self._outputs = Curve({each.count: each.time.at(level) for each in profile.outputs})
        of_chunks, of_singles, together = {}, {}, {}
        for each in profile.attention:
            seconds = each.time.at(level)
            if not each.sequences:
                of_chunks[each.chunk, each.before] = seconds
            elif not each.chunk:
                of_singles[each.sequences, each.context] = seconds
            else:
                together[_Mix(each.chunk, each.before, each.sequences, each.context)] = seconds
        if 1 not in {sequences for sequences, _ in of_singles}:
            raise ConfigError("attention has no samples of one sequence that computes a single token")
        # a chunk of one token is a single token
        self._chunks = _Surface(
            {**{(1, context): time for (count, context), time in of_singles.items() if count == 1}, **of_chunks}
        )
        self._singles = _Surface(of_singles)
        # a launch is the least that a chunk takes, and all chunks of a step share it
        self._further_chunk_s = profile.further_chunk_s - max(0.0, min(of_chunks.values(), default=0.0))
        self._is_of_steps = profile.whole_steps
        factors = {}
        for mix, seconds in together.items():
            apart_s = self._chunks(mix.chunk, mix.before) + self._singles(mix.sequences, mix.context)
            mixed_s = self._mixed_tokens_s(mix.chunk + mix.sequences)
            if apart_s + mixed_s > 0:
                factors[mix] = (seconds + mixed_s) / (apart_s + mixed_s)
        self._mixing = _Mixing(factors) if factors else None

    def _mixed_tokens_s(self, num_tokens: float) -> float:
        """The time to which the factor of mixing applies besides that of attention: a difference of steps may be next to nothing,
        or less, and no number to take a factor of."""
        return self._tokens(num_tokens) if self._is_of_steps else 0.0

    def batch_s(self, parts: Sequence[Chunk], num_singles: int, num_before: int) -> float:
        num_outputs = num_singles + sum(part.num_outputs for part in parts)
        # what is one token is a single one, also if it is the last of a prompt, and nothing of it is sampled
        chunks = [part for part in parts if part.num_tokens > 1]
        num_singles += len(parts) - len(chunks)
        num_before += sum(part.num_before for part in parts if part.num_tokens == 1)
        in_chunks = sum(chunk.num_tokens for chunk in chunks)
        num_tokens = in_chunks + num_singles
        seconds = self._tokens(num_tokens)
        if num_outputs:
            seconds += self._outputs(num_outputs)
        context = num_before / num_singles if num_singles else 0.0
        attention_s = self._singles(num_singles, context) if num_singles else 0.0
        if chunks:
            attention_s += sum(self._chunks(chunk.num_tokens, chunk.num_before) for chunk in chunks)
            attention_s += (len(chunks) - 1) * self._further_chunk_s
        if chunks and num_singles and self._mixing is not None:
            before = sum(chunk.num_tokens * chunk.num_before for chunk in chunks) / in_chunks
            factor = self._mixing(_Mix(in_chunks, before, num_singles, context))
            attention_s += (factor - 1.0) * (attention_s + self._mixed_tokens_s(num_tokens))
        return max(0.0, seconds + attention_s)
