"""Prompts that are made of traces, and traces of other lengths."""

from __future__ import annotations

import math
import random

import pytest

from pdserve.cli.bench.traces import trace_text
from pdserve.cli.bench.traces.trace import TraceRequest, TraceSession
from pdserve.cli.bench.traces.trace_text import Said, TraceText, TraceTexts
from pdserve.common.errors import ConfigError

BLOCK = 4


def draw_tokens(draw: random.Random, num: int) -> list[int]:
    return draw.choices(range(1000, 2000), k=num)


def request(name: str, num_tokens: int, *hash_ids: int, output: int = 3) -> TraceRequest:
    return TraceRequest(name, num_tokens, output, hash_ids)


def text_of(seed: int = 0) -> TraceText:
    return TraceText(seed, BLOCK, draw_tokens)


# ---- texts


def test_equal_hash_ids_are_equal_tokens_and_other_seeds_other_ones() -> None:
    text = text_of()
    first, second = text.prompt(request("a", 10, 1, 2)), text.prompt(request("b", 13, 1, 2, 3))
    assert (len(first), len(second)) == (10, 13)
    assert first[:8] == second[:8]
    assert first[8:] != second[8:10]
    assert text.prompt(request("a", 10, 1, 2)) == first
    assert text_of().prompt(request("a", 10, 1, 2)) == first
    assert text_of(1).prompt(request("a", 10, 1, 2)) != first


def test_a_prompt_that_continues_another_has_its_end_and_its_answer() -> None:
    text = text_of()
    last = request("a", 10, 1, 2)
    said = [*text.prompt(last), 7, 8, 9]
    after = text.prompt(request("b", 18, 1, 2, 3, 4), Said(last, said))
    assert after[:13] == said
    assert len(after) == 18
    assert all(token >= 1000 for token in after[13:])
    # what an id stands for is fixed by then, for whoever has it
    assert text.prompt(request("c", 17, 1, 2, 3, 4)) == after[:17][:16] + text.prompt(request("c", 17, 1, 2, 3, 4))[16:]
    assert text.prompt(request("d", 16, 1, 2, 3, 4)) == after[:16]


def test_an_answer_may_end_in_the_part_without_an_id() -> None:
    text = text_of()
    last = request("a", 8, 1, 2)
    said = [*text.prompt(last), 7, 8, 9]
    assert text.prompt(request("b", 11, 1, 2), Said(last, said)) == said
    assert text.prompt(request("b", 10, 1, 2), Said(last, said)) == said[:10]


@pytest.mark.parametrize("edited", [request("b", 18, 1, 5, 3, 4), request("b", 9, 1, 2)])
def test_an_edited_prompt_has_nothing_that_was_said(edited: TraceRequest) -> None:
    text = text_of()
    last = request("a", 10, 1, 2)
    said = [*text.prompt(last), 7, 8, 9]
    prompt = text.prompt(edited, Said(last, said))
    assert len(prompt) == edited.input_tokens
    assert prompt[:4] == said[:4]
    assert not {7, 8, 9} & set(prompt)


def test_a_block_that_another_prompt_had_before_stays_what_it_was() -> None:
    text = text_of()
    other = text.prompt(request("other", 12, 1, 2, 3))
    last = request("a", 8, 1, 2)
    said = [*text.prompt(last), 7, 8, 9]
    assert text.prompt(request("b", 12, 1, 2, 3), Said(last, said)) == other


def test_prompts_without_hash_ids_share_nothing() -> None:
    text = text_of()
    assert text.prompt(request("a", 20)) != text.prompt(request("b", 20))


def test_no_more_is_drawn_than_a_prompt_needs() -> None:
    drawn: list[int] = []

    def draw(random_numbers: random.Random, num: int) -> list[int]:
        drawn.append(num)
        return draw_tokens(random_numbers, num)

    assert len(TraceText(0, BLOCK, draw).prompt(request("a", 6, *range(1000)))) == 6
    assert drawn == [BLOCK, BLOCK]


def test_what_is_prepared_is_what_would_be_drawn_later() -> None:
    """Of a turn of a conversation only what the answer before it leaves open."""
    first, second = request("a", 10, 1, 2), request("b", 18, 1, 2, 3)
    session = TraceSession("s", "s", BLOCK, (first, second))
    drawn: list[int] = []

    def draw(random_numbers: random.Random, num: int) -> list[int]:
        drawn.append(num)
        return draw_tokens(random_numbers, num)

    texts, fresh = TraceTexts(0, draw), TraceTexts(0, draw_tokens)
    texts.prepare([session])
    # three blocks, the end of the first prompt, and of the second one what is after 10 tokens and an answer of 3
    assert sorted(drawn) == [2, 4, 4, 4, 5]
    said = Said(first, [*texts.of(session).prompt(first), 7, 8, 9])
    assert said.token_ids[:10] == fresh.of(session).prompt(first)
    assert texts.of(session).prompt(second, said) == fresh.of(session).prompt(second, said)
    assert len(drawn) == 5, "nothing more is drawn during the run"


def test_a_trace_that_is_too_large_is_refused_before_it_is_drawn_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_text, "MAX_DRAWN_TOKENS", 100)
    shared = [TraceSession(f"{n}", "s", BLOCK, (request(f"{n}", 12, 1, 2, 3),)) for n in range(1000)]
    TraceTexts(0, draw_tokens).prepare(shared)
    agent = TraceSession("agent", "s", BLOCK, (request("c", 61),))
    session = TraceSession("s", "s", BLOCK, (request("a", 40), agent))
    with pytest.raises(ConfigError, match=r"more than 100 tokens together.*--trace-scale"):
        TraceTexts(0, draw_tokens).prepare([session])


# ---- times and scale


def test_times_are_divided_and_waits_have_a_limit() -> None:
    agent = TraceSession("sub", "s", 0, (TraceRequest("sub 0", 1, 1, think_s=100.0),), 90.0)
    session = TraceSession("s", "s", 0, (TraceRequest("s 0", 1, 1, think_s=8.0), agent), 600.0)
    timed = session.timed(2.0, 60.0)
    assert timed.start_s == 300.0
    assert isinstance(timed.steps[1], TraceSession)
    assert (timed.steps[1].start_s, [each.think_s for each in timed.requests]) == (30.0, [4.0, 30.0])
    assert session.timed(1.0, math.inf) == session


def test_lengths_and_blocks_are_divided_alike() -> None:
    inner = TraceSession("sub", "s", 64, (TraceRequest("sub 0", 130, 3, (1, 2), 0.5),), 2.0, is_background=True)
    session = TraceSession("s", "s", 64, (TraceRequest("s 0", 200, 40, (1, 2, 3), 1.5), inner), 3.0)
    scaled = session.scaled(16)
    assert (scaled.block_tokens, scaled.start_s) == (4, 3.0)
    assert scaled.steps[0] == TraceRequest("s 0", 12, 2, (1, 2, 3), 1.5)
    assert scaled.steps[1] == TraceSession("sub", "s", 4, (TraceRequest("sub 0", 8, 1, (1, 2), 0.5),), 2.0, True)
    assert session.scaled(1) == session


@pytest.mark.parametrize("divisor", [0, 3, 128])
def test_a_block_must_be_divisible(divisor: int) -> None:
    with pytest.raises(ConfigError, match=f"blocks of 64 tokens cannot be divided by {divisor}"):
        TraceSession("s", "s", 64, ()).scaled(divisor)
