"""`BlockMoves`: whether cached blocks of a prompt are read from another worker by the one that computes it.

Any worker of either role that has more of the prompt than the one that computes it can be the source: the decode worker of the
conversation's last turn, or a prefill worker that has computed the same beginning. Blocks are moved where that takes less time:

    move(b)    = (first + bytes of b blocks * seconds per byte) * (1 + spread)
    compute(b) = tokens of b blocks / rate of the worker that computes

The line is fitted to the last moves; before the first it is FIRST_S and the bandwidth of other transfers. The spread is the mean
distance from it, as a part of the longer of both times, so moves have to win by more where they are less regular. A worker's rate
is the last one that it has reported; without any, nothing is moved.

What has not come after twice the estimate, or in the time that computing it takes if that is longer, is computed: waiting never
costs more than it could have saved. A move that was given up counts with the time that was waited, or the next ones would be given
up, too. With `block_moves` `always` the limit is 10 s.

Each candidate is placed with the move that it would make: moved blocks count as the tokens that it could compute in that time. So a
prefix that a busy worker has costs an idle one little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from pdserve.common import clock
from pdserve.common import timeline as moments
from pdserve.common.kv_layout import KvLayout
from pdserve.common.line_fit import LineFit
from pdserve.common.protocol import works_with
from pdserve.common.timeline import Timeline
from pdserve.router.placement.placement import BlockMove, Candidate
from pdserve.router.placement.transfer_bandwidth import TransferBandwidth
from pdserve.router.workers.worker import RemoteWorker

FIRST_S = 0.005
"""Seconds of a move's messages, before the first measurement."""
LEAST_LIMIT_S = 0.02
ALWAYS_LIMIT_S = 10.0
"""With `block_moves` `always`, by which a move is not chosen by its estimate."""
KEPT_S = 15.0
"""Seconds without a move after which what moves took is forgotten; else moves that were slow once would never be tried again."""
_FIRST_WEIGHT = 4
"""The first estimate counts as so many moves: one move that had to wait for a long step does not end all others."""
_KEPT = 0.9
"""Weight of older moves with each new one."""
_FIRST_SPREAD = 0.5
_LEAST_SPREAD = 0.5
"""Least spread of moved bytes, as variance over the square of their mean, for which a slope is fitted. With less, what a few blocks
had to wait for would be taken for the time of their bytes, and nothing long would be moved; then the slope is the bandwidth."""

MOVE_OUTCOMES = ("faster", "slower", "unneeded", "failed")
"""Of moves: it took less time than the estimate for computing; more; the worker had the blocks when the request came; or they were
computed after all."""


