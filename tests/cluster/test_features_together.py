"""Features of workers, several at once: the answers of `LLM` with the same weights, cache and adapters, and whole pools after."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve.llm import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from pdserve.v1 import request_pb2
from pdserve.worker.ranks.join_ranks import WORKER_RANK
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.family_checkpoints import make_windowed_model
from tests.support.models.features import GROUPS, SHARED, TIERS, TOGETHER, WITH_GROUPS, settings_of
from tests.support.models.lora_adapters import make_adapter
from tests.support.processes.cluster_processes import Cluster, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.mooncake_master import mooncake_master
from tests.support.processes.tls_authority import Authority
from tests.support.run.waiting import HANG_S

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

COMMON: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 64, "max_model_len": 256}
_ENGINE_PROCESS = "pdserve.worker.engine_process"
ROUNDED = ("`kv_cache_dtype`",)
"""Features with which a number between two steps may be rounded to either."""
NEAR_TIE = {False: 1e-4, True: 0.03}
"""Rounded cache or not -> log-probabilities closer than this may change places."""
REGEX = "[A-C]{2}-[0-9]{3}(x|yz)"
MAX_TOKENS = 24
PROMPTS = [prompt_of(90 + 7 * seed, seed) for seed in range(4)]


@dataclass
class Expected:
    """Answers of `LLM`."""

    greedy: dict[tuple[int, str], tuple[list[int], list[float]]] = field(default_factory=dict)
    """(prompt, adapter) -> tokens, and by how much each was more likely than the next."""
    sampled: list[list[int]] = field(default_factory=list)
    forms: list[list[int]] = field(default_factory=list)


def answers_of(model: Path, features: Sequence[str], adapter: Path) -> Expected:
    kept = ["quantization", "kv_cache_dtype", "enable_lora", "max_loras", "max_lora_rank"]
    if "`quantization`" in features:  # each rank rounds its part of a row by a scale of its own
        kept.append("tensor_parallel_size")
    options = {name: value for name, value in settings_of(features).items() if name in kept}
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    expected = Expected()
    with LLM(str(model), **COMMON, num_blocks=256, **options) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
        for name in ("", "own") if "enable_lora" in options else ("",):
            lora = LoRARequest(name, 1, str(adapter)) if name else None
            for place, answer in enumerate(llm.generate(prompts, greedy, use_tqdm=False, lora_request=lora)):
                output = answer.outputs[0]
                assert output.logprobs is not None
                gaps = [_gap([one.logprob for one in found.values()]) for found in output.logprobs]
                expected.greedy[place, name] = output.token_ids, gaps
        sampled = SamplingParams(n=2, seed=7, temperature=0.9, top_p=0.95, max_tokens=MAX_TOKENS, ignore_eos=True)
        [answer] = llm.generate(prompts[0], sampled, use_tqdm=False)
        expected.sampled = [output.token_ids for output in answer.outputs]
        form = SamplingParams(
            seed=3, temperature=0.8, max_tokens=MAX_TOKENS, structured_outputs=StructuredOutputsParams(regex=REGEX)
        )
        expected.forms = [answer.outputs[0].token_ids for answer in llm.generate(prompts, form, use_tqdm=False)]
    return expected


def _gap(logprobs: list[float]) -> float:
    first, second, *_ = sorted(logprobs, reverse=True)
    return first - second


@dataclass
class Together:
    """A cluster with these features, and its router's client."""

    features: tuple[str, ...]
    cluster: Cluster
    expected: Expected
    moves: bool
    """Running sequences move between two decode workers all the time."""

    @property
    def is_rounded(self) -> bool:
        return any(feature in self.features for feature in ROUNDED)


@pytest.fixture(params=[False, True], ids=["stay", "move"])
def moves(request: pytest.FixtureRequest) -> bool:
    moves: bool = request.param
    return moves


