"""Random lives of two small engines, P and D: every rule holds after every step, and both pools are whole at the end.

What may happen: remote and local requests of any priority, with one or several sequences, from their beginning or resumed,
with a grammar that comes late, in any order, after the request's end, or cannot be compiled, sessions, aborts, sequences
that end elsewhere, sources that give up, transfers wanted late or never, events late and twice, holds that come back in
parts, preemption because everything is too small, in odd seeds steps that are launched before the tokens of the last one are
known, in every third seed drafts, right and wrong ones, in three seeds of four host-memory tiers, whose loads end late and in any
order. In some lives there are stores below these, which give up blocks, fail to keep them, and answer with anything; in others both
share one, whose lookups are wrong and late, too. In some the engines read cached blocks from each other, and these reads fail at
any moment. In some, sequences move from one engine to the other at any moment, again and again, and what fails is resumed.
Some models have a window. Others have several KV cache groups, with windows, chunks or a state per sequence, or one of states, with
blocks of one shape or of several. Others have a draft head, which drafts or is only filled, and which one engine of some lacks.
Each life is a seed; lives grow with their number, so the first that fails is about the smallest.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.common.errors import InternalError, InvalidRequest
from pdserve.common.request.engine_types import FinishReason
from pdserve.engine.kv_cache.store_tier import StoreTier
from pdserve.engine.request import RequestStatus
from pdserve.engine.sequence_blocks import max_sequence_blocks
from tests.support.engine.drafters import (
    HashHeadDrafter,
    speculation,
    text_or_greedy_drafter,
    use_drafter,
    use_head,
)
from tests.support.engine.engine_harness import Answer, Harness, MakeEngine, specs_of
from tests.support.engine.engine_invariants import CacheContents, StepInvariants
from tests.support.engine.engine_pair import Pair
from tests.support.engine.faulty_store import faulty_store, lies, wrong_finds
from tests.support.engine.hash_model import HEAD, STATE, Chunk, Window, greedy_answer, sampled_answer, windows_of
from tests.support.engine.late_grammars import EOS, IMPOSSIBLE, LateCompiler, random_form
from tests.support.engine.shared_store import SharedBlocks

ERRORS = ("transfer_failed", "evicted", "needs_prefill")
"""Errors after which a router tries again."""
COMPILER_FAILED = InternalError("the compiler failed")


class Session:
    """One on an engine of its own choice, and what its turns must say."""

    def __init__(self, engine: Harness, name: str, window: Window) -> None:
        self.engine, self.name, self.window = engine, name, window
        self.tokens: list[int] = []
        self.expected: list[list[int]] = []

    @property
    def is_idle(self) -> bool:
        request = self.engine.scheduler.requests.get(self.name)
        return request is not None and request.status is RequestStatus.WAITING_FOR_STREAMING_REQ

    def next(self, prompt: list[int], length: int) -> None:
        """Add a turn's input and its expected output."""
        self.expected.append(greedy_answer(self.tokens + prompt, length, self.window))
        self.tokens += prompt + self.expected[-1]

    def check(self) -> None:
        said = [answer.token_ids for answer in self.engine.turns.get(self.name, [])]
        assert said == self.expected[: len(said)], f"session {self.name} has a wrong turn"
        last = self.engine.answers[self.name]
        # its end between two turns is an end like others
        between = len(said) == len(self.expected)
        assert last.finish_reason is (FinishReason.STOP if between else FinishReason.ABORT)
        assert between or last.token_ids == self.expected[-1][: len(last.token_ids)]


