"""No answer is ever another's: prompts that differ only at their end, transfers that fail, pools that are small.

And the proof that this would be seen: with verification off and two transfers crossed, answers are wrong.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pdserve.common.errors import PdServeError, TransferFailed
from pdserve.kv_transfer.control.source_transfer import SourceTransfer
from pdserve.kv_transfer.pull import peer_connections
from tests.support.engine.hash_model import greedy_answer
from tests.support.run.waiting import HANG_S

NUM_PROMPTS = 40
NUM_ROUNDS = 50
"""In `make test-all`; each kind of connector does half of them."""
AT_ONCE = 8
FAILED_SHARE = 0.25
MAX_TOKENS = 6
SMALL = {"p": {"num_blocks": 40}, "d": {"num_blocks": 40}}


def _prompts() -> list[list[int]]:
    """Equal but for their last 3 to 9 tokens; their answers differ pairwise."""
    draw = random.Random(11)
    shared = [draw.randrange(60) for _ in range(33)]
    prompts: list[list[int]] = []
    answers: set[tuple[int, ...]] = set()
    while len(prompts) < NUM_PROMPTS:
        prompt = [*shared, *(draw.randrange(60) for _ in range(draw.randint(3, 9)))]
        answer = tuple(greedy_answer(prompt, MAX_TOKENS))
        if answer not in answers:
            answers.add(answer)
            prompts.append(prompt)
    return prompts


PROMPTS = _prompts()


class Outcome:
    """Results of many requests."""

    def __init__(self) -> None:
        self.num_right = 0
        self.num_wrong = 0
        self.num_failures = 0

    async def ask(self, pair: Any, prompt: list[int], injure: Callable[[Any], None]) -> None:
        """One request, asked again as a router would for as long as its transfers fail."""
        for attempt in itertools.count():
            asked = pair.ask(prompt, max_tokens=MAX_TOKENS)
            injure(asked)
            try:
                first, rest = await asyncio.wait_for(asyncio.gather(asked.prefill.get(), _rest(asked.decode)), HANG_S)
            except PdServeError:
                assert attempt < 40, "it never succeeds"
                self.num_failures += 1
                continue
            finally:
                pair.leave(asked)
            if [*first.new_token_ids, *rest] == greedy_answer(prompt, MAX_TOKENS):
                self.num_right += 1
            else:
                self.num_wrong += 1
            return


async def _rest(stream: Any) -> list[int]:
    return [token async for output in stream for token in output.new_token_ids]


def _fail_some(draw: random.Random) -> Callable[[Any], None]:
    """A quarter of the transfers ends, at its source, at some moment."""

    def injure(asked: Any) -> None:
        if draw.random() < FAILED_SHARE:
            delay_s = draw.choice((0.0, 0.001, 0.003, 0.006))
            asyncio.get_running_loop().call_later(delay_s, asked.transfer.fail, TransferFailed("injected"))

    return injure


@pytest.mark.parametrize(
    ("kind", "num_rounds"),
    [("tcp", 8), *(pytest.param(kind, NUM_ROUNDS // 2, marks=pytest.mark.slow) for kind in ("local", "tcp"))],
)
async def test_i8_every_answer_is_its_own(make_pair: Any, kind: str, num_rounds: int) -> None:
    pair = await make_pair(kind, **SMALL)
    draw = random.Random(12)
    outcome = Outcome()
    places = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: list[int]) -> None:
        async with places:
            await outcome.ask(pair, prompt, _fail_some(draw))

    for _ in range(num_rounds):
        await asyncio.gather(*(one(prompt) for prompt in draw.sample(PROMPTS, NUM_PROMPTS)))
    assert outcome.num_wrong == 0
    assert outcome.num_right == NUM_PROMPTS * num_rounds
    assert outcome.num_failures > outcome.num_right * FAILED_SHARE / 4, "too few transfers failed to show anything"


class Crossing:
    """Lets each transfer publish the blocks of the one before it under its own digests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._last: dict[int, Sequence[int]] = {}
        real = SourceTransfer.settled

        def settled(
            transfer: SourceTransfer, first_index: int, block_ids: Sequence[int], digests: Sequence[tuple[int, ...]]
        ) -> None:
            others = self._last.get(len(block_ids), block_ids)
            self._last[len(block_ids)] = block_ids
            real(transfer, first_index, others, digests)

        monkeypatch.setattr(SourceTransfer, "settled", settled)


@pytest.mark.few(1)
@pytest.mark.parametrize("verified", [True, False])
async def test_crossed_transfers_are_caught_by_verification_alone(
    make_pair: Any, monkeypatch: pytest.MonkeyPatch, verified: bool
) -> None:
    pair = await make_pair("tcp", p={"num_blocks": 400}, d={"num_blocks": 400})
    Crossing(monkeypatch)
    if not verified:
        monkeypatch.setattr(peer_connections, "matching", lambda _, blocks, digest: [True] * len(blocks))
    outcome = Outcome()
    for prompt in PROMPTS[:12]:
        other = [(token + 1) % 60 for token in prompt]  # nothing in common, so nothing is cached
        asked = pair.ask(other, max_tokens=MAX_TOKENS)
        try:
            first, rest = await asyncio.wait_for(asyncio.gather(asked.prefill.get(), _rest(asked.decode)), HANG_S)
            right = [*first.new_token_ids, *rest] == greedy_answer(other, MAX_TOKENS)
            outcome.num_right += right
            outcome.num_wrong += not right
        except TransferFailed:
            outcome.num_failures += 1
        pair.leave(asked)
    if verified:
        assert outcome.num_wrong == 0
        assert outcome.num_failures > 0
    else:
        assert outcome.num_wrong > 0, "this test could not see a wrong answer"
