"""Drafts under virtual time: steps compute what the scheduler schedules, and texts are those without drafts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.speculative_config import SpeculativeConfig
from pdserve.simulator.step_times import Chunk
from pdserve.simulator.virtual_drafts import VirtualSequence
from tests.support.simulator.simulated_fleet import TIMES, Answer, Asker, fleet_plan, prompt_of, run_fleet

LENGTH = 100
NUM_DRAFTS = 3
NUM_TOKENS = 14
"""One of the prefill worker, one of a step without drafts, and three runs of four tokens."""
ONE_S, RUN_S = (TIMES.step_s([Chunk(count, LENGTH)]) for count in (1, 1 + NUM_DRAFTS))
MESSAGES_S = 0.0005


def answer(acceptance: float | None, num_tokens: int = NUM_TOKENS, **settings: Any) -> Answer:
    if acceptance is not None:
        settings |= {
            "speculative_config": SpeculativeConfig(
                num_speculative_tokens=NUM_DRAFTS, **settings.pop("speculative_config", {})
            )
        }

    async def work(asker: Asker) -> Answer:
        return await asker.ask(prompt_of(LENGTH, 1), num_tokens)

    return run_fleet(fleet_plan(**settings, workers={"draft_acceptance": acceptance}), work)


@pytest.mark.parametrize("config", [{"method": "ngram"}, {"model": "demo"}])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_accepted_drafts_save_steps(config: dict[str, Any], runs_ahead: bool) -> None:
    found = answer(1.0, speculative_config=config, async_scheduling=runs_ahead)
    plain = answer(None, async_scheduling=runs_ahead)
    assert found.token_ids == plain.token_ids
    decode_s = ONE_S + 3 * RUN_S
    assert decode_s < found.last_s - found.first_s < decode_s + MESSAGES_S
    assert (NUM_TOKENS - 1) * ONE_S < plain.last_s - plain.first_s < (NUM_TOKENS - 1) * ONE_S + MESSAGES_S


def test_refused_drafts_cost_their_tokens() -> None:
    found = answer(0.0)
    assert found.token_ids == answer(None).token_ids
    # at most as many are drafted as the answer may still have, less one
    decode_s = 2 * ONE_S + TIMES.step_s([Chunk(2, LENGTH)]) + TIMES.step_s([Chunk(3, LENGTH)]) + 9 * RUN_S
    assert decode_s < found.last_s - found.first_s < decode_s + MESSAGES_S


def test_some_drafts_are_accepted() -> None:
    found, again, plain = answer(0.6, 200), answer(0.6, 200), answer(None, 200)
    assert found == again
    assert found.token_ids == plain.token_ids
    # of three drafts 0.6 + 0.36 + 0.216 are accepted in the mean
    num_steps = (found.last_s - found.first_s) / RUN_S
    assert num_steps == pytest.approx(200 / 2.176, rel=0.15)


def test_the_accepted_part_is_the_given_one() -> None:
    sequence = VirtualSequence(0, 0, 1, 0, NUM_DRAFTS, b"prompt")
    num_right = sum(sequence.draft(place, 5000, 0.6) == sequence.token(place, 5000) for place in range(10_000))
    # four standard deviations
    assert abs(num_right - 6000) < 4 * (10_000 * 0.6 * 0.4) ** 0.5


def test_nothing_is_drafted_for_a_large_batch() -> None:
    async def work(asker: Asker) -> list[Answer]:
        return await asyncio.gather(*(asker.ask(prompt_of(16, seed), 30) for seed in range(4)))

    def last_s(most: int | None) -> float:
        config = SpeculativeConfig(num_speculative_tokens=NUM_DRAFTS, disable_by_batch_size=most)
        plan = fleet_plan(speculative_config=config, workers={"draft_acceptance": 1.0})
        return max(each.last_s for each in run_fleet(plan, work))

    assert last_s(4) < 0.5 * last_s(1)


def test_an_acceptance_is_needed() -> None:
    with pytest.raises(
        ConfigError, match="speculative_config is set, and nothing says which part of the drafts is accepted"
    ):
        run_fleet(fleet_plan(speculative_config=SpeculativeConfig(num_speculative_tokens=1)), _never)


async def _never(asker: Asker) -> None:
    raise AssertionError
