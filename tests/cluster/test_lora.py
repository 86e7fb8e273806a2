"""Adapters through prefill and decode: the texts of checkpoints into which they were merged."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc
import httpx
import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.lora_adapters import make_adapter, merged_checkpoint
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import Cluster, pd_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S

pytestmark = [pytest.mark.process, pytest.mark.slow]
GIVEN, WATCHED = ("alpha", "beta"), "gamma"
MAX_TOKENS = 12


T = TypeVar("T")


async def until(look: Callable[[], Awaitable[T]], is_there: Callable[[T], bool]) -> None:
    """Wait until what `look` finds satisfies `is_there`."""
    async with asyncio.timeout(HANG_S):
        while not is_there(await look()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@dataclass
class Served:
    """A cluster with two slots per worker for three adapters, and the oracles of their merged checkpoints."""

    cluster: Cluster
    adapters: Path
    lora_dir: Path
    oracles: dict[str, Oracle] = field(default_factory=dict)


@pytest.fixture(scope="module")
def served(tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    base, folder = tiny_checkpoints("llama"), tmp_path_factory.mktemp("adapters")
    (lora_dir := folder / "watched").mkdir()
    oracles = {"": Oracle(base)}
    for seed, name in enumerate((*GIVEN, WATCHED), 1):
        adapter = make_adapter(folder / name, base, seed=seed, spread=0.3)
        oracles[name] = Oracle(merged_checkpoint(folder / f"merged-{name}", base, adapter))
    shutil.copytree(folder / WATCHED, lora_dir / WATCHED)
    flags = ["--dtype=float32", "--num-blocks=256", "--max-num-batched-tokens=64"]
    flags += ["--enable-lora", "--max-loras=2", "--max-lora-rank=8", "--lora-dir", str(lora_dir)]
    for name in GIVEN:
        flags += ["--lora-modules", f"{name}={folder / name}"]
    own_process = ("--engine-process=true",)
    with pd_cluster(folder, base, both=flags, decode=own_process, router=("--local-prefill", "never")) as cluster:
        workers = [cluster.services[role] for role in ("prefill", "decode")]
        cluster.start_router(
            "--model", str(base), name="any", prefill=[workers[0].address], decode=[workers[1].address]
        )
        yield Served(cluster, folder, lora_dir, oracles)
        cluster.check_pools()
        cluster.check_logs()


async def test_adapters_and_none_in_one_batch_go_through_prefill_and_decode(served: Served) -> None:
    async with InferenceClient(served.cluster.router.address) as router:
        for length in (5, 40, 150):
            prompt = prompt_of(length)
            for _ in range(2):  # the second time over cached blocks
                names = [*served.oracles] * 2
                answers = await asyncio.gather(
                    *(router.ask(prompt, model=name, max_tokens=MAX_TOKENS) for name in names)
                )
                for name, answer in zip(names, answers, strict=True):
                    served.oracles[name].check(prompt, answer.token_ids)
                    assert "kv_landed" in answer.moments, "it did not go through prefill and decode"
                assert len({tuple(answer.token_ids) for answer in answers}) == len(served.oracles)


async def test_http_names_adapters_and_lists_them(served: Served) -> None:
    prompt = prompt_of(20)
    async with httpx.AsyncClient(base_url=f"http://{served.cluster.router.http}/v1") as client:
        body = {
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = (await client.post("/completions", json=body | {"model": "beta"})).json()
        assert answer["model"] == "beta"
        served.oracles["beta"].check(prompt, answer["choices"][0]["token_ids"])
        cards = (await client.get("/models")).json()["data"]
        base = cards[0]["id"]
        assert [(card["id"], card.get("parent")) for card in cards] == [
            (base, None), ("alpha", base), ("beta", base), ("gamma", base)
        ]  # fmt: skip
        assert (await client.get("/models/alpha")).json()["parent"] == base
        refused = await client.post("/completions", json=body | {"model": "nobody"})
        assert refused.status_code == 404
        assert "'nobody'" in refused.text
        assert "'alpha', 'beta', 'gamma'" in refused.text


async def test_grpc_refuses_an_unknown_adapter_with_the_names(served: Served) -> None:
    async with InferenceClient(served.cluster.router.address) as router:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.ask([1, 2, 3], model="nobody", max_tokens=2)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert "'gamma'" in (refused.value.details() or "")


async def test_every_sequence_has_the_adapter(served: Served) -> None:
    prompt = prompt_of(30)
    async with InferenceClient(served.cluster.router.address) as router:
        for token_ids in await router.ask_choices(prompt, 3, model="alpha", max_tokens=MAX_TOKENS):
            served.oracles["alpha"].check(prompt, token_ids)


async def test_a_session_keeps_its_adapter(served: Served) -> None:
    prompt, more = prompt_of(30), prompt_of(7)
    asked = {"max_tokens": MAX_TOKENS}
    async with InferenceClient(served.cluster.services["any"].address) as router:
        first, second = await router.converse([(prompt, asked), (more, asked)], models=("alpha",))
        served.oracles["alpha"].check(prompt, first)
        served.oracles["alpha"].check([*prompt, *first, *more], second)
        with pytest.raises(grpc.aio.AioRpcError, match="the session began with 'alpha'"):
            await router.converse([(prompt, asked), (more, asked)], models=("alpha", "beta"))


async def test_an_embedding_has_the_adapter(served: Served) -> None:
    async with httpx.AsyncClient(base_url=f"http://{served.cluster.router.http}/v1") as client:
        vectors = {}
        for name in ("", "alpha"):
            body = {"input": prompt_of(9)} | ({"model": name} if name else {})
            answer = (await client.post("/embeddings", json=body)).json()
            vectors[name] = answer["data"][0]["embedding"]
        assert answer["model"] == "alpha"
        assert vectors[""] != vectors["alpha"]


async def test_adapters_come_and_go_in_the_watched_folder(served: Served) -> None:
    """A broken one is not offered; one that is added is, and its name is unknown after its removal."""
    prompt, broken, added = prompt_of(25), served.lora_dir / "broken", served.lora_dir / "added"
    async with (
        InferenceClient(served.cluster.router.address) as router,
        httpx.AsyncClient(base_url=f"http://{served.cluster.router.http}/v1") as client,
    ):

        async def offered() -> set[str]:
            return {card["id"] for card in (await client.get("/models")).json()["data"] if card["parent"]}

        shutil.copytree(served.adapters / "alpha", broken)
        (broken / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 64, "lora_alpha": 8}')
        shutil.copytree(served.adapters / "alpha", added)
        await until(offered, lambda names: "added" in names)
        assert "broken" not in await offered()

        async def told() -> int:
            return served.cluster.services["decode"].read_log().count("adapter broken is not offered")

        await until(told, bool)
        assert await told() == 1
        answer = await router.ask(prompt, model="added", max_tokens=MAX_TOKENS)
        served.oracles["alpha"].check(prompt, answer.token_ids)
        shutil.rmtree(added)
        shutil.rmtree(broken)
        await until(offered, lambda names: "added" not in names)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.ask(prompt, model="added", max_tokens=MAX_TOKENS)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
