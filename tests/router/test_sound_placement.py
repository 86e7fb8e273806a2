"""A router counts the encoder's positions of a sound where it admits and places a transcription."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.common.security.fingerprint import tokenizer_fingerprint
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.audio_folder import POSITIONS, PROMPT_IDS, RATE, save_audio_folder
from tests.router.fake_worker import LAYOUT, play, said
from tests.support.models.wav_files import wav_file

BLOCK_SIZE = LAYOUT.block_size
ENCODER_BLOCKS = -(-POSITIONS // BLOCK_SIZE)
NUM_BLOCKS = ENCODER_BLOCKS + 1
"""Blocks of a prompt: the decoder's tokens have one."""
LONG = "a text of more than one block that precedes the sound"
FILE = wav_file(np.linspace(-1, 1, RATE // 50), RATE)


@pytest.fixture
def cluster(cluster: Any, tmp_path: Path) -> Any:
    """A cluster whose model reads sound."""
    folder = save_audio_folder(tmp_path / "audio")
    cluster.folder, cluster.fingerprint = folder, tokenizer_fingerprint(folder)
    return cluster


async def transcribe(cluster: Any, prompt: str = "") -> str:
    request = inference_pb2.GenerateRequest(
        audio=inference_pb2.AudioPrompt(file=FILE, language="en", prompt=prompt),
        sampling=request_pb2.SamplingParams(max_tokens=4),
    )
    return "".join([response.text async for response in cluster.grpc.Generate(request)])


def hold(cluster: Any) -> None:
    """From now on workers admit requests and say nothing."""
    for worker in cluster.workers:
        worker.script = play(lambda worker, call: asyncio.Event().wait())


async def placements(cluster: Any) -> list[dict[str, Any]]:
    """Newest first."""
    found: list[dict[str, Any]] = (await cluster.http.get("/debug/routing")).json()["placements"]
    return found


async def cancel(cluster: Any, tasks: list[asyncio.Task[str]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await cluster.idle()


async def test_placement_counts_blocks_and_tokens_of_the_encoder(cluster: Any) -> None:
    await cluster.start(2, 2, local_prefill="never")
    hold(cluster)
    running = []
    for count in (1, 2):
        running.append(asyncio.create_task(transcribe(cluster)))
        await asyncio.gather(*(worker.called(1) for worker in cluster.workers[count - 1 :: 2]))
    second, first = await placements(cluster)
    assert {first["prefill"], second["prefill"]} == {"prefill0", "prefill1"}
    assert {first["decode"], second["decode"]} == {"decode0", "decode1"}
    assert [placed["prompt_tokens"] for placed in (first, second)] == [len(PROMPT_IDS)] * 2
    at = {view["worker_id"]: view for view in second["candidates"]}
    assert at[first["prefill"]]["waiting_tokens"] == ENCODER_BLOCKS * BLOCK_SIZE + len(PROMPT_IDS)
    assert at[first["prefill"]]["held_blocks"] == NUM_BLOCKS
    # the output grows at decode
    assert at[first["decode"]]["held_blocks"] == NUM_BLOCKS + 1
    await cancel(cluster, running)


async def test_equal_texts_of_other_sounds_are_no_cached_prefix(cluster: Any) -> None:
    await cluster.start(local_prefill="never")
    for _ in range(2):
        assert await transcribe(cluster, LONG) == said(4)
    newest, _ = await placements(cluster)
    assert newest["prompt_tokens"] > 2 * BLOCK_SIZE
    assert {view["overlap_blocks"] for view in newest["candidates"]} == {0}


async def test_admission_waits_for_blocks_of_the_encoder(cluster: Any) -> None:
    await cluster.start(local_prefill="never")
    hold(cluster)
    num_blocks = 100 * len(cluster.workers)
    most = num_blocks // NUM_BLOCKS
    running = [asyncio.create_task(transcribe(cluster)) for _ in range(most)]
    for worker in cluster.workers:
        await worker.called(most)
    running.append(asyncio.create_task(transcribe(cluster)))
    await cluster.queued(1)
    await cancel(cluster, running)
