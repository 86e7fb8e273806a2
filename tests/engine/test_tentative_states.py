"""Sequences with states, and tokens that do not stand: wrong drafts, late masks, turns that end within a step or before it.

The hash model asserts that a state is that of the tokens before the step, and every text shows which tokens a state has seen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.request.engine_types import FinishReason
from tests.support.engine.drafters import drafter_of, greedy_drafter, speculation, use_drafter
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.engine_invariants import CacheContents
from tests.support.engine.engine_pair import Pair
from tests.support.engine.hash_model import STATE, Window, greedy_answer, prompt_of, sampled_answer
from tests.support.engine.hesitant_grammars import HesitantCompiler, pass_time
from tests.support.engine.late_grammars import EOS, Form, InstantCompiler
from tests.support.models.checkpoints import VOCAB_SIZE as REAL_VOCAB_SIZE
from tests.support.models.family_checkpoints import cases, make_family
from tests.support.models.offline_texts import PROMPTS as REAL_PROMPTS
from tests.support.models.oracle import Oracle

WINDOWS: tuple[Window, ...] = ((None, STATE), (None, 5, STATE))
FORM = Form((1, 2, 3, 4), (5, 6, 7), 4, 9)
PROMPTS = {f"r{length}": prompt_of(length) for length in (1, 4, 9, 17, 22)}
SEEDED = {"temperature": 1.0, "seed": 3}


def checked(engine: Harness, texts: list[list[int]]) -> Harness:
    """After each step, every block that the prefix cache has holds what its hash says. texts: with their prompts."""
    contents, step = CacheContents(engine), engine.step
    for text in texts:
        contents.learn(text)

    def checked_step() -> None:
        step()
        contents.check(engine)

    engine.step = checked_step  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_state_is_that_of_the_accepted_tokens(
    make_engine: MakeEngine, window: Window, right: float, enable_prefix_caching: bool
) -> None:
    answers = {name: greedy_answer(prompt, 30, window) for name, prompt in PROMPTS.items()}
    engine = make_engine(
        sliding_window=window,
        speculative_config=speculation(6),
        enable_prefix_caching=enable_prefix_caching,
        num_blocks=256,
    )
    checked(engine, [PROMPTS[name] + answer for name, answer in answers.items()])
    use_drafter(engine, greedy_drafter(right, window=window))
    for _ in range(2):
        for name, prompt in PROMPTS.items():
            engine.answers.pop(name, None)
            engine.add(prompt, name, params={"max_tokens": 30})
            engine.step()
        engine.run()
        assert {name: engine.answers[name].token_ids for name in PROMPTS} == answers
    stats = engine.scheduler.drafts.stats
    assert stats is not None
    assert (stats.num_accepted_tokens > 100) is (right > 0)
    assert (stats.num_accepted_tokens < stats.num_draft_tokens) is (right < 1)


def test_a_run_ends_with_the_block_of_its_first_token(make_engine: MakeEngine) -> None:
    """So every full block of a text has a state in the cache, as without drafts, and drafts need no block."""
    window: Window = (None, STATE)
    engine = make_engine(sliding_window=window, speculative_config=speculation(6))
    use_drafter(engine, greedy_drafter(window=window))
    answer = engine.ask(PROMPTS["r4"], params={"max_tokens": 29})
    assert answer.token_ids == greedy_answer(PROMPTS["r4"], 29, window)
    # 28 tokens after the prompt of one block, in blocks of 4
    assert len(engine.model.batches) == 1 + 7
    for length in range(8, 33, 4):
        text = [*PROMPTS["r4"], *answer.token_ids][:length]
        again = engine.ask([*text, 50, 51], params={"max_tokens": 1})
        assert again.num_cached_tokens == length


@pytest.mark.parametrize(("window", "num_blocks"), [(WINDOWS[0], 18), (WINDOWS[1], 18)])
def test_a_preempted_sequence_goes_on_with_drafts(make_engine: MakeEngine, window: Window, num_blocks: int) -> None:
    engine = make_engine(
        sliding_window=window,
        speculative_config=speculation(4),
        num_blocks=num_blocks,
        max_model_len=36,
        max_num_batched_tokens=8,
    )
    use_drafter(engine, greedy_drafter(0.8, window=window))
    names = [engine.add([n] * 9, params={"max_tokens": 24}) for n in range(3)]
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    for n, name in enumerate(names):
        assert engine.answers[name].token_ids == greedy_answer([n] * 9, 24, window)


def test_i2_drafts_preempt_nobody(make_engine: MakeEngine) -> None:
    """The pool has the blocks that the sequences need without drafts, and no more."""
    window: Window = (None, STATE)
    # four blocks of keys and two of states for each of three sequences of 16 tokens
    for right in (1.0, 0.5, 0.0):
        engine = make_engine(
            sliding_window=window, speculative_config=speculation(8), num_blocks=18, max_model_len=16, max_num_seqs=3
        )
        use_drafter(engine, greedy_drafter(right, window=window))
        names = [engine.add([n, 2, 3], params={"max_tokens": 13}) for n in range(3)]
        engine.run()
        for n, name in enumerate(names):
            assert engine.answers[name].token_ids == greedy_answer([n, 2, 3], 13, window)
        assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("right", [1.0, 0.6])
def test_sequences_of_one_prompt_have_drafts_of_their_own(make_engine: MakeEngine, right: float) -> None:
    window: Window = (None, STATE)
    for prompt in PROMPTS.values():
        expected = [sampled_answer(prompt, 16, seed=3, index=index, window=window) for index in range(3)]
        engine = make_engine(sliding_window=window, speculative_config=speculation(3))
        use_drafter(engine, drafter_of([prompt + text for text in expected], right))
        answers = engine.ask_many(prompt, 3, params=SEEDED | {"max_tokens": 16})
        assert [answer.token_ids for answer in answers] == expected


@pytest.mark.parametrize("right", [1.0, 0.7])
def test_i1_texts_through_p_and_d(make_engine: MakeEngine, right: float) -> None:
    window: Window = (None, STATE)
    p = make_engine(sliding_window=window, max_num_batched_tokens=8)
    d = make_engine(sliding_window=window, speculative_config=speculation(3))
    use_drafter(d, greedy_drafter(right, window=window))
    pair = Pair(p, d)
    for name, prompt in PROMPTS.items():
        pair.add(prompt, name, params={"max_tokens": 20})
    pair.run()
    for name, prompt in PROMPTS.items():
        assert pair.answer(name).token_ids == greedy_answer(prompt, 20, window)


@pytest.mark.parametrize("options", [{"block_size": 4, "max_num_batched_tokens": 17}, {"num_blocks": 13}])
@pytest.mark.parametrize(
    "family",
    [
        "lfm2",
        "qwen3_next",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("granitemoehybrid", "bamba", "qwen3_5_text")),
    ],
)
def test_drafted_texts_of_each_rule(
    tmp_path: Path, make_real_engine: Callable[..., Harness], family: str, options: dict[str, Any]
) -> None:
    """Against transformers, with right and wrong drafts, in batches with chunks of prompts, twice, so that prompts are found in the
    cache. With few blocks sequences are preempted."""
    make_family(tmp_path, family, cases(family)[0])
    oracle = Oracle(tmp_path)
    texts = [[*prompt, *oracle.greedy(prompt, 20)] for prompt in REAL_PROMPTS]
    for right in (1.0, 0.6):
        fields = {"num_blocks": 128, "max_model_len": 112, "max_num_seqs": 4, "hybrid_kv_cache": True, **options}
        engine = make_real_engine(tmp_path, speculative_config=speculation(4), **fields)
        use_drafter(engine, drafter_of(texts, right, REAL_VOCAB_SIZE))
        for _ in range(2):
            names = [engine.add(prompt, params={"max_tokens": 20}) for prompt in REAL_PROMPTS]
            engine.run()
            for name, prompt in zip(names, REAL_PROMPTS, strict=True):
                oracle.check(prompt, engine.answers[name].token_ids)
        stats = engine.scheduler.drafts.stats
        assert stats is not None
        assert stats.num_accepted_tokens > 40
        assert right == 1.0 or stats.num_accepted_tokens < 0.9 * stats.num_draft_tokens
        assert ("block_size" in options) != (engine.scheduler.num_preemptions > 0)


# ---- grammars


def asked(temperature: float = 1.0) -> dict[str, Any]:
    return {"temperature": temperature, "seed": 3, "max_tokens": 18, "structured_outputs": FORM.params}


@pytest.mark.parametrize("num_blocks", [200, 14], ids=["room", "preempted"])
@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_i5_a_late_mask_changes_no_token(
    make_engine: MakeEngine, patience: int, num_blocks: int, num_drafts: int, enable_prefix_caching: bool
) -> None:
    """Also of the first token, after prompts that end anywhere in a block."""
    window: Window = (None, STATE)
    compiler = HesitantCompiler()
    compiler.patience = patience
    expected = {
        name: FORM.answer(prompt, 18, temperature=1.0, seed=3, window=window) for name, prompt in PROMPTS.items()
    }
    engine = make_engine(
        sliding_window=window,
        grammars=compiler,
        num_blocks=num_blocks,
        max_model_len=40,
        max_num_batched_tokens=16,
        enable_prefix_caching=enable_prefix_caching,
        speculative_config=speculation(num_drafts) if num_drafts else None,
    )
    if num_drafts:
        use_drafter(engine, drafter_of([PROMPTS[name] + text for name, text in expected.items()], 0.8))
    for name, prompt in PROMPTS.items():
        engine.add(prompt, name, eos=(EOS,), params=asked())
    plain = engine.add([9] * 8, params={"max_tokens": 12})
    for _ in range(2000):
        if not engine.scheduler.requests:
            break
        engine.step()
        pass_time(engine)
    assert {name: engine.answers[name].token_ids for name in PROMPTS} == expected
    assert engine.answers[plain].token_ids == greedy_answer([9] * 8, 12, window)
    assert (engine.scheduler.num_preemptions > 0) is (num_blocks == 14)


@pytest.mark.parametrize("right", [1.0, 0.7])
def test_i5_a_drafted_text_of_a_grammar_is_the_undrafted_one(make_engine: MakeEngine, right: float) -> None:
    window: Window = (None, STATE)
    expected = [
        FORM.answer(prompt, 18, temperature=1.0, seed=3, index=index, window=window)
        for prompt in PROMPTS.values()
        for index in range(2)
    ]
    prompts = [prompt for prompt in PROMPTS.values() for _ in range(2)]
    engine = make_engine(sliding_window=window, grammars=InstantCompiler(), speculative_config=speculation(3))
    use_drafter(engine, drafter_of([prompt + text for prompt, text in zip(prompts, expected, strict=True)], right))
    for name, prompt in PROMPTS.items():
        engine.add(prompt, name, eos=(EOS,), params=asked(), n=2)
    answers = engine.run()
    found = [answers[engine.key(name, index)].token_ids for name in PROMPTS for index in range(2)]
    assert found == expected


# ---- sessions


@pytest.mark.parametrize("place", range(7))
def test_a_turn_that_ends_within_a_run(make_engine: MakeEngine, place: int) -> None:
    """What the drafts after its stop token did to the state is undone."""
    window: Window = (None, STATE)
    first = greedy_answer([1, 2, 3], 20, window)
    engine = make_engine(sliding_window=window, speculative_config=speculation(6))
    use_drafter(engine, greedy_drafter(window=window))
    name = engine.add([1, 2, 3], resumable=True, params={"max_tokens": 20, "stop_token_ids": (first[place],)})
    engine.run()
    [turn] = engine.turns[name]
    said = first[: first.index(first[place]) + 1]
    assert (turn.token_ids, turn.finish_reason) == (said, FinishReason.STOP)
    engine.resume(name, [7, 8], max_tokens=9)
    engine.run()
    assert engine.turns[name][1].token_ids == greedy_answer([1, 2, 3, *said, 7, 8], 9, window)
    engine.core.abort_request(name)


@pytest.mark.parametrize("is_stopped_outside", [False, True])
@pytest.mark.parametrize("place", [2, 5, 6])
def test_a_turn_that_ends_after_the_next_step_was_launched(
    make_engine: MakeEngine, place: int, is_stopped_outside: bool
) -> None:
    """The step ahead computes the turn's last token, which counts as not computed."""
    window: Window = (None, STATE)
    first = greedy_answer([1, 2, 3], 20, window)
    said = first[: first.index(first[place]) + 1]
    stops = () if is_stopped_outside else (first[place],)
    engine = make_engine(sliding_window=window, async_scheduling=True)
    name = engine.add([1, 2, 3], resumable=True, params={"max_tokens": 20, "stop_token_ids": stops})
    if is_stopped_outside:
        while name not in engine.answers or len(engine.answers[name].token_ids) < len(said):
            engine.step()
        engine.core.scheduler.end_sequence(name, 0, 0)
    engine.run()
    [turn] = engine.turns[name]
    assert turn.token_ids == said
    engine.resume(name, [7, 8], max_tokens=9)
    engine.run()
    assert engine.turns[name][1].token_ids == greedy_answer([1, 2, 3, *said, 7, 8], 9, window)
    engine.core.abort_request(name)
