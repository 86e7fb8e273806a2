"""Sound over gRPC: how it reaches the workers, and clear refusals of hostile sound in bounded memory."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.security.fingerprint import tokenizer_fingerprint
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.audio_folder import PREVIOUS, PROMPT_IDS, RATE, SECONDS, save_audio_folder
from tests.router.fake_worker import Call, play, said, tokens
from tests.support.models.wav_files import wav_file
from tests.support.run.loop_watch import LOOP_S, LoopWatch

MAX_GROWN_BYTES = 64 << 20
"""Memory at its peak, beyond that before the requests."""
SAMPLES = np.linspace(-1, 1, RATE // 10, dtype=np.float32)
GOOD = wav_file(SAMPLES, RATE, kind=3, bits=32)
STREAMED = GOOD[:4] + b"\xff\xff\xff\xff" + GOOD[8:12]
"""The beginning of a WAV file of unknown size."""
NOISE = np.random.default_rng(3).bytes(3 << 20)


def silence(seconds: float, rate: int = RATE, **fields: Any) -> bytes:
    return wav_file(np.zeros(int(seconds * rate), np.float32), rate, **fields)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("empty", {"file": b""}, "audio.file is no file of sound that is read: WAV of PCM or floats, FLAC, OGG and MP3 are read"),
    ("another format", {"file": b"FORM" + NOISE}, "audio.file is no file of sound that is read"),
    ("noise", {"file": STREAMED + NOISE}, "audio.file cannot be read: "),
    ("cut", {"file": GOOD[:-10]}, f"audio.file is cut: its header says {len(GOOD)} bytes, {len(GOOD) - 10} are there"),
    ("huge by its header", {"file": GOOD[:4] + struct.pack("<I", 2**32 - 2) + GOOD[8:]},
     "audio.file is cut: its header says 4294967302 bytes"),
    ("long", {"file": silence(2.5)}, f"audio.file has 2.50 seconds, at most {SECONDS} are read at once"),
    ("long in few bytes", {"file": silence(900, 4_000, bits=8)}, f"audio.file has 900.00 seconds, at most {SECONDS}"),
    ("no samples", {"file": silence(0)}, "audio.file has no samples"),
    ("many chunks", {"file": wav_file(SAMPLES, RATE, chunks=[(b"junk", b"")] * 100_000)},
     "audio.file cannot be read: "),
    ("a type that is not read", {"file": wav_file(SAMPLES, RATE, header={"kind": 85})}, "audio.file "),
    ("channels", {"file": wav_file(SAMPLES, RATE, header={"channels": 60_000})}, "audio.file cannot be read: "),
    ("rate", {"file": wav_file(SAMPLES, RATE, header={"rate": 2**30})},
     "audio.file has 1073741824 samples per second, 4000 to 192000 are read"),
    ("no number", {"file": wav_file(np.full(90, np.nan), RATE, kind=3, bits=32)}, "audio.file: sample 0 is nan"),
    ("language", {"language": "xx"}, "audio.language is 'xx', one of en is needed"),
    ("a long language", {"language": "x" * 2**20}, "audio.language is 'xxxxxxxx"),
    ("no language", {"language": None}, "audio.language is needed, it is not detected: one of en"),
    ("prompt", {"prompt": "a" * 2**20}, "audio.prompt has 1048576 bytes, at most 524288 are tokenized at once"),
]  # fmt: skip


@pytest.fixture
def cluster(cluster: Any, tmp_path: Path) -> Any:
    """A cluster whose model reads sound."""
    folder = save_audio_folder(tmp_path / "audio")
    cluster.folder, cluster.fingerprint = folder, tokenizer_fingerprint(folder)
    return cluster


def request_of(*, sampling: dict[str, Any] | None = None, fields: dict[str, Any] | None = None, **audio: Any) -> Any:
    given = {"file": GOOD, "language": "en"} | audio
    return inference_pb2.GenerateRequest(
        audio=inference_pb2.AudioPrompt(**given),
        sampling=request_pb2.SamplingParams(**({"max_tokens": 4} | (sampling or {}))),
        **(fields or {}),
    )


async def text_of(cluster: Any, request: Any) -> str:
    return "".join([response.text async for response in cluster.grpc.Generate(request)])


async def refusal(cluster: Any, request: Any, method: str = "Generate") -> grpc.aio.AioRpcError:
    call = cluster.grpc.Session(iter([request])) if method == "Session" else cluster.grpc.Generate(request)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        [_ async for _ in call]
    error: grpc.aio.AioRpcError = refused.value
    return error


def at(worker: Any) -> GenerationRequest:
    """The last request there."""
    call: Call = worker.calls[-1]
    return call.request


async def test_the_samples_reach_prefill_alone(cluster: Any) -> None:
    await cluster.start(local_prefill="never")
    assert await text_of(cluster, request_of(prompt="bc")) == said(4)
    of_p, of_d = at(cluster.of("prefill")), at(cluster.of("decode"))
    expected = [PREVIOUS, *cluster_tokens("bc"), *PROMPT_IDS]
    assert of_p.prompt_token_ids == of_d.prompt_token_ids == expected
    [at_p], [at_d] = of_p.mm_features, of_d.mm_features
    assert np.frombuffer(at_p.data, "<f4").tolist() == SAMPLES.tolist()
    assert (at_p.modality, at_p.grid_thw) == ("audio", (1, 1, len(SAMPLES)))
    assert (at_d.identifier, at_d.data) == (at_p.identifier, b"")


def cluster_tokens(text: str) -> list[int]:
    """A space precedes the text."""
    return [*tokens("Ġ"), *tokens(text)]


async def test_without_max_tokens_the_rest_of_the_length_is_written(cluster: Any) -> None:
    await cluster.start()
    request = request_of()
    request.sampling.ClearField("max_tokens")
    worker = cluster.of("decode")
    assert await text_of(cluster, request) == said(worker.max_model_len - len(PROMPT_IDS))


async def test_each_is_refused_by_name(cluster: Any) -> None:
    await cluster.start()
    assert await text_of(cluster, request_of()) == said(4)
    requests = [(name, request_of(**audio), told) for name, audio, told in REFUSED]
    with LoopWatch() as watch:
        for name, request, told in requests:
            error, other = await asyncio.gather(refusal(cluster, request), text_of(cluster, request_of()))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            details = error.details() or ""
            assert details.startswith(told), name
            assert len(details) < 400
            assert other == said(4)
            assert watch.longest_s < LOOP_S, (name, watch.callback)
            assert watch.grown_bytes < MAX_GROWN_BYTES, name


async def test_a_message_of_too_many_bytes(cluster: Any) -> None:
    await cluster.start(max_request_bytes=1 << 20)
    error = await refusal(cluster, request_of(file=bytes(5 << 18)))
    assert "at most 1048576 are allowed (max_request_bytes)" in (error.details() or "")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await text_of(cluster, request_of()) == said(4)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("method", "request_", "told"),
    [
        ("Session", request_of(), "audio is given, and the prompt of a session has no sound"),
        ("Generate", request_of(fields={"use_beam_search": True}), "use_beam_search is true, and beams are not"),
        (
            "Generate",
            request_of(fields={"truncate_prompt_tokens": 3}),
            "truncate_prompt_tokens is given, and the prompt",
        ),
        ("Generate", request_of(sampling={"max_tokens": 999}), "sampling.max_tokens is 999"),
        (
            "Generate",
            inference_pb2.GenerateRequest(text=inference_pb2.TextPrompt(text="a")),
            "text is given without sound, and this model writes what is said: /v1/audio/transcriptions takes it, over "
            "gRPC the field audio",
        ),
    ],
    ids=["session", "beams", "truncation", "max_tokens", "text"],
)
async def test_what_does_not_go_with_sound(cluster: Any, method: str, request_: Any, told: str) -> None:
    await cluster.start()
    error = await refusal(cluster, request_, method)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details() or "").startswith(told)


async def test_more_bytes_than_the_router_keeps_are_refused_as_overload(cluster: Any) -> None:
    num_bytes = 4 * len(SAMPLES)
    await cluster.start(max_held_image_bytes=num_bytes)
    scripts = [worker.script for worker in cluster.workers]
    for worker in cluster.workers:
        worker.script = play(lambda worker, call: asyncio.Event().wait())
    running = asyncio.create_task(text_of(cluster, request_of()))
    for worker in cluster.workers:
        await worker.called(1)
    error = await refusal(cluster, request_of())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"images or sound of {num_bytes} bytes, and those of other requests have {num_bytes}" in (
        error.details() or ""
    )
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await cluster.idle()
    for worker, script in zip(cluster.workers, scripts, strict=True):
        worker.script = script
    assert await text_of(cluster, request_of()) == said(4)


async def test_a_model_without_sound(model_folder: Path, fingerprint: str, cluster: Any) -> None:
    cluster.folder, cluster.fingerprint = model_folder, fingerprint
    await cluster.start()
    error = await refusal(cluster, request_of())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "audio is given, and this model reads no sound"
