"""Beam search through real prefill and decode processes, by `LLM.beam_search` on the same model in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.llm import LLM, BeamSearchParams
from pdserve.v1 import inference_pb2, request_pb2
from tests.support.inputs.random_prompts import prompt_of
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.shared_cluster import SharedCluster
from tests.support.run.waiting import HANG_S

pytestmark = pytest.mark.process

SEARCHES: list[tuple[int, dict[str, Any]]] = [
    (3, {"max_tokens": 9}),
    (4, {"max_tokens": 7, "length_penalty": 2.5, "early_stopping": True}),
    (2, {"max_tokens": 7, "length_penalty": -0.5, "early_stopping": "never", "ignore_eos": True}),
    (16, {"max_tokens": 4, "ignore_eos": True}),
]


def expected(model: Path, prompts: list[list[int]]) -> dict[tuple[int, int], list[list[int]]]:
    """(search, prompt) -> tokens of the beams, best first."""
    with LLM(model, dtype="float32", num_blocks=256) as llm:
        return {
            (search, place): [sequence.tokens[len(prompt) :] for sequence in output.sequences]
            for search, (width, fields) in enumerate(SEARCHES)
            for place, (prompt, output) in enumerate(
                zip(
                    prompts,
                    llm.beam_search(prompts, BeamSearchParams(beam_width=width, **fields), use_tqdm=False),
                    strict=True,
                )
            )
        }


@pytest.mark.slow
async def test_i1_the_beams_of_the_services_are_those_of_one_engine(shared: SharedCluster) -> None:
    prompts = [prompt_of(21), prompt_of(64)]
    wanted = expected(shared.model, prompts)
    for service in (shared.processes.router, shared.router_of_decode):
        url = f"http://{service.http}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=HANG_S) as http:
            for search, (width, fields) in enumerate(SEARCHES):
                body = {"prompt": prompts, "use_beam_search": True, "return_token_ids": True, "n": width} | fields
                response = await http.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text
                beams = [choice["token_ids"] for choice in response.json()["choices"]]
                assert beams == [*wanted[search, 0], *wanted[search, 1]], (service, SEARCHES[search])
    async with InferenceClient(shared.processes.router.address) as client:
        stub: Any = client._stub
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenPrompt(token_ids=prompts[0]),
            sampling=request_pb2.SamplingParams(n=2, best_of=4, max_tokens=7),
            use_beam_search=True,
            length_penalty=2.5,
            early_stopping="true",
        )
        answers = [answer async for answer in stub.Generate(request)]
        assert [list(answer.token_ids) for answer in answers] == wanted[1, 0][:2]
