"""Drafts through real prefill and decode processes: what a client gets is what it gets without them (I1, I4, I5)."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.text.tokenization.tokenizer import Tokenizer
from pdserve.v1 import inference_pb2, request_pb2
from tests.support.inputs.random_prompts import prompt_of
from tests.support.processes.cluster_processes import Cluster, pd_cluster, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.phase_pauses import PhasePauses
from tests.support.run.waiting import HANG_S

pytestmark = [pytest.mark.process, pytest.mark.slow]

FLAGS = ("--dtype=float32", "--max-num-batched-tokens=64", f"--grammar-timeout-s={HANG_S}")
REMOTE = ("--local-prefill", "never")
MAX_TOKENS = 40
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Lima", "Oslo"]}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    "three": {"temperature": 0.9, "seed": 13, "n": 3},
    "logprobs": {"temperature": 0.8, "seed": 4, "logprobs": 3},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": MAX_TOKENS},
    "form": {
        "temperature": 0.8,
        "seed": 12,
        "structured_outputs": request_pb2.StructuredOutputs(json=json.dumps(SCHEMA)),
    },
}


def speculation(model: Path, **fields: Any) -> tuple[str, ...]:
    """The model is its own draft model: its drafts are right, but for rounding, so that runs are long."""
    setting = {"model": str(model), "num_speculative_tokens": 4, "disable_by_batch_size": None} | fields
    return (f"--speculative-config={json.dumps(setting)}",)


async def ask(client: InferenceClient, name: str, num_drafts: int | None, **more: Any) -> list[Any]:
    """All that a client sees of each sequence."""
    sampling = {"max_tokens": MAX_TOKENS} | REQUESTS[name] | more
    call = client.start(prompt_of(90, 3), cache_salt=f"{name} {num_drafts}", speculative_tokens=num_drafts, **sampling)
    messages: list[inference_pb2.GenerateResponse] = [message async for message in call]
    found = []
    for index in range(sampling.get("n", 1)):
        own = [message for message in messages if message.index == index]
        token_ids = [token_id for message in own for token_id in message.token_ids]
        logprobs = [entry for message in own for entry in message.logprobs]
        assert [entry.sampled.token_id for entry in logprobs] == (token_ids if "logprobs" in sampling else [])
        tops = [[top.token_id for top in entry.top] for entry in logprobs]
        values = [top.logprob for entry in logprobs for top in entry.top]
        text = "".join(message.text for message in own)
        found.append((token_ids, text, own[-1].finish_reason, tops, values))
    return found


def is_same(found: list[Any], expected: list[Any]) -> bool:
    """Log-probabilities may differ in the last digits: several query rows round differently from one."""
    for (*seen, values), (*seen_before, values_before) in zip(found, expected, strict=True):
        if seen != seen_before or values != pytest.approx(values_before, abs=1e-4):
            return False
    return True


def metrics(cluster: Cluster, worker: str) -> dict[str, float]:
    text = httpx.get(f"{cluster.metrics_url(cluster.services[worker])}/metrics", timeout=HANG_S, trust_env=False).text
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def drafted_and_accepted(cluster: Cluster, worker: str) -> tuple[float, float]:
    found = metrics(cluster, worker)
    names = (f"pdserve_spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted"))
    drafted, accepted = (found[name] for name in names)
    return drafted, accepted


async def test_i5_every_feature_says_the_same_with_drafts(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    """A pool of few blocks: sequences are preempted, and go on with drafts."""
    model = tiny_checkpoints("llama")
    flags = (*FLAGS, "--num-blocks=40", "--max-model-len=320")
    with pd_cluster(tmp_path, model, both=flags, decode=speculation(model), router=REMOTE) as cluster:
        async with InferenceClient(cluster.router.address) as client:
            expected = {name: await ask(client, name, 0) for name in REQUESTS}
            assert drafted_and_accepted(cluster, "decode") == (0, 0)
            for name in REQUESTS:
                assert is_same(await ask(client, name, None), expected[name]), name
            drafted, accepted = drafted_and_accepted(cluster, "decode")
            # rules are not drafted by, so that drafts of penalties and forms are often wrong
            assert accepted > 0.5 * drafted > 50
            await stop_string(client, Tokenizer.from_folder(model), expected["greedy"][0][0])
            together = await asyncio.gather(*(ask(client, name, None) for name in [*REQUESTS, *REQUESTS]))
            for name, found in zip([*REQUESTS, *REQUESTS], together, strict=True):
                assert is_same(found, expected[name]), name
            # each grows beyond the 128 tokens for which decode keeps room: 40 blocks hold two of them to their ends
            long = [prompt_of(50 + seed, seed) for seed in range(4)]
            plain = [await client.ask(prompt, max_tokens=200, speculative_tokens=0) for prompt in long]
            drafted_for = await client.ask_all(long, max_tokens=200)
            assert [answer.token_ids for answer in drafted_for] == [answer.token_ids for answer in plain]
        # sessions are prefilled by decode
        addresses: dict[str, Any] = {role: [cluster.services[role].address] for role in ("prefill", "decode")}
        other = cluster.start_router("--model", str(model), name="router-2", **addresses)
        async with InferenceClient(other.address) as client:
            await session(client)
        assert metrics(cluster, "decode")["pdserve_preemptions_total"] > 0, "the pool is too large to show anything"
        cluster.check_pools()
        cluster.check_logs()


async def stop_string(client: InferenceClient, tokenizer: Tokenizer, greedy: list[int]) -> None:
    """A stop string in the middle of a run: the text ends before it, whatever was confirmed behind it."""
    whole = tokenizer.decode(greedy, skip_special_tokens=True)
    stop = whole[len(whole) // 2 :][:3]
    for num_drafts in (0, None):
        [(_, text, _, _, _)] = await ask(client, "greedy", num_drafts, stop=[stop])
        assert text == whole[: whole.index(stop)]


async def session(client: InferenceClient) -> None:
    turns: list[tuple[list[int], dict[str, Any]]] = [
        (prompt_of(40, 5), {"max_tokens": 20}),
        (prompt_of(3, 6), {"max_tokens": 25, "temperature": 0.8, "seed": 4}),
        (prompt_of(30, 7), {"max_tokens": 12, "repetition_penalty": 1.1}),
    ]
    plain = await client.converse(turns, cache_salt="plain", speculative_tokens=0)
    assert [len(turn) for turn in plain] == [20, 25, 12]
    assert await client.converse(turns, cache_salt="drafted") == plain


async def test_i4_a_drafted_text_goes_on_at_another_worker(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    """A decode worker is killed in mid-stream; the other one, which drafts too, resumes the text behind what was relayed."""
    model = tiny_checkpoints("llama", num_hidden_layers=4)
    pauses = PhasePauses(tmp_path / "pauses")
    flags = ("--model", str(model), *FLAGS, "--num-blocks=200")
    with running_cluster(tmp_path, pauses.worker_program) as cluster:
        workers = [
            cluster.launch_worker(role, *flags, *drafts, name=name)
            for role, name, drafts in (
                ("prefill", "prefill", ()),
                ("decode", "decode-1", speculation(model)),
                ("decode", "decode-2", speculation(model, num_speculative_tokens=3)),
            )
        ]
        for worker in workers:
            cluster.wait_for_worker(worker)
        prefill, *decode = (worker.address for worker in workers)
        cluster.start_router("--model", str(model), *REMOTE, prefill=[prefill], decode=decode)
        async with InferenceClient(cluster.router.address) as client:
            expected = {name: await ask(client, name, 0) for name in REQUESTS}
            for name in ("form", "three", "greedy"):
                pauses.arm("streaming")
                asked = asyncio.create_task(ask(client, name, None))
                victim = await pauses.reached(cluster)
                victim.signal(signal.SIGKILL)
                await asyncio.to_thread(victim.process.wait, HANG_S)
                assert is_same(await asked, expected[name]), name
                await asyncio.to_thread(cluster.restart, victim.name)
            # of the worker to which the greedy text went
            assert sum(drafted_and_accepted(cluster, name)[1] for name in ("decode-1", "decode-2")) > 0
        cluster.check_pools()
        cluster.check_logs()
