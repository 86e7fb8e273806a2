"""Whisper through real router, prefill and decode processes, against `transformers`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest

from pdserve.text.tokenization.tokenizer import Tokenizer
from pdserve.v1 import inference_pb2
from tests.support.models.wav_files import wav_file
from tests.support.models.whisper_checkpoints import EOS, RATE, Transcripts, make_whisper, sound
from tests.support.processes.cluster_processes import Cluster, pd_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S

pytestmark = [pytest.mark.process, pytest.mark.slow]

FLAGS = ("--dtype=float32", "--num-blocks=80")
REMOTE = ("--local-prefill", "never")
PATH = "/v1/audio/transcriptions"


def client(cluster: Cluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{cluster.router.http}", timeout=HANG_S, trust_env=False)


def file_of(seed: int) -> bytes:
    """Floats: the samples of `sound` as they are."""
    return wav_file(sound(seed), RATE, kind=3, bits=32)


async def ask(http: httpx.AsyncClient, file: bytes, **fields: str) -> httpx.Response:
    return await http.post(PATH, files={"file": ("a.wav", file)}, data={"language": "en"} | fields)


@pytest.mark.parametrize(
    "settings",
    [(), ("--engine-process=true", "--kv-host-mib=4")],
    ids=["plain", "engine-process-and-tier"],
)
async def test_transcripts_through_prefill_and_decode(tmp_path: Path, settings: tuple[str, ...]) -> None:
    folder = tmp_path / "model"
    theirs = make_whisper(folder)
    tokenizer = Tokenizer.from_folder(folder)
    # few blocks at decode: sequences are preempted there, evicted and placed again
    small = ("--num-blocks=14",)
    with pd_cluster(tmp_path, folder, both=(*FLAGS, *settings), decode=small, router=REMOTE) as cluster:

        def expected(seed: int, **given: Any) -> str:
            return tokenizer.decode(theirs.answer(sound(seed), 60, **given), skip_special_tokens=True).strip()

        async with client(cluster) as http:
            for again in (False, True):
                answer = await ask(http, file_of(1))
                assert answer.status_code == 200, answer.text
                assert answer.json() == {"text": expected(1), "usage": {"type": "duration", "seconds": 0.8}}, again
            answers = await asyncio.gather(*(ask(http, file_of(seed)) for seed in range(6)))
            assert [answer.json()["text"] for answer in answers] == [expected(seed) for seed in range(6)]
            plain = await ask(http, file_of(2), response_format="text", language="de")
            assert plain.headers["content-type"].startswith("text/plain")
            assert plain.text == expected(2, language="de") + "\n"
            verbose = (await ask(http, file_of(2), response_format="verbose_json")).json()
            assert (verbose["text"], verbose["language"], verbose["duration"]) == (expected(2), "en", 0.8)
            await stream(http, expected(3))
            await refusals(http)
        await over_grpc(cluster, theirs)
        cluster.check_pools()
        cluster.check_logs()


async def stream(http: httpx.AsyncClient, expected: str) -> None:
    answer = await ask(http, file_of(3), stream="true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [msgspec.json.decode(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    *deltas, done = events
    assert {event["type"] for event in deltas} == {"transcript.text.delta"}
    assert (done["type"], done["text"].strip()) == ("transcript.text.done", expected)
    assert "".join(event["delta"] for event in deltas) == done["text"]


async def over_grpc(cluster: Cluster, theirs: Transcripts) -> None:
    greedy: dict[str, Any] = {"max_tokens": 60, "ignore_eos": False}
    async with InferenceClient(cluster.router.address) as grpc_client:
        prompts = [inference_pb2.AudioPrompt(file=file_of(seed), language="en") for seed in range(1, 7)]
        answers = await grpc_client.ask_all(prompts, **greedy)
        for seed, answer in enumerate(answers, 1):
            tokens = answer.token_ids[:-1] if answer.token_ids[-1:] == [EOS] else answer.token_ids
            assert tokens == theirs.answer(sound(seed), 60)
        # sound at another rate, which over HTTP has the same text
        few = greedy | {"max_tokens": 40}
        file = wav_file(sound(8, rate=44_100), 44_100)
        of_grpc = await grpc_client.ask(inference_pb2.AudioPrompt(file=file, language="en", prompt="one two"), **few)
        async with client(cluster) as http:
            of_http = await ask(http, file, prompt="one two", max_completion_tokens="40")
        assert of_grpc.text.strip() == of_http.json()["text"]
        refused: list[tuple[inference_pb2.AudioPrompt, dict[str, Any], str]] = [
            (inference_pb2.AudioPrompt(file=file_of(1)[:-9], language="en"), {}, "audio.file is cut"),
            (
                inference_pb2.AudioPrompt(file=wav_file(sound(0, 1.5), RATE), language="en"),
                {},
                "audio.file has 1.50 seconds",
            ),
            (inference_pb2.AudioPrompt(file=file_of(1)), {}, "audio.language is needed"),
            (prompts[0], {"prompt_logprobs": 1}, "prompt_logprobs is 1, and an encoder"),
        ]
        for prompt, sampling, told in refused:
            with pytest.raises(grpc.aio.AioRpcError, match=told) as error:
                await grpc_client.ask(prompt, **sampling)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def refusals(http: httpx.AsyncClient) -> None:
    good = file_of(0)
    for file, fields, message, param in (
        (b"ID3 mp3", {}, "file cannot be read: Format not recognised", "file"),
        (good[:-10], {}, "file is cut: its header says", "file"),
        (wav_file(sound(0, 1.5), RATE), {}, "file has 1.50 seconds, at most 1 are read at once", "file"),
        (good, {"language": "xx"}, "language is 'xx', one of de, en is needed", "language"),
        (good, {"language": ""}, "language is needed, it is not detected: one of de, en", "language"),
        (good, {"temperature": "200"}, "temperature must be from 0 to 100", "temperature"),
    ):
        answer = await ask(http, file, **fields)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert message in error["message"]
        assert error["param"] == param
    answer = await http.post(PATH, json={"file": "a.wav"})
    assert answer.status_code == 415
    answer = await http.post("/v1/completions", json={"prompt": "hello"})
    assert answer.status_code == 400
    assert "prompt is given without sound" in answer.json()["error"]["message"]
    answer = await http.post(
        PATH, content=b"x" * (17 << 20), headers={"content-type": "multipart/form-data; boundary=x"}
    )
    assert answer.status_code == 413
