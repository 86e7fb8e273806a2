"""Adapters at a prefill and a decode worker: the texts of `LLM`, and contents that never meet."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.block_hash import BlockHasher, request_extras
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.engine.ranks import rank_processes
from pdserve.llm import LLM, LoRARequest, SamplingParams
from pdserve.worker.worker import Worker
from tests.support.engine.forked_engine import start_rank
from tests.support.engine.llm_requests import core_of
from tests.support.models.lora_adapters import make_adapter
from tests.support.transfers.worker_call import WorkerCall
from tests.support.transfers.worker_pair import (
    BLOCK_SIZE,
    KEY,
    PROMPT,
    Pair,
    calls,
    check_at_rest,
    decode_call,
    generation_request,
    running_pair,
)

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "max_model_len": 512, "enable_lora": True}


@pytest.fixture
def base(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture
def adapters(base: Path, tmp_path: Path) -> dict[str, str]:
    return {
        name: str(make_adapter(tmp_path / name, base, seed=seed, spread=0.3))
        for seed, name in enumerate(("one", "two"), 1)
    }


@pytest.fixture
async def pair(base: Path, adapters: dict[str, str]) -> AsyncIterator[Pair]:
    """Workers with the same two adapters, and under `mixed` one with each."""
    both = {**adapters, "mixed": adapters["one"]}
    other = {"lora_modules": {**adapters, "mixed": adapters["two"]}}
    async with running_pair(base, KEY, decode=other, lora_modules=both, **SETTINGS) as made:
        yield made
        for worker in (made.p, made.d):
            await check_at_rest(worker)


def request_for(worker: Worker, name: str, **changes: Any) -> GenerationRequest:
    """A request with an adapter as this worker has it, as a router makes it."""
    fingerprint, hasher = worker.engine.known_adapters[name], BlockHasher(KEY, BLOCK_SIZE)
    root = hasher.root(worker.identity.layout.model_fingerprint, lora=fingerprint)
    digest = hasher.request_digest(root, hasher.extend(root, PROMPT), PROMPT, request_extras(fingerprint))
    fields = {"lora_name": name, "lora_fingerprint": fingerprint, "hash_root": root, "request_digest": digest}
    return generation_request(worker, **fields | changes)


async def events_of(call: WorkerCall) -> list[Any]:
    return [event async for event in call]


async def texts_of(pair: Pair, names: Iterable[str]) -> dict[str, list[int]]:
    """The answer with each adapter through both workers; of a name that comes twice the last."""
    texts = {}
    for name in names:
        request = request_for(pair.d, name)
        prefill, decode = calls(pair, request)
        of_p, events = await asyncio.gather(events_of(prefill), events_of(decode))
        [tokens] = [list(event.computed.first_outputs[0].token_ids) for event in of_p if event.computed.num_tokens]
        assert [event.WhichOneof("event") for event in events[:2]] == ["admitted", "landed"]
        texts[name] = tokens + [token_id for event in events for token_id in event.outputs.token_ids]
    return texts


async def test_prefill_and_decode_answer_as_llm_does(pair: Pair, base: Path, adapters: dict[str, str]) -> None:
    texts = await texts_of(pair, [*adapters, *adapters])  # the second time from cached blocks
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(base, dtype="float32", num_blocks=64, enable_lora=True, max_loras=2) as llm:
        for name, folder in adapters.items():
            [output] = llm.generate(
                {"prompt_token_ids": PROMPT}, greedy, lora_request=LoRARequest(name, 1, folder), use_tqdm=False
            )
            assert texts[name] == list(output.outputs[0].token_ids), name
        core_of(llm).scheduler.check(idle=True)
    assert texts["one"] != texts["two"]


async def test_a_worker_refuses_content_that_it_does_not_have_under_the_name(pair: Pair) -> None:
    assert pair.p.engine.known_adapters["mixed"] != pair.d.engine.known_adapters["mixed"]
    request = request_for(pair.p, "mixed")
    prefill, decode = calls(pair, request)
    assert (await prefill.read()).HasField("admitted")
    assert await decode.code() == "adapter_unavailable"
    prefill.cancel()


async def test_each_workers_own_content_never_becomes_a_transfer(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """Calls that both workers accept by themselves: control stream and digests keep them apart."""
    at_p = request_for(pair.p, "mixed")
    at_d = request_for(pair.d, "mixed", request_id=at_p.request_id)
    prefill, decode = calls(pair, at_p, at_d)
    assert (await prefill.read()).HasField("admitted")
    assert await decode.code() == "transfer_failed"
    prefill.cancel()
    assert "the transfer is of another request: the digests differ" in caplog.text


@pytest.mark.slow
async def test_a_digest_without_the_adapter_is_refused(pair: Pair) -> None:
    plain = generation_request(pair.p)
    for changes in ({"request_digest": plain.request_digest}, {"hash_root": plain.hash_root}):
        request = request_for(pair.p, "one", **changes)
        assert await decode_call(pair, request, prefill_here=True).code() == "digest_mismatch"


@pytest.mark.slow
async def test_a_text_ends_with_an_adapter_that_is_removed_meanwhile(
    base: Path, adapters: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(adapters["one"], tmp_path / "watched" / "gone")
    at_d = {"lora_dir": str(tmp_path / "watched")}
    async with running_pair(base, KEY, decode=at_d, lora_modules={"one": adapters["one"]}, **SETTINGS) as pair:
        texts = {}
        params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
        for name in ("one", "gone"):  # equal content: the second text is compared with the first
            request = request_for(pair.d, name, sampling_params=params, cache_salt=name)
            tokens: list[int] = []
            async for event in decode_call(pair, request, prefill_here=True):
                if event.outputs.token_ids and not tokens and name == "gone":
                    shutil.rmtree(tmp_path / "watched" / "gone")
                    await pair.d.lora_modules.follow()
                    assert "gone" not in pair.d.engine.known_adapters
                    assert pair.d.engine.num_streams == 1, "it still runs"
                tokens += event.outputs.token_ids
            texts[name] = tokens
        assert len(texts["gone"]) == 300
        assert texts["gone"] == texts["one"]
        assert await decode_call(pair, request, prefill_here=True).code() == "adapter_unavailable"
        await check_at_rest(pair.d)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 2), (1, 2)])
async def test_ranks_of_both_workers_answer_as_single_ones(
    ranks: tuple[int, int], pair: Pair, base: Path, adapters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "start_program", start_rank)
    prefill, decode = ({"tensor_parallel_size": size} for size in ranks)
    names = [*adapters, *adapters]
    async with running_pair(base, KEY, prefill=prefill, decode=decode, lora_modules=adapters, **SETTINGS) as shared:
        assert await texts_of(shared, names) == await texts_of(pair, names)
        for worker in (shared.p, shared.d):
            await check_at_rest(worker)