@pytest.fixture(params=[*TOGETHER, *WITH_GROUPS], ids=lambda features: "-".join(name.strip("`") for name in features))
def together(
    request: pytest.FixtureRequest, tiny_checkpoints: Callable[..., Path], tmp_path: Path, moves: bool
) -> Iterator[Together]:
    features: tuple[str, ...] = request.param
    if "NIXL" in features:
        pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    has_groups = GROUPS in features
    model = make_windowed_model(tmp_path / "gemma3") if has_groups else tiny_checkpoints("llama")
    adapter = make_adapter(tmp_path / "adapter", model, seed=1, spread=0.3)
    settings = {"connector": "tcp"} | COMMON | settings_of(features)
    settings["num_blocks"] = 256
    if TIERS in features:
        settings["kv_disk_path"] = str(tmp_path / "disk")
    if "kv_host_mib" in settings:  # a pool that holds two of the prompts
        settings["num_blocks"] = 9 if has_groups else 20
    if "enable_lora" in settings:
        settings["lora_modules"] = f"own={adapter}"
    authority = Authority(tmp_path / "inside") if "TLS" in features else None
    with ExitStack() as stack:
        if SHARED in features:
            settings["kv_store"] = stack.enter_context(mooncake_master(tmp_path)).url(segment_mib=16)
        flags = [f"--{name}={_as_text(value)}" for name, value in settings.items()]
        cluster = stack.enter_context(running_cluster(tmp_path))
        if authority is not None:
            cluster.tls = authority.identity().client
        workers = []
        for name in ("prefill", "decode", "decode-1") if moves else ("prefill", "decode"):
            own = authority.issue().flags() if authority is not None else ()
            role = name.removesuffix("-1")
            workers.append(cluster.launch_worker(role, "--model", str(model), *flags, *own, name=name))
        expected = answers_of(model, features, adapter)
        for worker in workers:
            cluster.wait_for_worker(worker)
        own = authority.issue().flags() if authority is not None else ()
        cluster.start_router(
            *("--model", str(model), "--local-prefill=never", f"--rebalance={'always' if moves else 'never'}", *own),
            prefill=[workers[0].address], decode=[worker.address for worker in workers[1:]],
        )  # fmt: skip
        yield Together(features, cluster, expected, moves)
        cluster.check_pools()
        cluster.check_logs()


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


async def test_i1_features_together_change_no_answer(together: Together) -> None:
    expected, margin = together.expected, NEAR_TIE[together.is_rounded]
    async with InferenceClient(together.cluster.router.address) as client:
        for _ in range(2):  # the second time from a prefix cache, or from the host-memory tier
            for (place, name), (tokens, gaps) in expected.greedy.items():
                answer = await client.ask(
                    PROMPTS[place], model=name, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True
                )
                assert "kv_landed" in answer.moments
                differs = [
                    at for at, pair in enumerate(zip(answer.token_ids, tokens, strict=True)) if len(set(pair)) > 1
                ]
                assert not differs or gaps[differs[0]] < margin, (place, name, differs[0], gaps[differs[0]])
        sampled: list[list[int]] = [[], []]
        given: dict[str, Any] = {
            "n": 2,
            "seed": 7,
            "temperature": 0.9,
            "top_p": 0.95,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
        }
        async for message in client.start(PROMPTS[0], **given):
            sampled[message.index] += message.token_ids
        assert [len(tokens) for tokens in sampled] == [MAX_TOKENS] * 2
        assert together.is_rounded or sampled == expected.sampled
        form = request_pb2.StructuredOutputs(regex=REGEX)
        for prompt, tokens in zip(PROMPTS, expected.forms, strict=True):
            answer = await client.ask(prompt, max_tokens=MAX_TOKENS, seed=3, temperature=0.8, structured_outputs=form)
            # the prompt may end within a character
            assert re.fullmatch("\ufffd?" + REGEX, answer.text), answer.text
            assert together.is_rounded or answer.token_ids == tokens
    if together.moves:
        moved, failed = (
            together.cluster.metric(together.cluster.router, "pdserve_migrations_total", f'outcome="{outcome}"')
            for outcome in ("moved", "failed")
        )
        assert moved > len(expected.greedy)
        assert failed <= moved / 10
    check_use(together)


def check_use(together: Together) -> None:
    """Each feature was in use, and not merely switched on."""
    cluster, features = together.cluster, together.features
    prefill, decode = (cluster.services[role] for role in ("prefill", "decode"))
    if TIERS in features or SHARED in features:
        assert cluster.metric(decode, "pdserve_kv_host_blocks_loaded_total") > 0
        assert cluster.metric(decode, "pdserve_kv_store_blocks_written_total") > 0
    if "`speculative_config`" in features:
        assert cluster.metric(decode, "pdserve_spec_decode_num_draft_tokens_total") > 0
    connector = "nixl" if "NIXL" in features else "tcp"
    with urllib.request.urlopen(f"{cluster.metrics_url(decode)}/metrics", timeout=HANG_S) as response:
        metrics = response.read().decode()
    moved = re.search(rf'^pdserve_kv_transfer_blocks_total.*"{connector}".* (\S+)$', metrics, re.MULTILINE)
    assert moved is not None
    assert float(moved[1]) > 0
    for worker in (prefill, decode):
        commands = [child.cmdline() for child in psutil.Process(worker.process.pid).children(recursive=True)]
        assert any(WORKER_RANK in command for command in commands) is ("`tensor_parallel_size`" in features)
        assert any(_ENGINE_PROCESS in command for command in commands) is ("`engine_process`" in features)
