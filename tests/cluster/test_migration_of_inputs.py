"""I16 with prompts that are more than tokens: what encoders have read, embeddings, images, sound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.cluster import test_encoder_decoder, test_images, test_prompt_embeds, test_whisper
from tests.cluster.test_migration import two_decode_workers
from tests.support.models.encoder_decoder_checkpoints import GreedyAnswers, make_encoder_decoder
from tests.support.models.image_checkpoints import make_image_checkpoint, picture
from tests.support.models.oracle import Oracle
from tests.support.models.whisper_checkpoints import make_whisper, sound
from tests.support.processes.cluster_processes import Cluster, Service
from tests.support.run.waiting import HANG_S

pytestmark = [pytest.mark.process, pytest.mark.slow]


def client(router: Service) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{router.http}", timeout=HANG_S, trust_env=False)


def check_moved(cluster: Cluster, moves: Service, least: int) -> None:
    moved, failed = (
        cluster.metric(moves, "pdserve_migrations_total", f'outcome="{outcome}"') for outcome in ("moved", "failed")
    )
    assert moved >= least
    assert failed <= moved / 10


async def test_i16_what_an_encoder_has_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    theirs = GreedyAnswers(make_encoder_decoder(folder, "bart"))
    with two_decode_workers(tmp_path, folder) as (cluster, _, moves):
        prompts = [test_encoder_decoder.prompt_of(20 + number, number) for number in range(6)]
        async with client(moves) as http:
            answers = await asyncio.gather(
                *(test_encoder_decoder.ask(http, prompt, max_tokens=90) for prompt in prompts)
            )
        for prompt, found in zip(prompts, answers, strict=True):
            assert found["choices"][0]["token_ids"] == theirs.answer(prompt, 90)
        check_moved(cluster, moves, 3)


async def test_i16_sound(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    theirs = make_whisper(folder)
    tokenizer = Tokenizer.from_folder(folder)
    with two_decode_workers(tmp_path, folder) as (cluster, _, moves):
        async with client(moves) as http:
            asked = [test_whisper.ask(http, test_whisper.file_of(seed)) for seed in range(8)]
            answers = await asyncio.gather(*asked)
        for seed, answer in enumerate(answers):
            tokens = theirs.answer(sound(seed), 60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["text"] == tokenizer.decode(tokens, skip_special_tokens=True).strip()
        check_moved(cluster, moves, 3)


async def test_i16_embeddings(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    prompts = test_prompt_embeds.PROMPTS
    body: dict[str, Any] = {"prompt_embeds": [test_prompt_embeds.base64_of(oracle, prompt) for prompt in prompts]}
    flag = "--enable-prompt-embeds=true"
    with two_decode_workers(tmp_path, model, flag, router=(flag,)) as (cluster, _, moves):
        async with client(moves) as http:
            answer = (
                await http.post("/v1/completions", json=body | {"max_tokens": 120} | test_prompt_embeds.GREEDY)
            ).json()
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            oracle.check(prompt, choice["token_ids"])
        check_moved(cluster, moves, 3)


async def test_i16_images(tmp_path: Path) -> None:
    folder = make_image_checkpoint(tmp_path / "model", "qwen2_5_vl")
    expected = test_images.Expected(folder, "qwen2_5_vl")
    with two_decode_workers(tmp_path, folder) as (cluster, _, moves):
        many: list[list[str | Image.Image]] = [[f"Picture {number}: ", picture(number % 4)] for number in range(8)]
        async with client(moves) as http:
            answers = await asyncio.gather(*(test_images.ask(http, *parts, max_tokens=100, n=1) for parts in many))
        for parts, (tokens, _) in zip(many, answers, strict=True):
            assert tokens == expected(*parts, max_tokens=100)
        check_moved(cluster, moves, 3)