class BlockMoves:
    """One router's choices, and how often they were right."""

    def __init__(
        self,
        setting: Literal["never", "auto", "always"],
        bandwidth: TransferBandwidth,
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        """setting: `block_moves`."""
        self._setting = setting
        self._bandwidth = bandwidth
        self._clock = clock
        self._line = LineFit()
        """Seconds over bytes."""
        self._spread = _FIRST_SPREAD
        self._measured_at = 0.0
        self.num_ended: Counter[str] = Counter()
        """Moves by `MOVE_OUTCOMES`."""
        self.num_bytes = 0
        """Bytes of moves that brought their blocks, as they were placed."""

    def counts(self) -> dict[str, int]:
        """Outcome -> moves that have ended, for each of `MOVE_OUTCOMES`."""
        return {outcome: self.num_ended[outcome] for outcome in MOVE_OUTCOMES}

    def with_moves(self, candidates: Sequence[Candidate], sources: Iterable[Candidate]) -> list[Candidate]:
        """The candidates with the move that each would make. sources: workers of both roles to which nothing has happened."""
        if self._setting == "never":
            return list(candidates)
        best = _BestSources(sources)
        return [self._with_move(candidate, best.of(candidate)) for candidate in candidates]

    def _with_move(self, reader: Candidate, source: Candidate | None) -> Candidate:
        if source is None or (num_blocks := _gain(reader, source)) <= 0:
            return reader
        rate = reader.worker.prefill_tokens_per_s
        move = self._move(reader.worker, source.worker, reader.overlap_blocks, num_blocks, rate)
        return reader if move is None else msgspec.structs.replace(reader, move=move)

    def of_leaving(
        self, source: RemoteWorker, reader: RemoteWorker, have: int, num_blocks: int, others: Iterable[RemoteWorker]
    ) -> BlockMove | None:
        """Of so many blocks after the first `have` of a prompt, from a worker that drains; None if one of the others computes them
        sooner."""
        rate = max((other.prefill_tokens_per_s for other in others), default=0.0)
        return None if self._setting == "never" else self._move(reader, source, have, num_blocks, rate)

    def _move(
        self, reader: RemoteWorker, source: RemoteWorker, have: int, num_blocks: int, rate: float
    ) -> BlockMove | None:
        """rate: of who computes them otherwise, tokens per second; 0: unknown."""
        layout = reader.identity.layout
        num_bytes = round(_moved_bytes(layout, have, have + num_blocks))
        base_s = self._expected_s(num_bytes)
        move_s = base_s * (1 + self._spread)
        compute_s = num_blocks * layout.block_size / rate if rate else None
        limit_s = max(LEAST_LIMIT_S, 2 * move_s, compute_s or 0.0)
        move = BlockMove(
            source=source,
            num_blocks=num_blocks,
            num_bytes=num_bytes,
            num_tokens=(have + num_blocks) * layout.block_size,
            base_s=base_s,
            move_s=move_s,
            compute_s=compute_s,
            limit_s=ALWAYS_LIMIT_S if self._setting == "always" else limit_s,
        )
        return move if move.pays or self._setting == "always" else None

    def ended(self, move: BlockMove | None, timeline: Timeline, num_cached_tokens: int) -> None:
        """Learn from an attempt that has been served. move: that of its placement. num_cached_tokens: of the prompt, as its worker
        found it."""
        if move is None:
            return
        known = timeline.moments_unix_ns
        if moments.BLOCKS_RESERVED in known and moments.BLOCKS_LANDED in known:
            seconds = _waited_s(timeline, moments.BLOCKS_LANDED)
            self._learn(move, seconds)
            is_faster = move.compute_s is not None and seconds < move.compute_s
            self.num_ended["faster" if is_faster else "slower"] += 1
            self.num_bytes += move.num_bytes
        elif num_cached_tokens >= move.num_tokens:
            self.num_ended["unneeded"] += 1
        else:
            self.num_ended["failed"] += 1
            # one that failed at once says nothing of how long moves take
            if (seconds := _waited_s(timeline, moments.PREFILL_STARTED)) >= move.limit_s / 2:
                self._learn(move, seconds)

    def _learn(self, move: BlockMove, seconds: float) -> None:
        self._forget_if_old()
        if not self._line.weight:
            expected_s = self._expected_s(move.num_bytes)
            for _ in range(_FIRST_WEIGHT):
                self._line.add(move.num_bytes, expected_s, 1.0)
        distance = abs(seconds - move.base_s) / max(seconds, move.base_s)
        self._spread = _KEPT * self._spread + (1 - _KEPT) * distance
        self._line.add(move.num_bytes, seconds, _KEPT)
        self._measured_at = self._clock()

    def _expected_s(self, num_bytes: float) -> float:
        """Seconds that a move of so many bytes is expected to take."""
        self._forget_if_old()
        line, byte_s = self._line, 1 / self._bandwidth.bytes_per_s
        if not line.weight:
            return FIRST_S + num_bytes * byte_s
        if line.spread > _LEAST_SPREAD * line.x**2:
            byte_s = max(0.0, line.slope)
        first_s = (line.y - byte_s * line.x) / line.weight
        # a line that begins below 0 is too steep: then all time counts for bytes
        return first_s + num_bytes * byte_s if first_s > 0 else num_bytes * line.y / line.x

    def _forget_if_old(self) -> None:
        if self._line.weight and self._clock() - self._measured_at > KEPT_S:
            self._line, self._spread = LineFit(), _FIRST_SPREAD

    def can_read(self, reader: RemoteWorker, source: RemoteWorker) -> bool:
        """True if cached blocks of the source have the reader's layout."""
        ours, theirs = reader.identity, source.identity
        return works_with(theirs.protocol_version, ours.protocol_version) and _is_readable(ours.layout, theirs.layout)


def _waited_s(timeline: Timeline, end: str) -> float:
    """Seconds for which a move's source was waited for, until the moment `end`; 0 if it is not known.

    Before room is reserved the request also waits for its turn, as it would without a move, so FIRST_S of that counts at most.
    """
    known = timeline.moments_unix_ns
    begun, ended = known.get(moments.PREFILL_QUEUED), known.get(end)
    if begun is None or ended is None:
        return 0.0
    reserved = known.get(moments.BLOCKS_RESERVED)
    if reserved is None:
        return max(0.0, (ended - begun) / 1e9)
    return max(0.0, (ended - reserved) / 1e9) + min(max(0.0, (reserved - begun) / 1e9), FIRST_S)


class _BestSources:
    """Of workers of each layout the two that have most of a prompt, so that a worker finds another one in constant time."""

    def __init__(self, sources: Iterable[Candidate]) -> None:
        self._best: dict[tuple[KvLayout, int], list[Candidate]] = {}
        for source in sources:
            identity = source.worker.identity
            two = self._best.setdefault((identity.layout, identity.protocol_version), [])
            two.append(source)
            if len(two) > 2:
                two.remove(min(two, key=_rank))
        self._readable: dict[tuple[KvLayout, KvLayout], bool] = {}

    def of(self, reader: Candidate) -> Candidate | None:
        """The worker that has most of the prompt, of those whose cached blocks the reader can read."""
        ours = reader.worker.identity
        found = [
            source
            for (layout, version), two in self._best.items()
            if works_with(version, ours.protocol_version) and self._can_read(ours.layout, layout)
            for source in two
            if source.worker is not reader.worker
        ]
        return max(found, key=_rank, default=None)

    def _can_read(self, ours: KvLayout, theirs: KvLayout) -> bool:
        known = self._readable.get((ours, theirs))
        if known is None:
            known = self._readable[ours, theirs] = _is_readable(ours, theirs)
        return known


def _is_readable(ours: KvLayout, theirs: KvLayout) -> bool:
    return not theirs.differences(ours) and theirs.has_draft_head_of(ours)


def _rank(source: Candidate) -> tuple[int, float]:
    return source.confirmed_blocks, -source.load_blocks


def _gain(reader: Candidate, source: Candidate) -> int:
    """Places that the source has reported and the reader is not expected to have."""
    most = (reader.num_tokens - 1) // reader.block_size  # the last token is computed in any case
    return min(source.confirmed_blocks, most) - reader.overlap_blocks


def _moved_bytes(layout: KvLayout, first: int, end: int) -> float:
    """Bytes of the blocks in these places of a sequence, without those outside a window."""
    num_blocks: float = end - first
    if layout.group_windows != (0,):
        num_blocks = layout.num_prompt_blocks(end * layout.block_size, first) / layout.num_groups
    return num_blocks * layout.total_place_bytes