class Life:
    """Requests to a pair of engines, and their expected results."""

    def __init__(
        self,
        make_engine: MakeEngine,
        seed: int,
        window: Window = None,
        shapes: Sequence[int] = (),
        *,
        reads: bool = False,
        stores: bool = False,
        moves: bool = False,
        shares: bool = False,
    ) -> None:
        """shapes: of the blocks of each KV cache group; empty: one. reads: the engines read cached blocks from each other. stores:
        they have stores below host memory, and what they asked is asked again. moves: sequences move between them. shares: they
        have one store together."""
        self.window, self.shapes = window, shapes
        self.has_head = HEAD in windows_of(window)
        self.draw = draw = random.Random(seed)
        common = {
            "max_model_len": 64,
            "scheduling_policy": draw.choice(["fcfs", "priority"]),
            "long_prefill_token_threshold": draw.choice([0, 0, 2, 5]),
            "max_overtakes": draw.choice([1, 3, 64]),
            "look_ahead": draw.choice([0, 1, 8]),
            "async_scheduling": seed % 2 == 1,
        }
        if seed % 3 == 0 or self.has_head:
            common["speculative_config"] = speculation(1 + seed % 5, disable_by_batch_size=(1, 3, 16)[seed % 4 % 3])
        self.compiling = draw.choice([0.5, 0.1, 0.05])
        """The smaller, the later grammars come."""
        self.compilers: list[LateCompiler] = []
        self.has_tiers = stores or seed % 4 > 0
        self.tier_draw = random.Random(seed)
        self.has_stores = stores
        self.shared = SharedBlocks(self.tier_draw.choice([20, 1000])) if shares else None
        self.num_loads = 0
        self.num_loaded = Counter[int]()
        """Shape -> blocks loaded from the tiers."""
        self.num_form_drafts = 0
        """Drafts that a grammar allowed."""
        self.texts: list[list[int]] = []
        """Texts of sequences with a grammar, for drafts."""
        self.num_early_kv = 0
        """Steps before which KV had landed for a sequence whose grammar had not come."""
        self.heads: list[HashHeadDrafter] = []
        self.p = self._engine(
            make_engine,
            **common | ({"speculative_config": None} if self.has_head and seed % 2 else {}),
            num_blocks=draw.choice([16, 20, 32]),
            run_ahead_share=draw.choice([0.3, 0.5, 1.0]),
            sliding_window=self._of_engine(lacks=seed % 5 == 3),
        )
        self.d = self._engine(
            make_engine,
            **common,
            num_blocks=draw.choice([16, 18, 24]),
            max_local_prefill_tokens=draw.choice([None, None, 10]),
            sliding_window=self._of_engine(lacks=seed % 5 == 4),
        )
        self.d_grammars = self.compilers[1]
        self.pair = Pair(self.p, self.d, seed)
        self.reads = reads and self.p.has_draft_head == self.d.has_draft_head
        self.moves = moves
        self.contents = CacheContents(self.p if self.p.has_draft_head else self.d)
        self.widths: dict[str, int] = {}
        self.expected: dict[tuple[str, int], list[int]] = {}
        """Expected tokens of each sequence."""
        self.aborted: set[str] = set()
        self.ended_elsewhere: set[tuple[str, int]] = set()
        self.forms: set[str] = set()
        """Requests with a grammar."""
        self.given_up: set[str] = set()
        """Requests with a grammar of which prefill has heard that decode failed."""
        self.impossible: set[str] = set()
        """Requests whose grammar cannot be compiled."""
        self.sessions: list[Session] = []
        self.asked: list[tuple[list[int], str]] = []
        """Prompts with their answers, and the engine that decodes them."""
        self.stems = [[draw.randrange(60) for _ in range(24)] for _ in range(3)]

    def _of_engine(self, *, lacks: bool) -> Window:
        """The windows of an engine's groups. lacks: it has no draft head."""
        return self.window[:-1] if lacks and self.has_head and isinstance(self.window, tuple) else self.window

    def _engine(self, make_engine: MakeEngine, **fields: Any) -> Harness:
        budget, places = self.draw.choice([3, 7, 16, 64]), self.draw.choice([2, 4, 16])
        window = fields["sliding_window"]
        fields["shapes"] = shapes = self.shapes[: len(windows_of(window))]
        num_shapes = max(shapes, default=0) + 1
        if self.has_tiers:
            fields["num_host_blocks"] = tuple(self.tier_draw.choice([1, 5, 20, 60]) for _ in range(num_shapes))
        if self.has_stores:
            fields["num_host_blocks"] = tuple(self.tier_draw.choice([2, 8]) for _ in range(num_shapes))
            fields["store"] = self.shared or self.tier_draw.choice([2000, 1 << 20])
        grammars = LateCompiler()
        self.compilers.append(grammars)
        fields["grammar_timeout_s"] = 3600.0  # a grammar's turn comes when the life says so, on a busy machine too
        fields |= {"max_num_batched_tokens": budget, "max_num_seqs": places}
        if isinstance(window, tuple):
            step_tokens = fields["long_prefill_token_threshold"] or budget
            specs = specs_of(window, shapes)
            longest = max_sequence_blocks(specs, fields["max_model_len"], 4, step_tokens)
            num_groups = Counter(spec.shape for spec in specs)
            fields["num_blocks"], *others = (
                max(count, num_groups[shape] * fields["num_blocks"] // 2) for shape, count in enumerate(longest)
            )
            fields["num_other_blocks"] = tuple(others)
        engine = make_engine(**fields, grammars=grammars, window=window if self.has_head else self.window)
        drafter = text_or_greedy_drafter(self.texts, 0.7, self.draw.randrange(2**32), self.window)
        if engine.has_draft_head:
            self.heads.append(use_head(engine, drafter))
        elif engine.config.speculative_config is not None:
            use_drafter(engine, drafter)
        engine.grammar_wait_s = 0.0  # nobody but the life itself brings them
        if self.has_stores:
            store = faulty_store(engine)
            wrong = [*lies(self.tier_draw).values()]
            finds = [*wrong_finds(self.tier_draw).values()]
        held = engine.hold_loads() if self.has_tiers else None
        invariants = StepInvariants(engine)
        step = engine.step

        def checked_step() -> None:
            self.num_early_kv += engine.scheduler.grammars.num_landed > 0
            self._compile(grammars)
            if self.has_stores:
                store.fault = self.tier_draw.choice(wrong) if self.tier_draw.random() < 0.2 else None
                store.loses_writes = self.tier_draw.random() < 0.1
                store.wrong_find = self.tier_draw.choice(finds) if self.tier_draw.random() < 0.2 else None
            if held is not None:
                ends = {
                    copy_id: self.tier_draw.random() < (0.3 if copy.kv_loads or copy.kv_lookups else 0.8)
                    for copy_id, copy in held.held.items()
                }
                held.release([copy_id for copy_id, is_over in ends.items() if is_over])
                self.num_loads += held.take_num_begun()
                self.num_loaded += held.num_loaded
                held.num_loaded.clear()
            for request in engine.scheduler.running.values():
                self.num_form_drafts += 0 if request.grammar is None else request.grammar.num_drafts
            invariants.before()
            step()
            invariants.after()

            self._give_up()

        engine.step = checked_step  # type: ignore[method-assign]
        return engine

    def _compile(self, grammars: LateCompiler) -> None:
        """Some of what is asked for, in any order; what nobody wants any more as well, for it may be under way."""
        while grammars.jobs and self.draw.random() < self.compiling:
            place = self.draw.randrange(len(grammars.jobs))
            if grammars is self.d_grammars and self.draw.random() < 0.2:
                grammars.fail(place, COMPILER_FAILED)
            else:
                grammars.release(place, wanted=self.draw.choice([True, None]))

    def live(self, num_requests: int) -> None:
        for number in range(num_requests):
            self._ask(f"r{number}")
            for _ in range(self.draw.randint(0, 6)):
                self._round()
            if self.draw.random() < 0.35:
                self._end_one()
        for session in self.sessions:
            session.engine.core.abort_request(session.name)
        self.pair.run()

    def _give_up(self) -> None:
        """The router hears that decode has failed, for good, and ends the other call too."""
        for request_id in [name for name in self.pair.transfers if name in self.forms - self.given_up]:
            answer = self.d.answers.get(self.d.key(request_id, 0))
            if answer is not None and answer.error_message == COMPILER_FAILED.message:
                self.given_up.add(request_id)
                self.pair.abort(request_id)

    def _round(self) -> None:
        if self.moves and self.draw.random() < 0.5:
            self.pair.begin_move(self.draw.choice("ppddd"))
        self.pair.round()
        for engine in (self.p, self.d):
            self.contents.check(engine)
        for session in self.sessions:
            if session.is_idle and self.draw.random() < 0.3 and len(session.tokens) < 40:
                self._turn(session, resume=True)

    def _turn(self, session: Session, *, resume: bool) -> None:
        draw = self.draw
        prompt = [draw.randrange(60) for _ in range(draw.randint(1, 12))]
        length = draw.randint(1, 9)
        session.next(prompt, length)
        self.contents.learn(session.tokens)
        if resume:
            session.engine.resume(session.name, prompt, max_tokens=length)
        else:
            params = {"max_tokens": length}
            session.engine.add(
                prompt, session.name, resumable=True, prefill_here=True, priority=draw.choice([-1, 0]), params=params
            )

    def _ask(self, request_id: str) -> None:
        draw = self.draw
        if draw.random() < 0.15:
            self.sessions.append(Session(draw.choice([self.p, self.d, self.d]), request_id, self.window))
            self._turn(self.sessions[-1], resume=False)
            return
        prompt = draw.choice(self.stems)[: draw.randint(1, 24)] + [
            draw.randrange(60) for _ in range(draw.randint(0, 12))
        ]
        reader = ""
        if self.reads and self.asked and draw.random() < 0.8:
            # a further turn, whose beginning was computed or received at the other engine
            text, last = draw.choice(self.asked[-4:])
            prompt = text[: draw.randint(16, 33)] + [draw.randrange(60) for _ in range(draw.randint(0, 3))]
            reader = "p" if last == "d" else "d"
        if self.has_stores and self.asked and draw.random() < 0.7:
            text, reader = draw.choice(self.asked[-12:])
            prompt = text[: draw.randint(16, 33)] + [draw.randrange(60) for _ in range(draw.randint(0, 3))]
        length = draw.randint(3, 28)
        fields: dict[str, Any] = {"params": {"max_tokens": length}, "priority": draw.choice([-1, 0, 0, 3])}
        width = self.widths[request_id] = draw.choice([1, 1, 1, 1, 2, min(3, self.d.config.max_num_seqs)])
        if width > 1:
            fields |= {"n": width, "params": {"max_tokens": length, "temperature": 1.0, "seed": 3}}
            length = fields["params"]["max_tokens"] = min(length, 9)
        if draw.random() < 0.25:
            form, temperature = random_form(draw), fields["params"].get("temperature", 0.0)
            answers = [
                form.answer(prompt, length, temperature=temperature, seed=3, index=index, window=self.window)
                for index in range(width)
            ]
            if draw.random() < 0.1:
                self.impossible.add(request_id)
            fields["params"]["structured_outputs"] = IMPOSSIBLE if request_id in self.impossible else form.params
            fields["eos"] = (EOS,)
            self.forms.add(request_id)
        elif width > 1:
            answers = [
                sampled_answer(prompt, length, seed=3, index=index, window=self.window) for index in range(width)
            ]
        else:
            answers = [greedy_answer(prompt, length, self.window)]
        for answer in answers:
            self.contents.learn(prompt + answer, num_shared=len(prompt) if width > 1 else 0)
            if request_id in self.forms:
                self.texts.append(prompt + answer)
        if width == 1 and len(answers[0]) > 1 and draw.random() < 0.2:
            resumed = draw.randint(0, len(answers[0]) - 2)
            fields["output"], answers[0] = answers[0][:resumed], answers[0][resumed:]
        self.expected |= {(request_id, index): answer for index, answer in enumerate(answers)}
        kind = draw.random()
        is_remote = kind < 0.7 and reader != "d"
        at = reader or ("d" if kind < 0.9 else "p")
        if width > self.p.config.max_num_seqs:
            at = "d"
        if is_remote:
            self.pair.add(prompt, request_id, fetches=self.reads and bool(reader), **fields)
        else:
            fields |= {"prefill_here": draw.random() < 0.5, "fetches": self.reads and bool(reader)}
            self.pair.add_local(at, prompt, request_id, **fields)
        if (
            self.reads or self.has_stores
        ) and width == 1:  # several sequences share an entry of a draft head that belongs to one of them
            self.asked.append((prompt + answers[0], "d" if is_remote else at))

    def _end_one(self) -> None:
        if not self.widths:
            return
        victim = self.draw.choice(list(self.widths))
        if self.widths[victim] > 1 and self.draw.random() < 0.5:
            index = self.draw.randrange(self.widths[victim])
            self.d.core.scheduler.end_sequence(victim, index)
            self.ended_elsewhere.add((victim, index))
        elif victim not in self.pair.transfers:
            self.d.core.abort_request(victim)
            self.p.core.abort_request(victim)
            self.aborted.add(victim)
        elif self.draw.random() < 0.5:
            self.pair.abort(victim)
            self.aborted.add(victim)
        else:
            self.pair.break_source(victim)
        if victim in self.aborted:
            self.pair.moves.abort(victim)

    def check(self) -> None:
        """Every request has ended, with its own tokens or for a reason that was given."""
        for engine in (self.p, self.d):
            engine.scheduler.check(idle=True)
            self.contents.check(engine)
            scheduler = engine.scheduler
            assert scheduler.waiting.num_waiting_tokens == scheduler.grammars.num_landed == 0
            assert len(scheduler.starvation.overdue) == len(scheduler.starvation.preempted) == 0
        for session in self.sessions:
            session.check()
        for (request_id, index), expected in self.expected.items():
            answer = self.pair.answer(request_id, index)
            key = f"{request_id}/{index}" if self.widths[request_id] > 1 else request_id
            decoded = self.d.answers.get(key)
            ends = decoded if decoded is not None else self.p.answers.get(key, Answer())
            if (moved := self.pair.moves.ended(request_id, index)) is not None:
                answer.token_ids, ends = moved
            assert ends.finish_reason is not None, f"{key} never ended"
            assert answer.token_ids == expected[: len(answer.token_ids)], f"{key} has a wrong token"
            assert request_id not in self.impossible or not answer.token_ids
            if ends.finish_reason is FinishReason.LENGTH:
                assert answer.token_ids == expected
                assert expected[-1] != EOS or request_id not in self.forms
            elif ends.finish_reason is FinishReason.STOP and answer.token_ids == expected and expected[-1] == EOS:
                assert request_id in self.forms
            elif ends.finish_reason is FinishReason.ABORT:
                assert request_id in self.aborted
            elif ends.finish_reason is FinishReason.STOP:
                assert (request_id, index) in self.ended_elsewhere
            elif ends.error_message == COMPILER_FAILED.message:
                assert request_id in self.forms
            elif ends.error_code == InvalidRequest.code:
                assert request_id in self.impossible
            else:
                assert ends.error_code in ERRORS


def live(
    make_engine: MakeEngine,
    seed: int,
    num_requests: int,
    window: Window = None,
    shapes: Sequence[int] = (),
    *,
    reads: bool = False,
    stores: bool = False,
    moves: bool = False,
    shares: bool = False,
) -> Life:
    try:
        with pytest.MonkeyPatch.context() as patch:
            # the hash model is faster than a disk: its blocks would not be read
            patch.setattr("pdserve.engine.scheduler.scheduler.Scheduler._compute_s", lambda self, num_tokens: None)
            if seed % 10:
                # remote requests are placed although running ones will need their blocks; two that need one more for their next
                # token may fill the pool and never run, which is likely where that token needs a block and a state
                growth = int(STATE in windows_of(window))
                patch.setattr("pdserve.engine.scheduler.waiting.remote_kv_queue.GROWTH_TOKENS", growth)
            if shares:
                # some loads and lookups come too late, and one that was not answered is soon followed by others
                draw = random.Random(seed)
                patch.setattr(
                    "pdserve.engine.scheduler.read_times.ReadTimes.limit_s",
                    lambda self, num_blocks: 0.0 if draw.random() < 0.1 else 3600.0,
                )
                patch.setattr("pdserve.engine.scheduler.store_lookups.SILENT_S", 0.0)
            life = Life(make_engine, seed, window, shapes, reads=reads, stores=stores, moves=moves, shares=shares)
            life.live(num_requests)
            life.check()
    except BaseException as error:
        error.add_note(f"seed {seed}, {num_requests} requests, window {window}, shapes {shapes}")
        raise
    return life


def dismiss(harnesses: list[Harness]) -> None:
    """Close the engines of a life, so that not all lives' threads are there at the end."""
    for harness in harnesses:
        harness.core.executor.close()
    harnesses.clear()


def live_with_windows(
    make_engine: MakeEngine, harnesses: list[Harness], seeds: range, windows: Sequence[Window]
) -> None:
    """A life of 12 requests per seed, with the windows in turn."""
    num_preemptions = num_null = 0
    for seed in seeds:
        life = live(make_engine, seed, 12, window=windows[seed % len(windows)])
        for engine in (life.p, life.d):
            num_preemptions += engine.scheduler.num_preemptions
            num_null += engine.scheduler.kv.num_freed_behind_window
        dismiss(harnesses)
    assert num_null > 5 * len(seeds), "too few blocks are freed to show anything"
    assert num_preemptions > len(seeds) // 50, "too roomy to show anything"


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_i2_i3_i4_i6_i13_short_lives(make_engine: MakeEngine, harnesses: list[Harness], part: int) -> None:
    num_preemptions = num_early_kv = num_evictions = num_accepted = num_loads = num_form_drafts = 0
    for seed in range(part * 50, part * 50 + 50):
        life = live(make_engine, seed, 3 + seed % 50 // 6)
        num_preemptions += life.p.scheduler.num_preemptions + life.d.scheduler.num_preemptions
        num_early_kv += life.num_early_kv
        if (stats := life.d.scheduler.drafts.stats) is not None:
            num_accepted += stats.num_accepted_tokens
        num_loads += life.num_loads
        num_form_drafts += life.num_form_drafts
        num_evictions += sum(len(attempts) - 1 for attempts in life.pair.attempts.values())
        dismiss(harnesses)
    assert num_preemptions > 10, "too roomy to show anything"
    assert num_preemptions + num_evictions > 20, "too roomy to show anything"
    assert num_loads > 10, "too roomy to show anything"
    assert num_early_kv > 20, "grammars come too early to show anything"
    assert num_accepted > 100, "too few drafts to show anything"
    assert num_form_drafts > 20, "too few drafts of grammars to show anything"


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [
        range(3000, 3014),
        *(pytest.param(range(first, first + 60), marks=pytest.mark.slow) for first in range(4000, 4300, 60)),
    ],
    ids=lambda seeds: str(seeds.start),
)
def test_i2_i3_i4_i6_i13_lives_with_a_window(make_engine: MakeEngine, harnesses: list[Harness], seeds: range) -> None:
    live_with_windows(make_engine, harnesses, seeds, (1, 3, 4, 6, 9, 13, 20))


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [
        range(5000, 5008),
        *(pytest.param(range(first, first + 60), marks=pytest.mark.slow) for first in range(6000, 6180, 60)),
    ],
    ids=lambda seeds: str(seeds.start),
)
def test_i2_i3_i4_i6_i13_lives_with_groups(make_engine: MakeEngine, harnesses: list[Harness], seeds: range) -> None:
    windows = ((None, 5), (None, 3, 3), (9, 4), (None, 13, 4), (None, None, 7))
    live_with_windows(make_engine, harnesses, seeds, windows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [
        range(7000, 7010),
        *(pytest.param(range(first, first + 30), marks=pytest.mark.slow) for first in range(8000, 8180, 30)),
    ],
    ids=lambda seeds: str(seeds.start),
)
def test_i2_i3_i4_i6_i13_i14_lives_with_states(make_engine: MakeEngine, harnesses: list[Harness], seeds: range) -> None:
    live_with_windows(make_engine, harnesses, seeds, ((None, STATE), (STATE,), (None, 5, STATE), (9, STATE)))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(first, first + 30) for first in range(11_000, 11_120, 30)])
