"""Adapters in `LLM` and `AsyncLLM`: the texts of a checkpoint into which the adapter was merged, alone and among others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.common.errors import InvalidRequest
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.lora.adapter_store import AdapterStore
from pdserve.engine.runner.pool.memory_needs import memory_needs
from pdserve.llm import (
    LLM,
    BeamSearchParams,
    LoRARequest,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    StreamingInput,
)
from tests.llm.conftest import CheckedAsyncLLM
from tests.support.engine.llm_requests import core_of
from tests.support.engine.settings_with import settings_with
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.lora_adapters import make_adapter, merged_checkpoint
from tests.support.models.oracle import Oracle

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, seed=3, max_tokens=8, ignore_eos=True)
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"seed": 1},
    "attention": {"seed": 2, "rank": 8, "alpha": 4, "targets": ("q_proj", "v_proj"), "use_rslora": True, "spread": 0.3},
    "mlp": {"seed": 3, "rank": 1, "alpha": 2, "targets": ("up_proj", "down_proj"), "spread": 0.3},
}


class World:
    """Three adapters of one checkpoint, with an oracle for each and one for the base model."""

    def __init__(self, folder: Path, base: Path, oracle: Oracle) -> None:
        self.requests: dict[str | None, LoRARequest | None] = {None: None}
        self.oracles: dict[str | None, Oracle] = {None: oracle}
        for number, (name, options) in enumerate(ADAPTERS.items(), 1):
            adapter = make_adapter(folder / name, base, **options)
            self.requests[name] = LoRARequest(name, number, str(adapter))
            self.oracles[name] = Oracle(merged_checkpoint(folder / f"merged-{name}", base, adapter))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, folder: Path, oracle: Oracle) -> World:
    return World(tmp_path_factory.mktemp("adapters"), folder, oracle)


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.mark.slow
def test_an_adapters_text_is_that_of_the_merged_checkpoint(world: World, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**LORA)
    prompt = prompt_of(21)
    texts = {}
    for name, request in world.requests.items():
        [output] = llm.generate({"prompt_token_ids": prompt}, GREEDY, lora_request=request, use_tqdm=False)
        texts[name] = tokens(output)
        world.oracles[name].check(prompt, texts[name])
    assert len({tuple(text) for text in texts.values()}) == len(texts), "adapters without effect would prove nothing"


def test_a_prompt_of_embeddings_with_an_adapter(world: World, make_llm: Callable[..., LLM]) -> None:
    llm, prompt = make_llm(**LORA, enable_prompt_embeds=True), prompt_of(21)
    with torch.inference_mode():
        rows = world.oracles[None]._model.get_input_embeddings()(torch.tensor(prompt))
    for name, request in world.requests.items():
        [output] = llm.generate({"prompt_embeds": rows}, GREEDY, lora_request=request, use_tqdm=False)
        world.oracles[name].check(prompt, tokens(output))


def test_adapters_and_none_in_one_batch_do_not_change_each_other(world: World, make_llm: Callable[..., LLM]) -> None:
    """Prompts of several chunks and sequences of other adapters in each step; blocks of equal prompts are not shared."""
    llm = make_llm(max_num_batched_tokens=24, **LORA)
    names = [None, "all", "attention", "mlp"] * 3
    prompts = [prompt_of(5 + 13 * (place // 4)) for place in range(len(names))]
    outputs = llm.generate(prompts, GREEDY, lora_request=[world.requests[name] for name in names], use_tqdm=False)
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        world.oracles[name].check(prompt, tokens(output))


def test_more_adapters_than_slots_take_turns(world: World, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**LORA | {"max_loras": 1})
    running = core_of(llm).scheduler.running
    names = ["all", "attention", None, "mlp", "all", None]
    prompts = [prompt_of(9, place) for place in range(len(names))]
    outputs = llm.generate(prompts, GREEDY, lora_request=[world.requests[name] for name in names], use_tqdm=False)
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        world.oracles[name].check(prompt, tokens(output))
    assert (running.lora_slots.num_loads, running.lora_slots.num_evictions) == (3, 2)


def test_prompts_share_blocks_only_under_the_same_adapter(world: World, make_llm: Callable[..., LLM]) -> None:
    llm, prompt = make_llm(**LORA), prompt_of(17)

    def cached(name: str | None, as_name: str | None = None) -> int | None:
        request = world.requests[name]
        if request is not None and as_name is not None:
            request = LoRARequest(as_name, 9, request.lora_path)
        [output] = llm.generate(prompt, GREEDY, lora_request=request, use_tqdm=False)
        return output.num_cached_tokens

    assert [cached(name) for name in (None, "all", "mlp")] == [0, 0, 0]
    assert [cached(name) for name in (None, "all", "mlp")] == [16, 16, 16]
    assert cached("all", as_name="another-name") == 16, "the content counts, not the name"


def test_a_folder_with_new_content_is_another_adapter(
    tmp_path: Path, folder: Path, make_llm: Callable[..., LLM]
) -> None:
    llm, prompt = make_llm(**LORA), prompt_of(17)
    request = LoRARequest("mine", 1, str(tmp_path / "mine"))
    for seed in (1, 2):
        adapter = make_adapter(tmp_path / "mine", folder, seed=seed)
        oracle = Oracle(merged_checkpoint(tmp_path / f"merged-{seed}", folder, adapter))
        [output] = llm.generate({"prompt_token_ids": prompt}, GREEDY, lora_request=request, use_tqdm=False)
        assert output.num_cached_tokens == 0
        oracle.check(prompt, tokens(output))


def test_a_folder_that_changes_before_it_is_loaded_fails_its_own_requests_alone(
    tmp_path: Path, folder: Path, world: World, make_llm: Callable[..., LLM]
) -> None:
    llm = make_llm(**LORA | {"max_loras": 1, "max_cpu_loras": 1})
    adapter = make_adapter(tmp_path / "mine", folder, seed=11)
    llm.generate("a", GREEDY, lora_request=LoRARequest("mine", 1, str(adapter)), use_tqdm=False)
    engine, prompt = llm.llm_engine, prompt_of(9)
    engine.add_request("broken", {"prompt_token_ids": prompt}, GREEDY, lora_request=LoRARequest("m", 1, str(adapter)))
    engine.add_request("other", {"prompt_token_ids": prompt}, GREEDY, lora_request=world.requests["all"])
    core_of(llm).scheduler.running.lora_slots.forget(next(iter(core_of(llm).scheduler.running.lora_slots.loaded)))
    make_adapter(tmp_path / "mine", folder, seed=12)
    failures, texts = [], []
    while engine.has_unfinished_requests():
        try:
            texts += [output for output in engine.step() if output.finished]
        except Exception as error:
            failures.append(str(error))
    assert len(failures) == 1
    assert "its folder has the fingerprint" in failures[0]
    [output] = texts
    assert isinstance(output, RequestOutput)
    world.oracles["all"].check(prompt, tokens(output))


def test_n_and_beams_and_embeddings_have_the_adapter(world: World, make_llm: Callable[..., LLM]) -> None:
    llm, prompt = make_llm(**LORA), prompt_of(10)
    request, oracle = world.requests["all"], world.oracles["all"]
    [several] = llm.generate(
        {"prompt_token_ids": prompt},
        SamplingParams(temperature=0, n=3, max_tokens=5, ignore_eos=True),
        lora_request=request,
        use_tqdm=False,
    )
    for output in several.outputs:
        oracle.check(prompt, list(output.token_ids))
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    [beams] = llm.beam_search({"prompt_token_ids": prompt}, params, lora_request=request, use_tqdm=False)
    expected = oracle.beams(prompt, params, [])
    assert [beam.tokens[len(prompt) :] for beam in beams.sequences] == [tokens for tokens, _ in expected]
    [pooled] = llm.embed(
        {"prompt_token_ids": prompt}, PoolingParams(normalize=False), lora_request=request, use_tqdm=False
    )
    assert pooled.outputs.embedding == pytest.approx(oracle.hidden_states(prompt)[-1].tolist(), abs=1e-4)


async def test_async_requests_and_sessions_have_the_adapter(
    world: World, running: Callable[..., AbstractAsyncContextManager[CheckedAsyncLLM]]
) -> None:
    async def turns() -> AsyncIterator[StreamingInput]:
        for seed in (1, 2):
            yield StreamingInput({"prompt_token_ids": prompt_of(6, seed)})

    async with running(**LORA) as llm:
        for name, request in world.requests.items():
            prompt = prompt_of(11)
            last = None
            async for output in llm.generate({"prompt_token_ids": prompt}, GREEDY, lora_request=request):
                last = output
            assert last is not None
            world.oracles[name].check(prompt, tokens(last))
        seen: list[list[int]] = []
        async for output in llm.generate(turns(), GREEDY, lora_request=world.requests["all"]):
            if output.outputs[0].finish_reason is not None:
                seen.append(tokens(output))
        first = prompt_of(6, 1)
        world.oracles["all"].check(first, seen[0])
        world.oracles["all"].check([*first, *seen[0], *prompt_of(6, 2)], seen[1])


def test_seeds_draw_the_same_alone_and_among_adapters(world: World, make_llm: Callable[..., LLM]) -> None:
    llm, prompt = make_llm(**LORA), prompt_of(12)
    requests = list(world.requests.values())
    together = llm.generate([prompt] * 4, SAMPLED, lora_request=requests, use_tqdm=False)
    llm.reset_prefix_cache()
    for request, among in zip(requests, together, strict=True):
        [alone] = llm.generate(prompt, SAMPLED, lora_request=request, use_tqdm=False)
        assert tokens(alone) == tokens(among)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (["adapter"], "lora_request must be LoRARequest, not str"),
        (LoRARequest("../x", 1, "a"), "lora_name is '../x', 1 to 128"),
        (LoRARequest("x", 0, "a"), "lora_int_id is 0, at least 1"),
        (LoRARequest("x", 1, ""), "lora_path is '', a folder"),
        (LoRARequest("x", 1, "/nothing/there"), "lora_request: /nothing/there/adapter_config.json does not exist"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(llm_with_lora: LLM, request_: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm_with_lora.generate("a", GREEDY, lora_request=request_, use_tqdm=False)


def test_the_slots_are_counted_in_a_workers_memory(folder: Path, make_llm: Callable[..., LLM]) -> None:
    common: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_blocks": 128}
    plain, with_slots = (memory_needs(folder, settings_with(DecodeSettings, **common, **more)) for more in ({}, LORA))
    adapters = core_of(make_llm(**LORA)).adapters
    assert isinstance(adapters, AdapterStore)
    assert with_slots.weights - plain.weights == adapters.targets.nbytes > 0


def test_an_engine_without_adapters_refuses_one(world: World, make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(InvalidRequest, match="without enable_lora"):
        make_llm().generate("a", GREEDY, lora_request=world.requests["all"], use_tqdm=False)


@pytest.fixture
def llm_with_lora(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm(**LORA)
