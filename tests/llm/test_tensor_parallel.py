"""`LLM` with a model that two processes share: the answers of one rank, and an end with the first of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import ConfigError, NotFound, WorkerLost
from pdserve.common.ipc.child_process import ChildProcess
from pdserve.common.settings.speculative_config import SpeculativeConfig
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from pdserve.engine.lora.adapter_store import AdapterStore
from pdserve.engine.ranks import rank_processes
from pdserve.engine.ranks.rank_processes import RankProcesses
from pdserve.engine.runner.pool.memory_needs import memory_needs
from pdserve.llm import LLM, LoRARequest
from tests.llm.conftest import TINY
from tests.support.engine.forked_engine import start_rank
from tests.support.engine.llm_requests import core_of, greedy, prompts_of, sampled
from tests.support.models.lora_adapters import make_adapter, merged_checkpoint
from tests.support.models.oracle import Oracle
from tests.support.run.waiting import HANG_S, wait_until

DEATH_S = 5.0
"""Seconds within which the end of a rank ends the engine."""


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "start_program", start_rank)


@pytest.fixture
def shared(folder: Path) -> Iterator[LLM]:
    """Two ranks, whose processes have ended after the test."""
    with LLM(folder, tensor_parallel_size=2, **TINY) as llm:
        processes = ranks_of(llm)._processes
        yield llm
    assert all(process.wait(0) is not None for process in processes)


def ranks_of(llm: LLM) -> RankProcesses:
    ranks: Any = core_of(llm).executor
    assert isinstance(ranks._ranks, RankProcesses)
    return ranks._ranks


def test_i1_answers_are_those_of_transformers_and_of_one_rank(
    shared: LLM, make_llm: Callable[..., LLM], oracle: Oracle
) -> None:
    prompts = [[3, 14, 15], list(range(40)), [9] * 17]
    for prompt, answer in zip(prompts, shared.generate(prompts, greedy(ignore_eos=True), use_tqdm=False), strict=True):
        oracle.check(prompt, answer.outputs[0].token_ids)
    params = [sampled(seed=1), greedy(n=2), greedy(logprobs=2, prompt_logprobs=1), greedy(repetition_penalty=1.3)]
    texts = prompts_of([1, 6, 33, 70])
    answers = (llm.generate(texts, params, use_tqdm=False) for llm in (shared, make_llm()))
    for one, other in zip(*answers, strict=True):
        assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
    core_of(shared).scheduler.check(idle=True)


def test_i5_drafts_of_a_model_change_no_answer_of_ranks(
    folder: Path, make_llm: Callable[..., LLM], oracle: Oracle
) -> None:
    """The model drafts for itself, at rank 0 alone: nearly every draft stands."""
    drafts = {"model": str(folder), "num_speculative_tokens": 3}
    prompts = prompts_of([3, 40, 17])
    params = [greedy(ignore_eos=True), sampled(seed=1), greedy(n=2, temperature=0.9, seed=4)]
    with LLM(folder, tensor_parallel_size=2, speculative_config=drafts, **TINY) as llm:
        answers = llm.generate(prompts, params, use_tqdm=False)
        core = core_of(llm)
        core.scheduler.check(idle=True)
        stats = core.scheduler.drafts.stats
        assert stats is not None
        assert stats.num_accepted_tokens > 5
    oracle.check(prompts[0], answers[0].outputs[0].token_ids)
    for one, other in zip(answers, make_llm().generate(prompts, params, use_tqdm=False), strict=True):
        assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]


def compute_on(work: Callable[[], object]) -> None:
    until = time.monotonic() + HANG_S
    while time.monotonic() < until:
        work()


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "between steps"])
def test_the_death_of_a_rank_is_the_engines(shared: LLM, is_idle: bool) -> None:
    engine = shared.llm_engine
    if not is_idle:
        engine.add_request("r", {"prompt_token_ids": [1, 2, 3]}, greedy(max_tokens=200, ignore_eos=True))
        engine.step()
    [process] = ranks_of(shared).process_ids
    os.kill(process, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerLost, match="rank 1 ended by signal 9"):
        compute_on(lambda: shared.generate("x", greedy(max_tokens=50), use_tqdm=False) if is_idle else engine.step())
    assert time.monotonic() - began < 2 * DEATH_S
    with pytest.raises(WorkerLost):
        shared.generate("x", greedy(), use_tqdm=False)


@pytest.mark.slow
def test_a_stopped_rank_ends_the_engine_after_the_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, tensor_parallel_size=2, **TINY) as llm:
        ranks = ranks_of(llm)
        ranks.group.limit_waits(1.0)
        [process] = ranks.process_ids
        os.kill(process, signal.SIGSTOP)
        with pytest.raises(WorkerLost):
            llm.generate("x", greedy(), use_tqdm=False)
    wait_until(lambda: not Path(f"/proc/{process}").exists(), "the end of the stopped rank")


@pytest.mark.slow
def test_ranks_share_adapters(folder: Path, oracle: Oracle, tmp_path: Path) -> None:
    """Two in turns, in one slot; then one that a rank cannot read any more fails its own request on all ranks."""
    adapters = [make_adapter(tmp_path / str(seed), folder, seed=seed) for seed in (1, 2)]
    oracles = [
        oracle,
        *(Oracle(merged_checkpoint(tmp_path / f"merged-{path.name}", folder, path)) for path in adapters),
    ]
    first, second = (LoRARequest(path.name, 1, str(path)) for path in adapters)
    prompts = [list(range(5, 24)), [7] * 9, [3, 14, 15]]
    with LLM(folder, tensor_parallel_size=2, enable_lora=True, max_lora_rank=8, max_cpu_loras=1, **TINY) as llm:
        for requests in ([None, second, first], [None, first, second]):
            answers = llm.generate(prompts, greedy(ignore_eos=True), lora_request=requests, use_tqdm=False)
            for request, prompt, answer in zip(requests, prompts, answers, strict=True):
                number = 0 if request is None else int(request.lora_name)
                oracles[number].check(prompt, answer.outputs[0].token_ids)
        # rank 0 has it in main memory, rank 1 has the second one there and reads the folder when the step begins
        store = core_of(llm).adapters
        assert isinstance(store, AdapterStore)
        store.get(store.add(adapters[0]))
        llm.llm_engine.add_request("r", {"prompt_token_ids": prompts[0]}, greedy(), lora_request=first)
        make_adapter(adapters[0], folder, seed=3)
        with pytest.raises(NotFound, match="cannot be read by another rank"):
            compute_on(llm.llm_engine.step)
        [answer] = llm.generate([prompts[1]], greedy(ignore_eos=True), lora_request=second, use_tqdm=False)
        oracles[2].check(prompts[1], answer.outputs[0].token_ids)
        core_of(llm).scheduler.check(idle=True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size is 3, which does not divide num_attention_heads \(4\)"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
    ],
)
def test_what_ranks_cannot_share_is_refused_before_a_process_starts(
    options: dict[str, Any], named: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(descriptor: int, module: str) -> ChildProcess:
        raise AssertionError("a process was started")

    monkeypatch.setattr(rank_processes, "start_program", start)
    with pytest.raises(ConfigError, match=named):
        LLM(folder, **(TINY | options))


def test_a_workers_memory_is_that_of_all_its_ranks(folder: Path) -> None:
    one, two = (
        memory_needs(folder, DecodeSettings(dtype="float32", num_blocks=8, tensor_parallel_size=size))
        for size in (1, 2)
    )
    assert 2 * two.pool == one.pool
    assert one.weights < 2 * two.weights < 1.1 * one.weights, "norms and small tensors alone are on both"
    assert two.host == 2 * (two.process + two.weights + two.pool + two.step)
    tier = memory_needs(folder, DecodeSettings(dtype="float32", num_blocks=8, tensor_parallel_size=2, kv_host_mib=5))
    assert tier.host == two.host + 2 * (5 << 20)
    drafts = SpeculativeConfig(model=str(folder), num_speculative_tokens=3)
    drafted = memory_needs(
        folder, DecodeSettings(dtype="float32", num_blocks=8, tensor_parallel_size=2, speculative_config=drafts)
    )
    assert drafted.draft_model > one.weights
    assert drafted.host == 2 * (drafted.process + two.weights + two.pool + drafted.step) + drafted.draft_model
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3"):
        memory_needs(folder, DecodeSettings(tensor_parallel_size=3))


def test_the_ports_of_all_ranks_must_exist() -> None:
    PrefillSettings(model="demo", data_port=65534, tensor_parallel_size=2).verify()
    with pytest.raises(ConfigError, match="data_port is 65535 and tensor_parallel_size is 2"):
        PrefillSettings(model="demo", data_port=65535, tensor_parallel_size=2).verify()