def test_i2_i3_i4_i6_i13_i14_lives_with_several_shapes(
    make_engine: MakeEngine, harnesses: list[Harness], seeds: range
) -> None:
    """Blocks of each come back from the tiers."""
    models: Sequence[tuple[Window, tuple[int, ...]]] = (
        ((None, STATE), (0, 1)),
        ((None, 5), (0, 1)),
        ((None, 5, STATE), (0, 1, 2)),
        ((None, Chunk(8), 7), (0, 1, 0)),
        ((None, 9, HEAD), (0, 1, 2)),
    )
    num_loaded = Counter[int]()
    for seed in seeds:
        window, shapes = models[seed % len(models)]
        life = live(make_engine, seed, 12, window=window, shapes=shapes)
        num_loaded += life.num_loaded
        dismiss(harnesses)
    assert min(num_loaded[shape] for shape in range(3)) > 5, "too roomy to show anything"


@pytest.mark.parametrize(
    "seeds",
    [
        range(12_000, 12_036),
        *(pytest.param(range(first, first + 120), marks=pytest.mark.slow) for first in range(13_000, 13_480, 120)),
    ],
    ids=lambda seeds: str(seeds.start),
)
def test_i2_i3_i4_i6_i13_i14_i15_lives_that_read_from_each_other(
    make_engine: MakeEngine, harnesses: list[Harness], seeds: range
) -> None:
    windows: Sequence[Window] = (
        None,
        None,
        6,
        (None, 5),
        (None, Chunk(8)),
        (None, STATE),
        (None, HEAD),
        None,
        (9, STATE),
    )
    num_landed = num_fetched = num_failed = 0
    for seed in seeds:
        life = live(make_engine, seed, 16, window=windows[seed % len(windows)], reads=True)
        num_landed += life.pair.fetches.num_landed
        for engine in (life.p, life.d):
            receives = engine.scheduler.receives
            num_fetched += receives.num_fetched_tokens
            num_failed += receives.num_fetch_tokens - receives.num_fetched_tokens
        dismiss(harnesses)
    assert num_landed > len(seeds) // 2, "too few blocks are read to show anything"
    assert num_fetched > 2 * len(seeds), "too few tokens are read to show anything"
    assert num_failed > 2 * len(seeds), "too few reads fail to show anything"


