"""Forms that cost seconds in a compiler or matcher, next to another client's stream at the same worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.inputs.hostile_grammars import SLOW_TO_COMPILE, SLOW_TO_MATCH
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import Cluster, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S

# `tests/engine/test_grammar_processes.py` has every form in `make test`
pytestmark = [pytest.mark.process, pytest.mark.slow]

LIMITS = {"grammar_timeout_s": 3, "grammar_token_s": 0.01, "grammar_request_s": 0.2}
GAP_S = 0.5
FORMS = {**SLOW_TO_MATCH, "slow to compile": SLOW_TO_COMPILE}
PROMPT = prompt_of(20)
MAX_PLACES = 48
"""Places, of `max_num_seqs`, that costly forms take together."""


@pytest.fixture(scope="module")
def model(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One decode worker, which every request meets; and another behind a router of its own, which no form meets."""
    with running_cluster(tmp_path_factory.mktemp("logs")) as cluster:
        flags = [f"--{name}={value}" for name, value in LIMITS.items()]
        common = ("--model", str(model), "--dtype=float32", "--num-blocks=1200")
        worker = cluster.start_worker("decode", *common, *flags)
        cluster.start_router("--model", str(model), decode=[worker.address])
        calm = cluster.start_worker("decode", *common, name="calm")
        cluster.start_router("--model", str(model), decode=[calm.address], name="calm-router")
        yield cluster
        cluster.check_pools()
        cluster.check_logs()


async def gaps_of(client: InferenceClient, oracle: Oracle, is_over: asyncio.Event) -> list[float]:
    """Seconds between the messages of streams, one after the other until it is over."""
    gaps: list[float] = []
    while not is_over.is_set():
        token_ids: list[int] = []
        last = 0.0
        async for message in client.start(PROMPT, max_tokens=60):
            now = time.monotonic()
            if last:
                gaps.append(now - last)
            last = now
            token_ids += message.token_ids
        oracle.check(PROMPT, token_ids)
    return gaps


async def post(http: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    """Ask until there is room: where other processes keep the CPUs busy, grammars of low priority wait long for them."""
    while True:
        answer = await http.post("/v1/completions", json=body)
        if answer.status_code not in (429, 503):
            return answer
        await asyncio.sleep(float(answer.headers["retry-after"]))


@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    ("form", "n"),
    [pytest.param(form, n, id=f"{name}-{n}") for name, form in FORMS.items() for n in (4, 8, 16)],
)
async def test_the_form_ends_its_own_request_and_delays_no_stream(
    cluster: Cluster, model: Path, form: dict[str, Any], n: int
) -> None:
    [letter] = Tokenizer.from_folder(model).encode("a", add_special_tokens=False)
    oracle = Oracle(model)
    num_logged = len(cluster.router.read_log())
    body = {
        "model": model.name,
        "prompt": PROMPT,
        "max_tokens": 1200,
        "n": n,
        "temperature": 1.0,
        "logit_bias": {str(letter): 100.0},
        "structured_outputs": form,
    }
    async with (
        httpx.AsyncClient(base_url=f"http://{cluster.router.http}", timeout=4 * HANG_S, trust_env=False) as http,
        InferenceClient(cluster.router.address) as client,
        InferenceClient(cluster.services["calm-router"].address) as calm_client,
    ):
        harmless = body | {"structured_outputs": {"choice": ["yes", "no"]}, "logit_bias": {}}
        assert (await http.post("/v1/completions", json=harmless)).status_code == 200
        # what this machine gives meanwhile to a stream that nobody attacks is the measure of the other
        is_over = asyncio.Event()
        streams = [asyncio.create_task(gaps_of(each, oracle, is_over)) for each in (client, calm_client)]
        # a place must be left for the stream
        requests = [body | {"seed": seed} for seed in range(min(4, MAX_PLACES // n))]
        answers = await asyncio.gather(*(post(http, request) for request in requests))
        is_over.set()
        gaps, calm = await asyncio.gather(*streams)
        assert [answer.status_code for answer in answers] == [400] * len(requests), [answer.text for answer in answers]
        for answer in answers:
            error = answer.json()["error"]
            assert error["param"] == "structured_outputs"
            assert "takes too long to be matched" in error["message"] or "could not be compiled" in error["message"]
        # the engine stood still for 1 to 30 s where grammars were in it
        assert max(gaps) < GAP_S + 4 * max(calm)
        assert " is lost" not in cluster.router.read_log()[num_logged:]
        oracle.check(PROMPT, (await client.ask(PROMPT, max_tokens=8)).token_ids)
