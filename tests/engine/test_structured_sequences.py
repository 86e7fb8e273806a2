"""Grammars with several sequences, and resumed ones, against a reference that knows neither grammar nor engine (I5)."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.common.errors import PeerError, TransferFailed
from pdserve.common.request.engine_types import FinishReason
from pdserve.engine.scheduler.kv_messages import HoldReturned, Landed, ReceiveInto, SourceFinished
from tests.support.engine.engine_harness import Answer, Harness, MakeEngine
from tests.support.engine.engine_pair import Pair
from tests.support.engine.hash_model import prompt_of
from tests.support.engine.late_grammars import EOS, Form, InstantCompiler, LateCompiler

COUNT = 14
EVEN, ODD, ALL = tuple(range(0, 60, 2)), tuple(range(1, 60, 2)), tuple(range(60))
FORMS = [Form(EVEN, ODD, 1, 9), Form(EVEN[:9], ALL, 4, 4), Form((7,), ODD, 2, 5)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 11}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11}


def asked(form: Form, params: dict[str, Any]) -> dict[str, Any]:
    return {"eos": (EOS,), "params": params | {"max_tokens": COUNT, "structured_outputs": form.params}}


def check(answer: Answer, expected: list[int]) -> None:
    assert answer.token_ids == expected
    assert answer.finish_reason is (FinishReason.STOP if expected[-1] == EOS else FinishReason.LENGTH)


def make_pair(make_engine: MakeEngine, seed: int | None = None) -> Pair:
    p = make_engine(grammars=InstantCompiler(), max_num_batched_tokens=5)
    return Pair(p, make_engine(grammars=InstantCompiler()), seed)


@pytest.mark.few(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [3, 4, 9])
def test_i5_each_of_n_sequences_obeys_on_its_own_in_one_engine_and_through_p_and_d(
    make_engine: MakeEngine, form: Form, length: int
) -> None:
    prompt = prompt_of(length)
    expected = [form.answer(prompt, COUNT, index=index, **SAMPLED) for index in range(5)]
    assert all(form.fits(answer) for answer in expected)
    assert len({*map(tuple, expected)}) == 5
    alone = make_engine(grammars=InstantCompiler(), max_num_batched_tokens=5)
    for answer, tokens in zip(alone.ask_many(prompt, 5, **asked(form, SAMPLED)), expected, strict=True):
        check(answer, tokens)
    for seed in (None, *range(8)):
        pair = make_pair(make_engine, seed)
        pair.add(prompt, "r", n=5, **asked(form, SAMPLED))
        pair.run()
        for index, tokens in enumerate(expected):
            check(pair.answer("r", index), tokens)


def test_i5_n_sequences_with_a_grammar_are_preempted_each_alone(make_engine: MakeEngine) -> None:
    form, prompt = FORMS[0], prompt_of(9)
    for num_blocks in (9, 11, 14):
        engine = make_engine(grammars=InstantCompiler(), num_blocks=num_blocks, max_model_len=32)
        answers = engine.ask_many(prompt, 4, **asked(form, SAMPLED))
        assert engine.scheduler.num_preemptions > 0
        for index, answer in enumerate(answers):
            check(answer, form.answer(prompt, COUNT, index=index, **SAMPLED))


@pytest.mark.parametrize("order", ["grammar first", "KV first"])
def test_n_sequences_that_are_received_wait_for_one_grammar(make_engine: MakeEngine, order: str) -> None:
    grammars = LateCompiler()
    d = make_engine(grammars=grammars)
    d.grammar_wait_s = 0.0
    pair = Pair(make_engine(grammars=InstantCompiler()), d)
    form, prompt = FORMS[0], prompt_of(9)
    pair.add(prompt, "r", n=3, **asked(form, SAMPLED))
    assert len(grammars.jobs) == 1
    if order == "grammar first":
        grammars.release()
    for _ in range(10):
        pair.round()
    assert d.scheduler.grammars.num_landed == (3 if grammars.jobs else 0)
    if grammars.jobs:
        assert not d.answers
        grammars.release()
    pair.run()
    for index in range(3):
        check(pair.answer("r", index), form.answer(prompt, COUNT, index=index, **SAMPLED))


@pytest.mark.few(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [3, 4, 9])
def test_i4_i5_a_resumed_sequence_goes_on_in_its_grammar(
    make_engine: MakeEngine, params: dict[str, Any], form: Form, length: int
) -> None:
    prompt = prompt_of(length)
    whole = form.answer(prompt, COUNT, **params)
    for cut in range(len(whole)):
        engine = make_engine(grammars=InstantCompiler(), max_num_batched_tokens=5)
        answer = engine.ask(prompt, output=whole[:cut], **asked(form, params))
        assert answer.first_position == cut
        check(answer, whole[cut:])
        if cut < COUNT - 1:  # else prefill gives the one token that is left, alone
            pair = make_pair(make_engine)
            pair.add(prompt, "r", output=whole[:cut], **asked(form, params))
            pair.run()
            assert pair.answer("r").first_position == cut
            check(pair.answer("r"), whole[cut:])


@pytest.mark.parametrize("remote", [False, True])
def test_output_that_does_not_fit_the_grammar_ends_the_request(make_engine: MakeEngine, remote: bool) -> None:
    form, prompt = FORMS[0], prompt_of(9)
    whole = form.answer(prompt, COUNT, **GREEDY)
    wrong = [*whole[:3], whole[2]]
    engine: Harness = make_engine(grammars=InstantCompiler())
    name = engine.add(prompt, output=wrong, remote_prefill=remote, **asked(form, GREEDY))
    answer = engine.run()[name]
    assert (answer.error_code, answer.token_ids) == (PeerError.code, [])
    assert "output position 3 does not fit" in answer.error_message


@pytest.mark.parametrize("wrong", [{0}, {1}, {2}, {0, 2}, {0, 1, 2}])
def test_first_tokens_that_do_not_fit_the_grammar_end_the_request(make_engine: MakeEngine, wrong: set[int]) -> None:
    """They come from another engine, one for each sequence."""
    form, prompt = FORMS[0], prompt_of(9)
    engine: Harness = make_engine(grammars=InstantCompiler())
    name = engine.add(prompt, remote_prefill=True, n=3, **asked(form, GREEDY))
    engine.step()
    (room,) = engine.outbox.take()
    assert isinstance(room, ReceiveInto)
    first_tokens = [ODD[0] if index in wrong else EVEN[index] for index in range(3)]
    engine.core.apply(Landed(name, len(room.hold)))
    engine.core.apply(SourceFinished(name, len(prompt), tuple(first_tokens)))
    engine.core.apply(HoldReturned(name, room.hold))
    answers = engine.run()
    assert set(answers) == {f"{name}/{index}" for index in range(3)}
    assert {(answer.finish_reason, answer.error_code) for answer in answers.values()} == {
        (FinishReason.ERROR, TransferFailed.code)
    }
