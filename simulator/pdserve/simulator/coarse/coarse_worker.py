"""`CoarseWorker`: an engine's steps by the number of its sequences.

Steps that compute prompts are simulated one by one. Between two changes of the batch, steps that only decode are one event: each
takes the time of the one in their middle. Blocks are counted, and cached by the trace's hash ids; they have no places.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.simulator.coarse.event_queue import EventQueue
from pdserve.simulator.step_times import Chunk, StepTimes
from pdserve.worker.prefill_rate import PrefillRate


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What bounds a step, by the settings of the same names."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(slots=True, eq=False)
class Work:
    """A sequence at a worker."""

    num_tokens: int
    """Of the prompt; after a preemption, of all that has to be computed again."""
    num_outputs: int
    """Tokens that this worker still samples."""
    hashes: Sequence[bytes]
    """Of the prompt's full blocks, in the trace's sizes."""
    hash_tokens: int
    """Tokens per hash."""
    on_first: Callable[[int], None]
    """Called with the number of cached tokens when the prompt has been computed and a token sampled; not after a preemption."""
    on_end: Callable[[], None]
    """Called when the last token was sampled."""
    num_computed: int = 0
    num_cached: int = 0
    num_held: int = 0
    """Blocks."""
    is_read: bool = False
    """True if another worker reads its blocks when it has ended here; they are held until `release`."""
    ends_at_step: int = 0
    has_begun: bool = False


@dataclass(slots=True)
class Cache:
    """Cached blocks by their last use; those in use are among them."""

    max_tokens: int
    """That the pool has room for."""
    on_stored: Callable[[Sequence[bytes]], None]
    on_removed: Callable[[Sequence[bytes]], None]
    num_tokens: int = 0
    _used: OrderedDict[bytes, int] = field(default_factory=OrderedDict)

    def match(self, hashes: Sequence[bytes]) -> int:
        """Blocks of the longest prefix, which are used by that."""
        used = self._used
        for depth, each in enumerate(hashes):
            if each not in used:
                return depth
            used.move_to_end(each)
        return len(hashes)

    def add(self, hashes: Sequence[bytes], hash_tokens: int) -> None:
        """Blocks that were computed or read."""
        new = [each for each in hashes if each not in self._used]
        for each in new:
            self._used[each] = hash_tokens
        self.num_tokens += len(new) * hash_tokens
        if new:
            self.on_stored(new)

    def shrink_to(self, num_tokens: int) -> None:
        """Forget what was not used for the longest time."""
        removed = []
        while self.num_tokens > num_tokens and self._used:
            each, size = self._used.popitem(last=False)
            self.num_tokens -= size
            removed.append(each)
        if removed:
            self.on_removed(removed)


class CoarseWorker:
    """One engine with its pool."""

    def __init__(self, events: EventQueue, times: StepTimes, limits: EngineLimits, cache: Cache) -> None:
        self.cache = cache
        self.step_gaps: Counter[float] = Counter()
        """Rounded seconds between two tokens of a sequence -> how often, for all sequences."""
        self.prefill_rate = PrefillRate()
        self.busy_s = 0.0
        self._events = events
        self._times = times
        self._limits = limits
        self._waiting: deque[Work] = deque()
        """Its prompt is to be computed here, and it holds nothing."""
        self._landed: deque[Work] = deque()
        """Its prompt was read from another worker, and it waits for a place in the batch."""
        self._reading: deque[tuple[int, Callable[[], None]]] = deque()
        """(blocks, call) that wait for room."""
        self._prefilling: deque[Work] = deque()
        self._decoding: dict[Work, None] = {}
        """In the order in which they began to decode."""
        self._ends: list[tuple[int, int, Work]] = []
        """(step at which it ends, number, sequence), also of some that do not decode here any more."""
        self._numbers = itertools.count()
        self._step = 0
        """Steps in which sequences decoded."""
        self._context = 0
        """Tokens that the decoding sequences attend to, together, before step `_step`."""
        self._prompt_tokens = 0
        """Of the decoding sequences, together."""
        self._num_held = 0
        self._num_new = 0
        """Held blocks that are not in the cache yet."""
        self._turn_number = 0
        """Of the turn that runs or is due; an event of an earlier one is void."""
        self._is_idle = True
        self._segment: tuple[float, float, int] | None = None
        """(begin, seconds of a step, steps) of the steps that run, if they only decode."""

    @property
    def max_step_tokens(self) -> int:
        return self._limits.max_num_batched_tokens

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._landed)

    @property
    def num_held(self) -> int:
        """Blocks that sequences hold."""
        return self._num_held + self._num_grown

    @property
    def num_blocks(self) -> int:
        return self._limits.num_blocks

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_size)

    def add(self, work: Work) -> None:
        """A sequence whose prompt is to be computed here."""
        self._waiting.append(work)
        self._wake()

    def reserve(self, num_blocks: int, then: Callable[[], None]) -> None:
        """Hold blocks for a prompt that will be read from another worker, and call `then` once they are there."""
        self._reading.append((num_blocks, then))
        self._reserve()

    def _reserve(self) -> None:
        while self._reading and (self._has_room(self._reading[0][0]) or not (self._num_held or self._decoding)):
            num_blocks, then = self._reading.popleft()
            self._num_held += num_blocks
            self._num_new += num_blocks
            self._make_room()
            then()

    def land(self, work: Work) -> None:
        """A sequence whose prompt has been read into the blocks that it holds."""
        work.num_computed = work.num_tokens
        self._num_new -= work.num_held
        self.cache.add(work.hashes, work.hash_tokens)
        self._landed.append(work)
        self._wake()

    def release(self, num_blocks: int) -> None:
        """Blocks of a sequence that was read by another worker."""
        self._num_held -= num_blocks
        self._reserve()
        self._wake()

    def check_idle(self) -> None:
        """Raises: AssertionError if a sequence is left, or a block is held."""
        left = (self._waiting, self._landed, self._reading, self._prefilling, self._decoding)
        assert not any(left), left
        assert (self._num_held, self._num_new, self._context, self._prompt_tokens) == (0, 0, 0, 0)

    def _has_room(self, num_blocks: int) -> bool:
        return self._num_held + self._num_grown + num_blocks <= self._limits.num_blocks

    @property
    def _num_grown(self) -> int:
        """Blocks that decoding sequences hold, by their tokens; the last of each is half full in the mean."""
        return -(-self._context // self._limits.block_size) + len(self._decoding) // 2

    def _make_room(self) -> None:
        # prompts of running sequences are in the cache; their outputs are not, and neither is what is not computed yet
        outputs = self._context - self._prompt_tokens
        self.cache.shrink_to(self.cache.max_tokens - outputs - self._num_new * self._limits.block_size)

    # ---- turns

    def _wake(self) -> None:
        """Something may begin: at once, or after the step that runs."""
        if self._is_idle:
            self._is_idle = False
            self._turn_number += 1
            self._turn()
        elif self._segment is not None and (self._landed or self._waiting) and self._may_admit():
            begin_s, step_s, num_steps = self._segment
            done = min(num_steps, int((self._events.now_s - begin_s) / step_s) + 1)
            if done < num_steps:
                self._segment = begin_s, step_s, done
                self._turn_number += 1
                self._at(begin_s + done * step_s, self._end_segment)

    def _may_admit(self) -> bool:
        if self.num_running >= self._limits.max_num_seqs:
            return False
        return bool(self._landed) or self._has_room(self.blocks_of(self._waiting[0].num_tokens))

    def _at(self, when_s: float, call: Callable[[], None]) -> None:
        number = self._turn_number

        def if_current() -> None:
            if number == self._turn_number:
                call()

        self._events.at(when_s, if_current)

    def _turn(self) -> None:
        self._reserve()
        self._admit()
        if self._prefilling:
            self._mixed_step()
        elif self._decoding:
            self._begin_segment()
        else:
            self._is_idle = True

    def _admit(self) -> None:
        limits = self._limits
        while self._landed and self.num_running < limits.max_num_seqs:
            work = self._landed.popleft()
            self._num_held -= work.num_held
            self._begin_decoding(work)
        while self._waiting and self.num_running < limits.max_num_seqs:
            work = self._waiting[0]
            depth = self.cache.match(work.hashes)
            work.num_cached = min(depth * work.hash_tokens, work.num_tokens - 1)
            # blocks that it shares with others are held by these, or are of use to it only
            num_new = self.blocks_of(work.num_tokens) - work.num_cached // limits.block_size
            if not self._has_room(num_new) and (self._num_held or self._decoding):
                break
            self._waiting.popleft()
            work.num_computed, work.num_held = work.num_cached, num_new
            self._num_held += num_new
            self._num_new += num_new
            self._make_room()
            self._prefilling.append(work)

    def _mixed_step(self) -> None:
        budget = self._limits.max_num_batched_tokens - len(self._decoding)
        computed: list[tuple[Work, int]] = []
        parts = []
        for work in self._prefilling:
            count = min(work.num_tokens - work.num_computed, budget)
            if count <= 0:
                break
            budget -= count
            ends = work.num_computed + count == work.num_tokens
            parts.append(Chunk(count, work.num_computed, int(ends)))
            computed.append((work, count))
        num_decoding = len(self._decoding)
        step_s = self._times.batch_s(parts, num_decoding, self._context)
        self._segment = None
        self.prefill_rate.add(sum(count for _, count in computed), step_s)
        self._account(step_s, 1, num_decoding)
        self._at(self._events.now_s + step_s, lambda: self._end_mixed_step(computed))

    def _end_mixed_step(self, computed: Sequence[tuple[Work, int]]) -> None:
        if self._decoding:
            self._step += 1
            self._context += len(self._decoding)
        for work, count in computed:
            work.num_computed += count
            if work.num_computed == work.num_tokens:
                # a prompt's chunks are computed in their order
                self._prefilling.popleft()
                self._sampled_first(work)
        self._end_decoding()
        self._turn()

    def _sampled_first(self, work: Work) -> None:
        self._num_new -= work.num_held
        self.cache.add(work.hashes, work.hash_tokens)
        self._make_room()
        work.num_outputs -= 1
        has_begun, work.has_begun = work.has_begun, True
        if work.num_outputs:
            self._num_held -= work.num_held
            self._begin_decoding(work)
        if not has_begun:
            work.on_first(work.num_cached)
        if not work.num_outputs:
            if not work.is_read:
                self._num_held -= work.num_held
            work.on_end()

    def _begin_decoding(self, work: Work) -> None:
        self._decoding[work] = None
        work.ends_at_step = self._step + work.num_outputs
        self._context += work.num_tokens
        self._prompt_tokens += work.num_tokens
        heapq.heappush(self._ends, (work.ends_at_step, next(self._numbers), work))

    def _end_decoding(self) -> None:
        while self._ends and self._ends[0][0] <= self._step:
            ends_at, _, work = heapq.heappop(self._ends)
            if work in self._decoding and work.ends_at_step == ends_at:
                self._leave(work)
                work.num_outputs = 0
                work.on_end()

    def _leave(self, work: Work) -> int:
        """Returns the tokens that it had."""
        del self._decoding[work]
        num_tokens = work.num_tokens + work.num_outputs - (work.ends_at_step - self._step)
        self._context -= num_tokens
        self._prompt_tokens -= work.num_tokens
        return num_tokens

    def _begin_segment(self) -> None:
        limits = self._limits
        while len(self._decoding) > 1 and not self._has_room(0):
            self._preempt()
        num = len(self._decoding)
        while (work := self._ends[0][2]) not in self._decoding or work.ends_at_step != self._ends[0][0]:
            heapq.heappop(self._ends)
        num_steps = self._ends[0][0] - self._step
        if num > 1:
            room = limits.num_blocks - self._num_held - self._num_grown
            num_steps = max(1, min(num_steps, room * limits.block_size // num + 1))
        middle = self._context + num * (num_steps - 1) // 2
        step_s = self._times.batch_s((), num, middle)
        self._segment = self._events.now_s, step_s, num_steps
        self._at(self._events.now_s + num_steps * step_s, self._end_segment)

    def _end_segment(self) -> None:
        assert self._segment is not None
        _, step_s, num_steps = self._segment
        self._segment = None
        num = len(self._decoding)
        self._step += num_steps
        self._context += num * num_steps
        self._account(step_s, num_steps, num)
        self._end_decoding()
        self._turn()

    def _preempt(self) -> None:
        """The last one begins again when there is room."""
        work = next(reversed(self._decoding))
        num_left = work.ends_at_step - self._step
        work.num_tokens = self._leave(work)
        work.num_outputs, work.num_computed, work.num_held = num_left, 0, 0
        self._waiting.appendleft(work)

    def _account(self, step_s: float, num_steps: int, num_decoding: int) -> None:
        self.busy_s += step_s * num_steps
        if num_decoding:
            self.step_gaps[round(step_s, 5)] += num_steps * num_decoding
