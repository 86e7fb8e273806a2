"""Prompts that are made of traces, and traces of other lengths."""

from __future__ import annotations

import random

import pytest

from pdserve.cli.bench.traces.trace import TraceRequest, TraceSession
from pdserve.cli.bench.traces.trace_text import Said, TraceText
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
    assert drawn == [BLOCK, BLOCK, 0]


# ---- scale


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
