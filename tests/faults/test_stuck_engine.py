"""A worker whose engine hangs ends by itself, with a word, and the request goes on elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.phase_pauses import PhasePauses
from tests.support.run.waiting import eventually

pytestmark = pytest.mark.process

FLAGS = ("--dtype=float32", "--num-blocks=100", "--engine-stuck-exit-s=4", "--connector", "tcp")


async def test_a_worker_whose_engine_hangs_ends_with_status_1(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    with running_cluster(tmp_path) as cluster:
        pauses = PhasePauses(tmp_path / "pauses")
        cluster.worker_program = pauses.worker_program
        workers = [cluster.start_worker("decode", "--model", str(model), *FLAGS, name=f"decode{n}") for n in range(2)]
        prefill = cluster.start_worker("prefill", "--model", str(model), *FLAGS)
        cluster.start_router(
            "--model",
            str(model),
            "--local-prefill",
            "never",
            prefill=[prefill.address],
            decode=[worker.address for worker in workers],
        )
        async with InferenceClient(cluster.router.address) as router:
            pauses.arm("streaming")
            prompt = prompt_of(40)
            answer = await router.ask(prompt, max_tokens=30)
            oracle.check(prompt, answer.token_ids)
            [stuck] = await eventually(
                lambda: [worker for worker in workers if worker.process.poll() is not None],
                lambda: "\n\n".join(worker.read_log() for worker in workers),
            )
        assert stuck.process.poll() == 1
        said = stuck.read_log()
        assert "the engine has made no progress for 4 s (engine_stuck_exit_s)" in said
        assert "in reach" in said, "the stacks are not there"
        cluster.restart(stuck.name)
        cluster.check_pools()
