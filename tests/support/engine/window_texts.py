"""Texts of models whose layers do not see all of a sequence: what every kind of KV cache group must leave as it is."""

from __future__ import annotations

from tests.support.engine.engine_harness import Harness
from tests.support.engine.hash_model import Window, greedy_answer, prompt_of


def most_in_use(engine: Harness, limit: int = 2000) -> int:
    """Run to the end; the largest number of blocks in use after a step."""
    most = 0
    for _ in range(limit):
        if not engine.core.has_work:
            break
        engine.step()
        most = max(most, engine.scheduler.pool.num_in_use)
    assert not engine.core.has_work
    engine.collect()
    return most


def check_session_that_goes_back(engine: Harness, window: Window, kept: int) -> None:
    """A turn of 21 tokens, and one after the first `kept` of them, whose blocks may be gone."""
    engine.add(prompt_of(30), "s", resumable=True, params={"max_tokens": 21})
    while not engine.turns.get("s"):
        engine.step()
    text = prompt_of(30) + engine.turns["s"][0].token_ids[:kept] + [7, 8, 9]
    engine.resume("s", [7, 8, 9], num_kept_output_tokens=kept, max_tokens=20)
    while len(engine.turns["s"]) == 1:
        engine.step()
    assert engine.turns["s"][1].token_ids == greedy_answer(text, 20, window)
    engine.core.abort_request("s")


def check_preempted_sequences(engine: Harness, window: Window) -> None:
    """Four sequences for which the engine has too few blocks, twice."""
    for again in (0, 1):
        for length in range(8, 12):
            engine.add(prompt_of(length), f"{length} {again}", params={"max_tokens": 40})
        engine.run()
        for length in range(8, 12):
            assert engine.answers[f"{length} {again}"].token_ids == greedy_answer(prompt_of(length), 40, window)
    assert engine.scheduler.num_preemptions > 0