@pytest.mark.parametrize(
    "seeds",
    [
        range(14_000, 14_030),
        *(pytest.param(range(first, first + 120), marks=pytest.mark.slow) for first in range(15_000, 15_480, 120)),
    ],
    ids=lambda seeds: str(seeds.start),
)
def test_i2_i3_i4_i6_i13_i14_i15_i16_lives_whose_sequences_move(
    make_engine: MakeEngine, harnesses: list[Harness], seeds: range
) -> None:
    models: Sequence[tuple[Window, tuple[int, ...]]] = (
        (None, ()),
        (6, ()),
        ((None, 5), ()),
        ((None, Chunk(8)), ()),
        ((None, STATE), ()),
        ((STATE,), ()),
        ((None, HEAD), ()),
        ((9, STATE), ()),
        ((None, 5, STATE), (0, 1, 2)),
        ((None, 9, HEAD), (0, 1, 2)),
    )
    num_moved = num_resumed = 0
    for seed in seeds:
        window, shapes = models[seed % len(models)]
        life = live(make_engine, seed, 14, window=window, shapes=shapes, reads=seed % 4 == 0, moves=True)
        num_moved += life.pair.moves.num_moved
        num_resumed += life.pair.moves.num_resumed
        harnesses.clear()
    assert num_moved > 5 * len(seeds), "too few sequences move to show anything"
    assert num_resumed > len(seeds) // 2, "too few moves fail to show anything"


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [
        range(9000, 9010),
        *(pytest.param(range(first, first + 60), marks=pytest.mark.slow) for first in range(10_000, 10_180, 60)),
    ],
    ids=lambda seeds: str(seeds.start),
)
def test_i2_i3_i4_i6_i13_lives_with_chunks(make_engine: MakeEngine, harnesses: list[Harness], seeds: range) -> None:
    chunks = (
        Chunk(6),
        (None, Chunk(5)),
        (None, Chunk(8), Chunk(8)),
        (Chunk(16), Chunk(9)),
        Chunk(4),
        (None, 7, Chunk(13)),
    )
    live_with_windows(make_engine, harnesses, seeds, chunks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [
        range(9000, 9010),
        *(pytest.param(range(first, first + 60), marks=pytest.mark.slow) for first in range(10000, 10180, 60)),
    ],
    ids=lambda seeds: str(seeds.start),
)
def test_i2_i3_i4_i5_i6_i13_i14_lives_with_a_draft_head(
    make_engine: MakeEngine, harnesses: list[Harness], seeds: range
) -> None:
    windows = ((None, HEAD), (None, 5, HEAD), (None, 9, 4, HEAD))
    num_preemptions = num_read = num_accepted = 0
    for seed in seeds:
        life = live(make_engine, seed, 12, window=windows[seed % len(windows)])
        num_read += sum(head.num_read for head in life.heads)
        for engine in (life.p, life.d):
            num_preemptions += engine.scheduler.num_preemptions
            if engine.has_draft_head and (stats := engine.scheduler.drafts.stats) is not None:
                num_accepted += stats.num_accepted_tokens
        dismiss(harnesses)
    assert num_preemptions > len(seeds) // 50, "too roomy to show anything"
    assert num_read > 100 * len(seeds), "too few entries are read to show anything"
    assert num_accepted > 10 * len(seeds), "too few drafts to show anything"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "seed", [1000, 1001, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1002, 1006))]
)
def test_i2_i3_i4_i6_i13_long_lives(make_engine: MakeEngine, seed: int) -> None:
    live(make_engine, seed, 80)


