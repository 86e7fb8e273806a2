"""Several sequences of one prompt through real prefill and decode processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.shared_cluster import SharedCluster

pytestmark = pytest.mark.process

MAX_TOKENS = 20


async def test_i1_i5_sequences_through_p_and_d(shared: SharedCluster) -> None:
    source, sink = (shared.processes.services[role] for role in ("prefill", "decode"))
    computed = [shared.processes.load(worker).prompt_tokens_computed for worker in (source, sink)]
    async with (
        InferenceClient(shared.processes.router.address) as router,
        InferenceClient(shared.router_of_decode.address) as one_engine,
    ):
        through_pd = {}
        for length in (16, 17):
            prompt = prompt_of(length)
            for token_ids in await router.ask_choices(prompt, 3, max_tokens=MAX_TOKENS):
                assert len(token_ids) == MAX_TOKENS
                shared.oracle.check(prompt, token_ids)
            sampling: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": MAX_TOKENS}
            through_pd[length] = await router.ask_choices(prompt, 4, **sampling)
            assert len({*map(tuple, through_pd[length])}) == 4
            assert (await router.ask(prompt, **sampling)).token_ids == through_pd[length][0]
        assert shared.processes.load(source).prompt_tokens_computed > computed[0]
        assert shared.processes.load(sink).prompt_tokens_computed == computed[1], "decode computed a prompt"
        for length, expected in through_pd.items():
            assert await one_engine.ask_choices(prompt_of(length), 4, **sampling) == expected
        # what stops one sequence does not stop the others
        stopped = await router.ask_choices(prompt_of(17), 4, **sampling, stop_token_ids=[through_pd[17][2][9]])
        assert stopped[2] == through_pd[17][2][: len(stopped[2])]
        assert len(stopped[2]) <= 10
        assert max(map(len, stopped)) > 10
