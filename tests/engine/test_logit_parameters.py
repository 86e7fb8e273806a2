"""Parameters that change logits: each alone and together, in one engine, through P and D, and under preemption.

The reference is a loop over the hash model without any engine; `transformers`' processors are the oracle where it has
one, and OpenAI's formula is where it has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import NoBadWordsLogitsProcessor

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.engine_types import FinishReason
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.engine.sampling.penalties import PenaltyTable
from pdserve.engine.sampling.placed_arrays import PlacedArrays
from pdserve.engine.sampling.token_mask import BadWords
from tests.support.engine.engine_harness import PIECES, MakeEngine
from tests.support.engine.engine_pair import Pair
from tests.support.engine.hash_model import VOCAB_SIZE, greedy_answer, next_logits
from tests.support.models.logit_reference import NO_SUCH_TOKEN, processed

PROMPT = [5, 9, 5, 31, 40, 2, 17, 5, 22, 60, 31, 8, 1]
COUNT = 24
PLAIN = greedy_answer(PROMPT, COUNT)


def reference(params: dict[str, Any], prompt: Sequence[int] = PROMPT) -> list[int]:
    output: list[int] = []
    rules = params | {"forbidden_after": lambda tokens: completing(tokens, params.get("bad_words", ()))}
    for _ in range(COUNT):
        logits = torch.from_numpy(next_logits([*prompt, *output]))
        output.append(int(processed(prompt, output, logits, rules).argmax()))
    return output


def completing(output: Sequence[int], words: Sequence[str]) -> list[int]:
    """Tokens after which the output's text has one of the words."""
    before = b"".join(PIECES[token] for token in output)
    return [
        token for token, piece in enumerate(PIECES) if any(word.strip().encode() in before + piece for word in words)
    ]


CASES: list[dict[str, Any]] = [
    {"presence_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -0.3},
    {"repetition_penalty": 2.5},
    {"repetition_penalty": 0.6},
    {"logit_bias": {PLAIN[0]: -100.0, 7: 0.4, 33: 0.3}},
    {"allowed_token_ids": (3, 11, 12, 40, 52)},
    {"bad_words_token_ids": ((PLAIN[0],), (PLAIN[3],))},
    {"bad_words_token_ids": ((PLAIN[0], PLAIN[1]), (PLAIN[2], PLAIN[3], PLAIN[4]), (PLAIN[9], PLAIN[10]))},
    {"bad_words": (" ab", "ca")},
    {"bad_words": ("bca", "aab", "bbb", "cc")},
    {"min_tokens": 5, "stop_token_ids": tuple(PLAIN[:3])},
    {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.3,
        "logit_bias": {PLAIN[1]: -3.0, 8: 1.0},
        "allowed_token_ids": tuple(range(0, 64, 2)) + tuple(PLAIN[:6]),
        "bad_words": ("abab", "bc"),
        "bad_words_token_ids": ((PLAIN[0],), (8, 10)),
    },
]
EACH = pytest.mark.parametrize("params", CASES, ids=lambda params: "+".join(params))


def ended(tokens: list[int], params: dict[str, Any]) -> list[int]:
    """Cut at the stop token, as an engine does."""
    stops = params.get("stop_token_ids", ())
    first = params.get("min_tokens", 0)
    place = next((i for i, token in enumerate(tokens) if token in stops and i + 1 >= first), None)
    return tokens if place is None else tokens[: place + 1]


@pytest.mark.few(13)
@EACH
def test_one_engine_gives_the_references_tokens(make_engine: MakeEngine, params: dict[str, Any]) -> None:
    expected = ended(reference(params), params)
    assert expected != PLAIN, "a parameter that changes nothing proves nothing"
    answer = make_engine(max_num_batched_tokens=5).ask(PROMPT, params=params | {"max_tokens": COUNT})
    assert answer.token_ids == expected


@pytest.mark.few(4)
@EACH
def test_i1_the_way_through_p_and_d_changes_nothing(make_engine: MakeEngine, params: dict[str, Any]) -> None:
    pair = Pair(make_engine(max_num_batched_tokens=7), make_engine())
    pair.add(PROMPT, "greedy", params=params | {"max_tokens": COUNT})
    sampled = params | {"max_tokens": COUNT, "temperature": 0.8, "seed": 4, "top_p": 0.9}
    pair.add(PROMPT, "sampled", params=sampled)
    pair.run()
    assert pair.answer("greedy").token_ids == ended(reference(params), params)
    assert pair.answer("sampled").token_ids == make_engine().ask(PROMPT, params=sampled).token_ids


@pytest.mark.few(2)
@EACH
def test_i5_preemption_and_batch_mates_change_nothing(make_engine: MakeEngine, params: dict[str, Any]) -> None:
    greedy = params | {"max_tokens": COUNT}
    sampled = greedy | {"temperature": 0.8, "seed": 4}
    alone = [make_engine().ask(PROMPT, params=given).token_ids for given in (greedy, sampled)]
    engine = make_engine(num_blocks=14, max_model_len=56, max_num_batched_tokens=20)
    ids = [engine.add(PROMPT, params=given) for given in (greedy, sampled)]
    mates = [engine.add([n] * 9, params={"max_tokens": 20}) for n in range(3)]
    answers = engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert [answers[request_id].token_ids for request_id in ids] == alone
    for n, mate in enumerate(mates):
        assert answers[mate].token_ids == greedy_answer([n] * 9, 20)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(6))