STORE_MODELS: Sequence[tuple[Window, tuple[int, ...]]] = (
    (None, ()),
    (9, ()),
    ((None, STATE), (0, 1)),
    ((None, 5, STATE), (0, 1, 2)),
    ((None, Chunk(8), 7), (0, 1, 0)),
    ((None, 9, HEAD), (0, 1, 2)),
)


@pytest.mark.parametrize(
    "seeds",
    [
        range(13_000, 13_012),
        *(pytest.param(range(first, first + 30), marks=pytest.mark.slow) for first in range(14_000, 14_120, 30)),
    ],
    ids=lambda seeds: str(seeds.start),
)
def test_i2_i3_i4_i6_i13_i14_i15_lives_with_stores(
    make_engine: MakeEngine, harnesses: list[Harness], seeds: range
) -> None:
    """What a store answers is right, or it is not there."""
    num_read = num_failed = num_lost = 0
    for seed in seeds:
        window, shapes = STORE_MODELS[seed % len(STORE_MODELS)]
        life = live(make_engine, seed, 20, window, shapes, stores=True)
        for store in stores_of(life):
            num_read, num_failed = num_read + store.num_read, num_failed + store.num_failed
            num_lost += store.num_lost
        dismiss(harnesses)
    assert num_read > len(seeds), "too roomy to show anything"
    assert num_failed > len(seeds) // 4, "too few faults to show anything"
    assert num_lost > 10 * len(seeds), "too roomy to show anything"


