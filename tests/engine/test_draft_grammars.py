"""Drafts of sequences with a grammar: a mask per position, the undrafted text, and a grammar that is rolled back to it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.engine_types import FinishReason
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.engine.structured_outputs.grammar import Grammar
from pdserve.engine.structured_outputs.grammar_compiler import GrammarCompiler
from pdserve.engine.structured_outputs.grammar_matcher import GrammarMatcher, Vocabulary, compile_grammar
from pdserve.engine.structured_outputs.grammar_messages import GrammarLimits
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.engine.drafters import ScriptedDrafter, drafter_of, speculation, use_drafter
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.engine_pair import Pair
from tests.support.engine.grammar_jobs import Ask
from tests.support.engine.hesitant_grammars import HesitantCompiler, pass_time
from tests.support.engine.late_grammars import EOS, Form, InstantCompiler
from tests.support.inputs.hostile_grammars import SLOW_BRANCH, SLOW_TO_MATCH
from tests.support.run.waiting import HANG_S, wait_until

FORM = Form((1, 2, 3, 4, 9, 11), (5, 6, 7), 4, 9)
PROMPTS = [[n] * (5 + n) for n in range(4)]
VOCAB_SIZE, REAL_EOS = 320, 2
CITY = {
    "type": "object",
    "properties": {"name": {"enum": ["Lima", "Oslo"]}, "size": {"type": "integer", "minimum": 1, "maximum": 999}},
    "required": ["name", "size"],
}
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": CITY, "disable_any_whitespace": True},
    "regex": {"regex": r"[A-C]{2}-\d{3}(x|yz)?"},
    "choice": {"choice": ("yes, it is", "no", "é\U0001f600\u2028")},
    "grammar": {"grammar": 'root ::= "a" (b | "c") "!"\nb ::= [0-9] b | [0-9]'},
}


def answers_of(form: Form, prompts: Sequence[list[int]], temperature: float, n: int = 1) -> list[list[int]]:
    return [
        form.answer(prompt, 20, temperature=temperature, seed=3, index=index)
        for prompt in prompts
        for index in range(n)
    ]


def asked(form: Form, temperature: float, **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 20, "temperature": temperature, "seed": 3, "structured_outputs": form.params} | fields


def run_all(engine: Harness, temperature: float, n: int = 1) -> list[list[int]]:
    params = asked(FORM, temperature) | ({"n": n} if n > 1 else {})
    names = [engine.add(prompt, eos=(EOS,), params=params, n=n) for prompt in PROMPTS]
    engine.run()
    return [engine.answers[engine.key(name, index)].token_ids for name in names for index in range(n)]


@pytest.mark.diagonal
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
def test_i5_a_drafted_text_of_a_grammar_is_the_undrafted_one(
    make_engine: MakeEngine, right: float, temperature: float, n: int
) -> None:
    expected = answers_of(FORM, PROMPTS, temperature, n)
    engine = make_engine(grammars=InstantCompiler(), speculative_config=speculation(4))
    texts = [PROMPTS[place // n] + text for place, text in enumerate(expected)]
    use_drafter(engine, drafter_of(texts, right))
    assert run_all(engine, temperature, n) == expected
    stats = engine.scheduler.drafts.stats
    assert stats is not None
    if right == 1.0:
        # sequences of one prompt begin alike, and the drafter continues the first of them
        assert stats.num_draft_tokens * (1.0 if n == 1 else 0.8) <= stats.num_accepted_tokens > 30
    elif right == 0.0:
        # a wrong draft is cut before it is computed, unless the grammar allows it
        assert stats.num_draft_tokens < 2 * stats.num_drafts


@pytest.mark.parametrize("num_blocks", [200, 9], ids=["room", "preempted"])
@pytest.mark.parametrize("patience", [1, 2])
def test_i5_late_masks_of_drafts_change_no_token(make_engine: MakeEngine, patience: int, num_blocks: int) -> None:
    expected = answers_of(FORM, PROMPTS, 1.0)
    compiler = HesitantCompiler()
    compiler.patience = patience
    engine = make_engine(
        grammars=compiler,
        num_blocks=num_blocks,
        max_model_len=32,
        max_num_batched_tokens=16,
        speculative_config=speculation(3),
    )
    drafter = drafter_of([prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)], 0.8)
    use_drafter(engine, drafter)
    names = [engine.add(prompt, eos=(EOS,), params=asked(FORM, 1.0)) for prompt in PROMPTS]
    for _ in range(2000):
        if not engine.scheduler.requests:
            break
        engine.step()
        pass_time(engine)
    assert [engine.answers[name].token_ids for name in names] == expected
    assert (engine.scheduler.num_preemptions > 0) is (num_blocks == 9)


def test_a_draft_that_the_grammar_forbids_is_not_computed(make_engine: MakeEngine) -> None:
    [expected] = answers_of(FORM, [[1, 2, 3]], 0.0)
    engine = make_engine(grammars=InstantCompiler(), speculative_config=speculation(4))

    def follows(tokens: list[int], number: int) -> list[int]:
        """Two right tokens, and then what stands nowhere in the form."""
        return [*expected[len(tokens) - 3 :][:2], 60, 61][:number]

    use_drafter(engine, ScriptedDrafter(follows))
    assert engine.ask([1, 2, 3], eos=(EOS,), params=asked(FORM, 0.0)).token_ids == expected
    assert max(max(batch) for batch in engine.model.batches[1:]) == 3
    stats = engine.scheduler.drafts.stats
    assert stats is not None
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 8


def test_the_end_of_a_form_within_a_run_ends_the_text(make_engine: MakeEngine) -> None:
    """Without EOS tokens the grammar ends as soon as it can; what is drafted behind that is dropped."""
    form = Form((1, 2), (5, 6), 3, 3)
    expected = form.answer([1, 2, 3], 6, temperature=0.0)
    engine = make_engine(grammars=InstantCompiler(), speculative_config=speculation(5))
    use_drafter(engine, drafter_of([[1, 2, 3, *expected, 1, 5, 1, 5, 1]]))
    answer = engine.ask([1, 2, 3], params=asked(form, 0.0))
    assert (answer.token_ids, answer.finish_reason) == (expected, FinishReason.STOP)


# ---- grammars in processes of their own


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(folder, VOCAB_SIZE, GrammarLimits(token_s=HANG_S, kill_s=HANG_S, request_s=HANG_S))
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> Vocabulary:
    return Vocabulary(folder, VOCAB_SIZE)


def wait_for(grammar: Grammar, num_drafts: int = 0) -> list[int]:
    """Allowed tokens."""
    mask = grammar.allowed(time.monotonic() + HANG_S, num_drafts)
    assert mask is not None
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize("form", FORMS)
def test_masks_behind_drafts_are_those_of_the_tokens(
    compiler: GrammarCompiler, vocabulary: Vocabulary, form: str
) -> None:
    """Random walks: lists of drafts, right and wrong, of which a part is confirmed, against a matcher without any drafts."""
    params = StructuredOutputsParams(**FORMS[form])
    compiled, hosts, draw = compile_grammar(vocabulary, params), compiler.hosts, random.Random(form)
    for _ in range(12):
        reference = GrammarMatcher(compiled, (REAL_EOS,), VOCAB_SIZE)
        grammar = (ask := Ask(compiler)).grammar(ask.submit(**FORMS[form]))
        while not grammar.has_ended:
            allowed = wait_for(grammar)
            assert allowed == wait_for(reference)
            drafts, ahead = list[int](), reference.fork()
            for _ in range(draw.randint(0, 5)):
                choices = [token for token in wait_for(ahead) if token != REAL_EOS]
                if not choices:
                    break
                drafts.append(draw.choice(choices))
                assert ahead.accept(drafts[-1])
            num_right = len(drafts)
            drafts += [REAL_EOS if draw.random() < 0.5 else 0] * draw.randint(0, 2)
            if draw.random() < 0.3:
                grammar.draft([draw.choice(allowed) for _ in range(3)])  # a list that another one replaces
            grammar.draft(drafts)
            hosts.flush()
            num_seen = draw.randint(0, num_right)
            behind = reference.fork()
            for number, token in enumerate(drafts[:num_seen], 1):
                assert behind.accept(token)
                assert wait_for(grammar, number) == wait_for(behind)
            if num_seen == num_right < len(drafts) and REAL_EOS not in wait_for(behind):
                assert grammar.allowed(time.monotonic() + HANG_S, num_right + 1) is None
                assert grammar.num_drafts == num_right
            run = drafts[: draw.randint(0, num_seen)]
            for token in run:
                assert grammar.accept(token)
                assert reference.accept(token)
            token = draw.choice(wait_for(reference))
            assert grammar.accept(token)
            assert reference.accept(token)
            hosts.flush()
        grammar.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("form", FORMS)
def test_i5_processes_of_grammars_and_drafts_make_the_undrafted_text_in_one_engine_and_through_p_and_d(
    make_real_engine: Callable[..., Harness], folder: Path, compiler: GrammarCompiler, form: str
) -> None:
    prompt, params = list(range(40, 75)), StructuredOutputsParams(**FORMS[form])
    given = {"max_tokens": 60, "temperature": 1.0, "structured_outputs": params}
    plain = make_real_engine(folder, grammars=compiler)
    expected = [plain.ask(prompt, eos=(REAL_EOS,), params=given | {"seed": seed}) for seed in range(4)]
    texts = [prompt + answer.token_ids for answer in expected]
    setting = speculation(4)
    num_accepted = 0
    for right in (1.0, 0.6):
        alone = make_real_engine(folder, grammars=compiler, speculative_config=setting)
        pair = Pair(
            make_real_engine(folder, grammars=compiler),
            make_real_engine(folder, grammars=compiler, speculative_config=setting),
        )
        for engine in (alone, pair.d):
            use_drafter(engine, drafter_of(texts, right, VOCAB_SIZE))
        for seed, answer in enumerate(expected):
            found = alone.ask(prompt, eos=(REAL_EOS,), params=given | {"seed": seed})
            assert (found.token_ids, found.finish_reason) == (answer.token_ids, answer.finish_reason)
            pair.add(prompt, f"r{seed}", eos=(REAL_EOS,), params=given | {"seed": seed})
            pair.run()
            assert pair.answer(f"r{seed}").token_ids == answer.token_ids
        for engine in (alone, pair.d):
            assert engine.scheduler.drafts.stats is not None
            num_accepted += engine.scheduler.drafts.stats.num_accepted_tokens
    assert num_accepted > 10


@pytest.mark.slow
def test_drafts_cost_a_slow_grammar_no_more_than_its_tokens_may(folder: Path) -> None:
    """Tokens count, drafts end; a request is refused for its tokens alone."""
    limits = GrammarLimits(token_s=HANG_S, kill_s=HANG_S, request_s=0.05, per_token_s=0.0)
    compiler = GrammarCompiler(folder, VOCAB_SIZE, limits)
    try:
        ask = Ask(compiler)
        [letter] = Tokenizer.from_folder(folder).encode("a", add_special_tokens=False)
        grammar = ask.grammar(ask.submit(**SLOW_TO_MATCH["nested stars"]))
        refused_after = 0
        while refused_after < 500:
            refused_after += 1
            grammar._num_patient = 0  # type: ignore[attr-defined]
            grammar.draft([letter] * 40)
            compiler.hosts.flush()
            number = next((n for n in range(1, 41) if grammar.allowed(time.monotonic() + HANG_S, n) is None), 41)
            if number == 1:
                break
        assert refused_after < 500, "drafts never ended"
        assert grammar.failure is None
        assert grammar.accept(letter)
        compiler.hosts.flush()
        assert wait_for(grammar)
        while grammar.failure is None:
            assert grammar.accept(letter)
            compiler.hosts.flush()
            grammar.allowed(time.monotonic() + HANG_S)
        assert isinstance(grammar.failure, InvalidRequest)
        grammar.close()
    finally:
        compiler.close()


@pytest.fixture
def killing(folder: Path) -> Iterator[GrammarCompiler]:
    """Kills a process for a slow token, and ends no request before that."""
    limits = GrammarLimits(compile_s=HANG_S, token_s=HANG_S, kill_s=0.1, request_s=HANG_S)
    compiler = GrammarCompiler(folder, VOCAB_SIZE, limits)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def letters(folder: Path) -> list[int]:
    """The tokens `a`, `b` and `c`."""
    tokenizer = Tokenizer.from_folder(folder)
    return [token for letter in "abc" for token in tokenizer.encode(letter, add_special_tokens=False)]


def wait_again(compiler: GrammarCompiler, grammar: Grammar) -> list[int]:
    """Allowed tokens, from another process if need be."""
    deadline = time.monotonic() + HANG_S
    while grammar.allowed(0.0) is None and grammar.failure is None:
        assert time.monotonic() < deadline
        compiler.hosts.flush()
        compiler.hosts.wait(0.02)
        compiler.hosts.receive()
    assert grammar.failure is None
    return wait_for(grammar)


@pytest.mark.slow
def test_a_draft_that_kills_the_process_of_its_grammar_ends_no_sequence(
    killing: GrammarCompiler, letters: list[int]
) -> None:
    a, b, c = letters
    grammar, mate = (ask := Ask(killing)).grammar(ask.submit(**SLOW_BRANCH)), ask.grammar(ask.submit(**SLOW_BRANCH))
    for each in (grammar, mate):
        assert each.accept(c)
    killing.hosts.flush()
    assert wait_for(grammar) == wait_for(mate) == [a, b]
    grammar.draft([a] * 12)
    killing.hosts.flush()
    assert grammar.allowed(time.monotonic() + HANG_S, 12) is None
    assert grammar.is_lost, "no draft was slow"  # type: ignore[attr-defined]
    forked = grammar.fork()
    for each in (grammar, mate, forked):
        assert each.accept(b)
        assert not each.accept(b), "its mask is not known"
        assert wait_again(killing, each) == [REAL_EOS, a, b, c]
        each.draft([a, a])
        assert each.num_drafts == 0, "a grammar that a draft has killed has drafts again"
        for token in (c, a, REAL_EOS):
            assert token in wait_again(killing, each)
            assert each.accept(token)
            killing.hosts.flush()
        assert each.has_ended
        each.close()
    # an undrafted text that takes the slow branch is refused
    slow = ask.grammar(ask.submit(**SLOW_BRANCH))
    for token in (c, *[a] * 12):
        if slow.accept(token):
            killing.hosts.flush()
            slow.allowed(time.monotonic() + HANG_S)
    assert isinstance(slow.failure, InvalidRequest)
    slow.close()


@pytest.mark.slow
def test_a_sequence_whose_draft_has_killed_its_process_may_end_before_it_has_another(
    killing: GrammarCompiler, letters: list[int]
) -> None:
    a, b, c = letters
    grammar = (ask := Ask(killing)).grammar(ask.submit(**SLOW_BRANCH))
    assert grammar.accept(c)
    killing.hosts.flush()
    assert wait_for(grammar)
    grammar.draft([a] * 12)
    killing.hosts.flush()
    assert grammar.allowed(time.monotonic() + HANG_S, 12) is None
    assert grammar.accept(b)
    grammar.close()
    later = ask.grammar(ask.submit(output=(c, b, a), **SLOW_BRANCH))
    assert wait_again(killing, later) == [REAL_EOS, a, b, c]
    later.close()
    killing.hosts.flush()
    killing.hosts.receive()
    wait_until(lambda: not killing.hosts._opening, "a sequence that has ended is still opened")


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_i5_drafts_that_are_slow_to_match_change_no_text(
    make_real_engine: Callable[..., Harness], folder: Path, killing: GrammarCompiler, letters: list[int], n: int
) -> None:
    a, b, _ = letters
    params = {
        "max_tokens": 20, "temperature": 1.0, "seed": 5, "n": n, "logit_bias": {a: -100.0, b: 2.0},
        "structured_outputs": StructuredOutputsParams(**SLOW_BRANCH),
    }  # fmt: skip
    prompt = list(range(40, 75))
    undrafted = make_real_engine(folder, grammars=killing).ask_many(prompt, n, eos=(REAL_EOS,), params=params)
    assert not any(answer.error_code for answer in undrafted)
    engine = make_real_engine(folder, grammars=killing, speculative_config=speculation(12))
    drafter = use_drafter(engine, ScriptedDrafter(lambda tokens, number: [a] * number))
    drafted = engine.ask_many(prompt, n, eos=(REAL_EOS,), params=params)
    assert [(one.token_ids, one.finish_reason) for one in drafted] == [
        (one.token_ids, one.finish_reason) for one in undrafted
    ]
    assert drafter.num_drafts > 0
