"""Workers that die, come back, start late or do not fit."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import KEY, Cluster, Service, pd_cluster, running_cluster
from tests.support.processes.forked_process import ForkedProcess
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.phase_pauses import PhasePauses
from tests.support.run.waiting import HANG_S, eventually

pytestmark = pytest.mark.process

FLAGS = ("--dtype=float32", "--num-blocks=300", "--max-num-batched-tokens=16")
SOON_S = 10.0
"""Twice what a worker's death may take to be noticed."""


async def kill_in_phase(cluster: Cluster, pauses: PhasePauses) -> Service:
    """SIGKILL the worker that pauses in the armed phase."""
    victim = await pauses.reached(cluster)
    victim.signal(signal.SIGKILL)
    await asyncio.to_thread(victim.process.wait, HANG_S)
    return victim


async def wait_for_remote(router: InferenceClient) -> None:
    """Until a request goes through prefill/decode again."""
    deadline = time.monotonic() + HANG_S
    seed = 0
    while "kv_landed" not in (await router.ask(prompt_of(40, seed), max_tokens=4)).moments:
        assert time.monotonic() < deadline, "prefill is not used again"
        seed += 1
        await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_death_of_the_only_prefill_worker(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_checkpoints("llama", num_hidden_layers=4)
    oracle = Oracle(model)
    pauses = PhasePauses(tmp_path / "pauses")
    with pd_cluster(tmp_path, model, both=FLAGS, worker_program=pauses.worker_program) as cluster:
        async with InferenceClient(cluster.router.address) as router:
            prompt = prompt_of(300)
            await wait_for_remote(router)  # a router is ready before it has met every worker
            pauses.arm("computing")
            asked = asyncio.create_task(router.ask(prompt, max_tokens=8))
            assert (await kill_in_phase(cluster, pauses)).role == "prefill"
            since = time.monotonic()
            answer = await asked
            assert time.monotonic() - since < 2 * SOON_S
            assert "kv_landed" not in answer.moments, "it was not prefilled locally"
            oracle.check(prompt, answer.token_ids)
            await asyncio.to_thread(cluster.restart, "prefill")
            await wait_for_remote(router)
        cluster.check_pools()
        cluster.check_logs()


@pytest.mark.slow
async def test_death_of_the_only_prefill_worker_when_decode_may_not_prefill(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_checkpoints("llama", num_hidden_layers=4)
    pauses = PhasePauses(tmp_path / "pauses")
    never = ("--local-prefill", "never")
    with pd_cluster(tmp_path, model, both=FLAGS, router=never, worker_program=pauses.worker_program) as cluster:
        async with InferenceClient(cluster.router.address) as router:
            pauses.arm("computing")
            asked = asyncio.create_task(router.ask(prompt_of(300), max_tokens=8))
            assert (await kill_in_phase(cluster, pauses)).role == "prefill"
            since = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asked
            assert time.monotonic() - since < 2 * SOON_S
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "prefill" in (caught.value.details() or "")
            await asyncio.to_thread(cluster.restart, "prefill")
            await wait_for_remote(router)
        cluster.check_pools()
        cluster.check_logs()


def num_sampled(service: Service) -> int:
    """Tokens that a worker has sampled for routers, of calls that have ended."""
    base = re.findall(r"metrics (http://\S+/metrics)", service.read_log())[-1]
    text = httpx.get(base, timeout=HANG_S, trust_env=False).text
    return int(float(re.findall(r"^pdserve_sampled_tokens_total (\S+)$", text, re.MULTILINE)[0]))


@pytest.mark.slow
async def test_i4_a_stream_goes_on_at_another_decode_worker_after_the_last_token(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_checkpoints("llama")
    pauses = PhasePauses(tmp_path / "pauses")
    prompt, max_tokens = prompt_of(40), 400
    sampling: dict[str, Any] = {
        "temperature": 0.9,
        "seed": 7,
        "presence_penalty": 0.5,
        "min_tokens": 300,
        "ignore_eos": True,
    }
    with running_cluster(tmp_path, pauses.worker_program) as cluster:
        common = ("--model", str(model), *FLAGS)
        prefill = cluster.start_worker("prefill", *common)
        decodes = [cluster.start_worker("decode", *common, name=name) for name in ("decode", "decode-2")]
        cluster.start_router(
            "--model", str(model), "--local-prefill", "never",
            prefill=[prefill.address], decode=[worker.address for worker in decodes],
        )  # fmt: skip
        async with InferenceClient(cluster.router.address) as router:
            undisturbed = (await router.ask(prompt, max_tokens=max_tokens, **sampling)).token_ids
            # the first token was prefill's; a call is counted a moment after its client has the last one
            [first] = await eventually(lambda: [w for w in decodes if num_sampled(w) == max_tokens - 1])
            token_ids: list[int] = []
            pauses.arm("streaming")
            killed = asyncio.create_task(kill_in_phase(cluster, pauses))
            async for message in router.start(prompt, max_tokens=max_tokens, **sampling):
                token_ids += message.token_ids
                if message.finish_reason:
                    usage = message.usage
        victim = await killed
        assert victim in decodes
        assert token_ids == undisturbed
        assert (usage.prompt_tokens, usage.completion_tokens) == (40, max_tokens)
        [heir] = [worker for worker in decodes if worker is not victim]
        failed = re.findall(r"attempt 0 failed.* after (\d+) tokens", cluster.router.read_log())
        assert len(failed) == 1
        # all that the client had, and the one that prefill gave next, came from elsewhere
        sampled = max_tokens - int(failed[0]) - 1 + (max_tokens - 1 if heir is first else 0)
        await eventually(lambda: num_sampled(heir) >= sampled)
        assert num_sampled(heir) == sampled
        cluster.check_pools()
        cluster.check_logs()


@pytest.mark.slow
async def test_i4_a_stream_goes_on_when_the_only_decode_worker_stood_still(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_checkpoints("llama")
    pauses = PhasePauses(tmp_path / "pauses")
    prompt = prompt_of(40)
    sampling: dict[str, Any] = {"max_tokens": 400, "temperature": 0.9, "seed": 7, "ignore_eos": True}
    decode_flags, program = ("--stream-interval=3",), pauses.worker_program
    with pd_cluster(tmp_path, model, both=FLAGS, decode=decode_flags, worker_program=program) as cluster:
        async with InferenceClient(cluster.router.address) as router:
            undisturbed = await router.ask(prompt, **sampling)
            pauses.arm("streaming")
            asked = asyncio.create_task(router.ask(prompt, **sampling))
            decode = await pauses.reached(cluster)
            assert decode.role == "decode"
            decode.signal(signal.SIGSTOP)
            pauses.go_on()
            await eventually(lambda: "attempt 0 failed" in cluster.router.read_log())
            decode.signal(signal.SIGCONT)
            assert (await asked).token_ids == undisturbed.token_ids
        cluster.check_pools()
        cluster.check_logs()


@pytest.mark.slow
async def test_services_start_in_any_order(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_checkpoints("qwen2")
    with running_cluster(tmp_path) as cluster:
        common = ("--model", str(model), "--dtype=float32", "--num-blocks=64")
        first = cluster.start_worker("prefill", *common)
        port = int(first.address.rpartition(":")[2])
        first.signal(signal.SIGTERM)
        first.process.wait(HANG_S)
        # the router is first, and knows addresses at which nobody answers yet
        decode = cluster.start_worker("decode", *common)
        cluster.start_router("--model", str(model), prefill=[f"127.0.0.1:{port}"], decode=[decode.address])
        async with InferenceClient(cluster.router.address) as router:
            alone = await router.ask(prompt_of(40), max_tokens=6)
            assert "kv_landed" not in alone.moments
            await asyncio.to_thread(cluster.start_worker, "prefill", *common, port=port)
            await wait_for_remote(router)
            assert (await router.ask(prompt_of(40), max_tokens=6)).token_ids == alone.token_ids
        cluster.check_pools()


async def test_a_worker_with_another_block_size_is_left_out(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_checkpoints("llama")
    common = ("--dtype=float32", "--num-blocks=64")
    with pd_cluster(tmp_path, model, both=common, prefill=("--block-size=32",)) as cluster:
        async with InferenceClient(cluster.router.address) as router:
            answer = await router.ask(prompt_of(40), max_tokens=6)
            Oracle(model).check(prompt_of(40), answer.token_ids)
            assert "kv_landed" not in answer.moments
        assert "block_size" in cluster.router.read_log()
        cluster.check_pools()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["prefill", "--model", "/nonexistent"], "/nonexistent"),
        (["decode", "--host", "0.0.0.0"], "--insecure"),
        (["decode", "--block-sise=4"], "block-sise"),
        (["decode", "--block-size=0"], "block_size"),
        (["decode", "--block-size"], "block-size"),
        (["router", "--decode", "nowhere"], "nowhere"),
    ],
)
def test_wrong_settings_are_named_before_anything_starts(arguments: list[str], named: str, tmp_path: Path) -> None:
    check_refused(tmp_path / "log", arguments, named)


def check_refused(log: Path, arguments: list[str], named: str) -> None:
    """The command ends with status 2, and says what was wrong."""
    with log.open("wb") as output:
        command = ["-m", "pdserve.cli.main", *arguments]
        process = ForkedProcess(command, output=output.fileno(), environ={"PDSERVE_DEPLOYMENT_KEY": KEY})
    assert process.wait(HANG_S) == 2, log.read_text()
    assert named in log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_port_in_use_is_named(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_checkpoints("llama")
    with running_cluster(tmp_path) as cluster:
        worker = cluster.start_worker("decode", "--model", str(model), "--num-blocks=16")
        port = worker.address.rpartition(":")[2]
        second = cluster.launch_worker(
            "decode", "--model", str(model), "--num-blocks=16", name="second", port=int(port)
        )
        assert second.process.wait(HANG_S) == 2
        assert f"127.0.0.1:{port}" in second.read_log()
        assert "Traceback" not in second.read_log()


@pytest.mark.slow
def test_half_written_and_unsupported_model_folders_are_named(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    good = tiny_checkpoints("llama")
    for name, change, named in (
        ("truncated", lambda folder: _truncate(folder / "model.safetensors"), "model.safetensors"),
        ("other", lambda folder: _replace(folder / "config.json", "LlamaForCausalLM", "MambaForCausalLM"), "Mamba"),
        ("broken", lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for path in good.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        change(folder)
        check_refused(tmp_path / f"{name}.log", ["prefill", "--model", str(folder)], named)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _replace(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))