@pytest.mark.parametrize(
    "seeds",
    [
        range(15_000, 15_012),
        *(pytest.param(range(first, first + 30), marks=pytest.mark.slow) for first in range(16_000, 16_120, 30)),
    ],
    ids=lambda seeds: str(seeds.start),
)
def test_i2_i3_i4_i6_i13_i14_i15_lives_with_a_shared_store(
    make_engine: MakeEngine, harnesses: list[Harness], seeds: range
) -> None:
    """Whatever a lookup says, what is read is right, or it is computed."""
    num_read = num_failed = num_found = 0
    for seed in seeds:
        window, shapes = STORE_MODELS[seed % len(STORE_MODELS)]
        life = live(make_engine, seed, 24, window, shapes, stores=True, shares=True)
        for store in stores_of(life):
            num_read, num_failed = num_read + store.num_read, num_failed + store.num_failed
            num_found += store.num_found
        dismiss(harnesses)
    assert num_read > len(seeds), "too roomy to show anything"
    assert num_failed > len(seeds) // 4, "too few faults to show anything"
    assert num_found > 10 * len(seeds), "too few lookups to show anything"


def stores_of(life: Life) -> list[StoreTier]:
    """The books of both engines' stores."""
    stores = [engine.scheduler.pool.store for engine in (life.p, life.d)]
    return [store for store in stores if store is not None]