def test_i1_delays_and_small_pools_change_nothing(
    make_engine: MakeEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # remote requests are placed although running ones will need their blocks
    monkeypatch.setattr("pdserve.engine.scheduler.waiting.remote_kv_queue.GROWTH_TOKENS", 0)
    p = make_engine(num_blocks=24, max_model_len=64, max_num_batched_tokens=11)
    d = make_engine(num_blocks=30, max_model_len=64, max_num_batched_tokens=40)
    pair = Pair(p, d, seed=seed)
    for number, params in enumerate(CASES):
        pair.add(PROMPT, f"r{number}", params=params | {"max_tokens": COUNT})
        pair.round()
    pair.run()
    for number, params in enumerate(CASES):
        assert pair.answer(f"r{number}").token_ids == ended(reference(params), params), params
    assert p.scheduler.num_preemptions + d.scheduler.num_preemptions > 0


def test_a_row_that_was_used_leaves_nothing_to_the_next(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    for params in (*CASES, {}):
        expected = ended(reference(params), params)
        assert engine.ask(PROMPT, params=params | {"max_tokens": COUNT}).token_ids == expected


def test_penalties_count_output_and_only_repetition_counts_the_prompt(make_engine: MakeEngine) -> None:
    biased = {"logit_bias": {PROMPT[0]: 50.0}, "max_tokens": 3}
    favourite = [PROMPT[0]] * 3
    assert make_engine().ask(PROMPT, params=biased).token_ids == favourite
    presence = make_engine().ask(PROMPT, params=biased | {"presence_penalty": 2.0, "frequency_penalty": 2.0})
    assert presence.token_ids == favourite
    assert make_engine().ask(PROMPT, params=biased | {"repetition_penalty": 50.0}).token_ids[0] != PROMPT[0]


@pytest.mark.parametrize("repetition", [5e-324, 1e-320, 1e-30, 1e30, 1e308])
@pytest.mark.parametrize("allowed", [None, (3, 11, 12, 40, 52)])
def test_a_repetition_penalty_that_float32_lacks_is_still_a_number(
    make_engine: MakeEngine, repetition: float, allowed: tuple[int, ...] | None
) -> None:
    params = {"max_tokens": COUNT, "repetition_penalty": repetition, "allowed_token_ids": allowed, "temperature": 0.7}
    answer = make_engine().ask(PROMPT, params=params | {"seed": 1})
    assert (answer.finish_reason, answer.error_message) == (FinishReason.LENGTH, "")
    assert len(answer.token_ids) == COUNT


@pytest.mark.few(3)
@pytest.mark.diagonal
@pytest.mark.parametrize("others", [{}, {"top_k": 5}, {"min_p": 1e-60}], ids=["only top_p", "top_k", "min_p"])
@pytest.mark.parametrize("top_p", [5e-324, 1e-60, 7e-46, 1e-45, 1e-38])
def test_a_top_p_that_float32_lacks_keeps_one_token(
    make_engine: MakeEngine, top_p: float, others: dict[str, float]
) -> None:
    """In batches whose rows have different highest logits: a row without any token took another row's."""
    engine, params = make_engine(), {"max_tokens": COUNT, "temperature": 1.0, "top_p": top_p, **others}
    prompts = [PROMPT[start:] for start in range(4)]
    greedy = [make_engine().ask(prompt, params={"max_tokens": COUNT}).token_ids for prompt in prompts]
    asked = [engine.add(prompt, params=params | {"seed": place}) for place, prompt in enumerate(prompts)]
    answers = engine.run()
    assert [answers[request_id].token_ids for request_id in asked] == greedy


@pytest.mark.parametrize("repetition", [0.5, 1.0, 1.7])
def test_penalties_of_many_rows_are_the_oracles(repetition: float) -> None:
    random = np.random.default_rng(8)
    table = PenaltyTable(20)
    token_ids = random.integers(0, 12, (20, 40))
    num_prompt = random.integers(1, 9, 20)
    num_tokens = num_prompt + random.integers(0, 30, 20)
    asked: dict[int, dict[str, Any]] = {}
    for row in (3, 0, 11, 7, 19):
        asked[row] = {
            "repetition_penalty": repetition,
            "frequency_penalty": float(random.uniform(-2, 2)),
            "presence_penalty": float(random.uniform(-2, 2)),
        }
        table.set(row, SamplingParams(**asked[row]))
    table.set(11, SamplingParams())
    rows = [19, 5, 3, 7, 11, 0]
    before = torch.from_numpy(random.normal(size=(len(rows), VOCAB_SIZE)).astype(np.float32) * 3)
    after = before.clone()
    penalties = table.of_step(np.array(rows), num_tokens[rows], token_ids, num_prompt)
    assert penalties is not None
    penalties.apply(after, PlacedArrays().copy_to(penalties.arrays(), after.device))
    for place, row in enumerate(rows):
        if row in (5, 11):
            assert torch.equal(after[place], before[place])
        else:
            tokens = token_ids[row, : num_tokens[row]].tolist()
            prompt, output = tokens[: num_prompt[row]], tokens[num_prompt[row] :]
            torch.testing.assert_close(after[place], processed(prompt, output, before[place], asked[row]))
    assert table.of_step(np.array([5, 11]), num_tokens[[5, 11]], token_ids, num_prompt) is None


def test_bad_words_are_the_oracles() -> None:
    random = np.random.default_rng(5)
    for _ in range(200):
        words = [random.integers(0, 4, random.integers(1, 5)).tolist() for _ in range(random.integers(1, 6))]
        output = random.integers(0, 4, random.integers(0, 8))
        oracle = NoBadWordsLogitsProcessor([*words, [5]])(torch.tensor([[NO_SUCH_TOKEN, *output]]), torch.zeros(1, 6))
        ours = BadWords([*words, [5]]).forbidden_after(output)
        assert set(ours.tolist()) == set(torch.nonzero(oracle[0] == -torch.inf).flatten().tolist())


NOTHING_LEFT: list[tuple[dict[str, Any], str, int]] = [
    ({"allowed_token_ids": (4,), "bad_words_token_ids": ((4,),)}, "allowed_token_ids, bad_words", 0),
    ({"allowed_token_ids": (4,), "bad_words_token_ids": ((4, 4, 4),)}, "allowed_token_ids, bad_words", 2),
    ({"allowed_token_ids": (4,), "stop_token_ids": (4,), "min_tokens": 2}, "allowed_token_ids, min_tokens", 0),
]


@pytest.mark.parametrize(("params", "names", "position"), NOTHING_LEFT)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_that_leave_no_token_end_their_request_alone(
    make_engine: MakeEngine, params: dict[str, Any], names: str, position: int, temperature: float
) -> None:
    engine = make_engine()
    mate = engine.add(PROMPT, params={"max_tokens": COUNT})
    # a repetition penalty must not carry the missing token on
    given = params | {"max_tokens": COUNT, "temperature": temperature, "repetition_penalty": 1.5}
    answer = engine.ask(PROMPT, params=given)
    assert (answer.finish_reason, answer.error_code) == (FinishReason.ERROR, InvalidRequest.code)
    assert answer.error_message == f"{names} leave no token for output position {position}"
    assert len(answer.token_ids) == position
    assert engine.answers[mate].token_ids == PLAIN
    if position == 0:  # at the source of a transfer
        assert make_engine().ask(PROMPT, params=given, transfer_source=True).error_code == InvalidRequest.code
