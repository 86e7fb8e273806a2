"""`LLM` and `AsyncLLM` with the engine in a process of its own give the answers that they give without."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.common.errors import Cancelled, ConfigError, InternalError, InvalidRequest, WorkerLost
from pdserve.engine.client import process_client
from pdserve.engine.client.process_client import ProcessClient
from pdserve.llm import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    LoRARequest,
    NamedLogitsProcessor,
    PoolingParams,
    StructuredOutputsParams,
)
from tests.llm.conftest import TINY
from tests.support.engine.forked_engine import ROOT, start_forked
from tests.support.engine.llm_requests import MESSAGES, TEXT, greedy, prompts_of, sampled
from tests.support.models.lora_adapters import make_adapter
from tests.support.run.waiting import HANG_S

PLUG_INS = """[pdserve.logits_processors]
ban = tests.support.engine.logits_plugins:Ban
broken = tests.support.engine.logits_plugins:Broken
"""


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_client, "start_program", start_forked)


@pytest.fixture
def apart(folder: Path) -> Iterator[LLM]:
    with LLM(folder, engine_process=True, **TINY) as llm:
        yield llm
        assert client_of(llm).utility("check_pool") is True


def client_of(llm: LLM | AsyncLLM) -> ProcessClient:
    client = llm._client if isinstance(llm, AsyncLLM) else llm._engine and llm._engine.client
    assert isinstance(client, ProcessClient)
    return client


def everything(llm: LLM) -> list[Any]:
    """An answer of each kind, without what depends on the time."""
    prompts = prompts_of([1, 6, 33, 70])
    stop = llm.generate(TEXT, greedy(), use_tqdm=False)[0].outputs[0].text[4:7]
    answers: list[Any] = llm.generate(
        prompts,
        [sampled(seed=1), greedy(n=2), greedy(logprobs=2, prompt_logprobs=1), sampled(n=1, best_of=3)],
        use_tqdm=False,
    )
    answers += llm.generate(TEXT, greedy(stop=stop), use_tqdm=False)
    answers += llm.chat(MESSAGES, greedy(), use_tqdm=False)
    for answer in answers:
        answer.metrics, answer.num_cached_tokens = None, 0
    return [
        answers,
        llm.embed(prompts, PoolingParams(dimensions=4), use_tqdm=False),
        llm.beam_search(TEXT, BeamSearchParams(beam_width=2, max_tokens=4), use_tqdm=False),
    ]


def assert_same(one: Any, other: Any) -> None:
    """Equal but for the last digits of numbers: requests that arrive one by one are in other batches."""
    assert type(one) is type(other)
    if isinstance(one, msgspec.Struct):
        assert_same(msgspec.structs.asdict(one), msgspec.structs.asdict(other))
    elif isinstance(one, dict):
        assert_same(list(one.items()), list(other.items()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for part, other_part in zip(one, other, strict=True):
            assert_same(part, other_part)
    elif isinstance(one, float):
        assert one == pytest.approx(other, abs=1e-4)
    else:
        assert one == other


def test_every_kind_of_answer_is_the_same(llm: LLM, apart: LLM) -> None:
    assert_same(everything(apart), everything(llm))


@pytest.mark.slow
def test_structured_outputs(apart: LLM) -> None:
    params = greedy(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), ignore_eos=False)
    [answer] = apart.generate(TEXT, params, use_tqdm=False)
    assert answer.outputs[0].text in ("yes", "no")


@pytest.mark.slow
def test_adapters_and_drafts(folder: Path, tmp_path: Path) -> None:
    adapter = LoRARequest("a", 1, str(make_adapter(tmp_path / "a", folder, seed=1)))
    options: dict[str, Any] = {
        "enable_lora": True,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }
    prompt = [5, 6, 7, 8] * 8
    texts = []
    for engine_process in (False, True):
        with LLM(folder, engine_process=engine_process, **TINY, **options) as llm:
            answers = [
                llm.generate(prompt, greedy(max_tokens=24), lora_request=request, use_tqdm=False)[0]
                for request in (None, adapter)
            ]
            texts.append([answer.outputs[0].token_ids for answer in answers])
            if engine_process:
                assert client_of(llm).utility("get_stats")["spec_decoding_stats"]["num_draft_tokens"]
            with pytest.raises(InvalidRequest) as refused:
                llm.generate(prompt, greedy(), lora_request=LoRARequest("b", 2, str(tmp_path)), use_tqdm=False)
            assert refused.value.field == "lora_request"
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_bad_requests_are_refused_before_anything_is_computed(apart: LLM) -> None:
    mixed: list[Any] = [TEXT, [5, 320]]
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]: prompt\[1\] is 320"):
        apart.generate(mixed, greedy(), use_tqdm=False)
    with pytest.raises(InvalidRequest) as caught:
        apart.generate(TEXT, greedy(logits_processors=[print]), use_tqdm=False)
    assert caught.value.field == "logits_processors"
    assert client_of(apart).utility("get_stats")["num_added_reqs"] == 0


def test_python_objects_as_plug_ins_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"Expected `str`, got .* at `\$.logits_processors\[0\]`"):
        LLM(folder, engine_process=True, logits_processors=[print])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="unknown option 'engine_proces'; there are model, seed, engine_process"):
        LLM(folder, engine_proces=True)  # type: ignore[call-arg]


def test_plug_ins_work_by_their_entry_points(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "plug_ins-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-ins\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(PLUG_INS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with LLM(folder, engine_process=True, **TINY, logits_processors=["ban", "broken"]) as apart:
        [usual] = apart.generate(TEXT, greedy(), use_tqdm=False)
        first = usual.outputs[0].token_ids[0]
        ban = NamedLogitsProcessor(name="ban", args={"tokens": [first]})
        [other] = apart.generate(TEXT, greedy(logits_processors=[ban]), use_tqdm=False)
        assert first not in other.outputs[0].token_ids
        with pytest.raises(InvalidRequest, match="tokens must be token ids below 320"):
            apart.generate(TEXT, greedy(logits_processors=[{"name": "ban", "args": {}}]), use_tqdm=False)
        broken = {"name": "broken", "args": {"how": "raise"}}
        with pytest.raises(InternalError, match="logits processor 'broken' failed with RuntimeError"):
            apart.generate(TEXT, greedy(logits_processors=[broken]), use_tqdm=False)
        assert apart.generate(TEXT, greedy(), use_tqdm=False)[0].outputs == usual.outputs


def test_after_ctrl_c_the_engine_is_empty_and_ready(apart: LLM) -> None:
    class Interrupting:
        def update(self, n: int) -> None:
            raise KeyboardInterrupt

        def set_postfix_str(self, s: str, refresh: bool) -> None: ...

        def close(self) -> None: ...

    prompts = prompts_of([20, 30])
    expected = [answer.outputs for answer in apart.generate(prompts, greedy(), use_tqdm=False)]
    with pytest.raises(KeyboardInterrupt):
        apart.generate(
            prompts, [greedy(max_tokens=2), greedy(max_tokens=200)], use_tqdm=lambda **options: Interrupting()
        )
    assert [answer.outputs for answer in apart.generate(prompts, greedy(), use_tqdm=False)] == expected
    assert apart.reset_prefix_cache()


def test_the_death_of_the_process_ends_the_call_and_later_ones(folder: Path) -> None:
    with LLM(folder, engine_process=True, **TINY) as apart:
        os.kill(client_of(apart).process_id, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(WorkerLost, match="the engine's process ended by signal 9"):
                apart.generate(TEXT, greedy(), use_tqdm=False)


async def test_streams_are_those_of_llm(folder: Path, llm: LLM) -> None:
    prompts = prompts_of([1, 33])
    asked: list[Any] = [*prompts, TEXT]
    expected = llm.generate(asked, greedy(), use_tqdm=False)
    async with AsyncLLM(folder, engine_process=True, **TINY) as apart, asyncio.timeout(HANG_S):

        async def last(prompt: Any, **fields: Any) -> Any:
            return [answer async for answer in apart.generate(prompt, greedy(**fields))][-1]

        answers = await asyncio.gather(*(last(prompt) for prompt in asked))
        assert [answer.outputs for answer in answers] == [answer.outputs for answer in expected]
        async for item in apart.generate(TEXT, greedy(max_tokens=200), "mine"):
            answer = item
            await apart.abort("mine")
        assert answer.outputs[0].finish_reason == "abort"
        async with aclosing(apart.generate(TEXT, greedy(max_tokens=200))) as left:
            await anext(left)
        with pytest.raises(InvalidRequest):
            await last([5, 320])
        assert len((await apart.embed(TEXT)).outputs.embedding) > 1
        while not await apart._client.utility_async("check_pool"):  # noqa: ASYNC110 - it ends in another process
            await asyncio.sleep(0.01)
        assert await apart.reset_prefix_cache()
        stream = apart.generate(TEXT, greedy(max_tokens=200))
        await anext(stream)
        apart.shutdown()
        with pytest.raises(Cancelled, match="shut down"):
            async for _ in stream:
                pass
    assert not apart.is_running


async def test_the_death_of_the_process_ends_every_stream(folder: Path) -> None:
    room = TINY | {"max_model_len": 1100, "num_blocks": 600}  # for streams that are not done before the process is
    async with AsyncLLM(folder, engine_process=True, **room) as apart, asyncio.timeout(HANG_S):
        streams = [apart.generate(prompt, greedy(max_tokens=1000)) for prompt in prompts_of([8, 40])]
        await asyncio.gather(*(anext(stream) for stream in streams))
        began = time.monotonic()
        os.kill(client_of(apart).process_id, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(WorkerLost, match="signal 9"):
                async for _ in stream:
                    pass
        assert time.monotonic() - began < 10
        assert not apart.is_running


OWNER = """
import sys
from pdserve.llm import LLM
llm = LLM(sys.argv[1], num_blocks=64, engine_process=True)
print(llm._engine.client.process_id, flush=True)
llm.generate(["a"] * 8, use_tqdm=False)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.process
def test_the_process_ends_when_its_parent_is_killed(folder: Path) -> None:
    """Both started as users start them."""
    owner = subprocess.Popen(
        [sys.executable, "-P", "-c", OWNER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner.stdin, owner.stdout:
        process = Path(f"/proc/{int(owner.stdout.readline())}")
        assert process.exists()
        owner.kill()
        owner.wait(HANG_S)
        until = time.monotonic() + 10
        while process.exists() and " Z " not in (process / "stat").read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
