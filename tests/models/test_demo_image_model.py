"""The checked-in checkpoint for pictures: what it must answer, run by `transformers` and by `LLM`, and what it must weigh."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from demo_image_model.batches import PREPROCESSOR, Batches
from demo_image_model.checkpoint import load
from demo_image_model.conversations import BOTH, COLOUR, NO_PICTURE, SHAPE, answer_to, asked, learn_tokenizer
from demo_image_model.evaluate import HELD_OUT_BAR, right_answers, rows, upright_pictures
from demo_image_model.pictures import Picture, draw, plain
from demo_model.chat import load_tokenizer
from pdserve.common.json_file import read_json_object
from pdserve.llm import LLM, SamplingParams
from pdserve.models.model_folder import model_folder
from tests.support.engine.llm_requests import core_of
from tests.support.models.image_checkpoints import data_url

FOLDER = model_folder("demo-image")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/red_circle.png"
GREEDY = SamplingParams(temperature=0, max_tokens=16)
SEED = 2024
"""Neither that of training nor that of the model card's evaluation."""


@pytest.fixture(scope="module")
def batches() -> Batches:
    return Batches(load_tokenizer(FOLDER))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo-image", dtype="float32", num_blocks=128, max_model_len=256) as made:
        yield made
        core_of(made).scheduler.check(idle=True)


def answers(llm: LLM, questions: Sequence[tuple[str, Picture]]) -> list[str]:
    """Greedy answers."""
    chats: list[Any] = [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": data_url(picture.image)}},
                    {"type": "text", "text": asks},
                ],
            }
        ]
        for asks, picture in questions
    ]
    return [answer.outputs[0].text for answer in llm.chat(chats, GREEDY, use_tqdm=False)]


def test_folder_is_small_and_complete() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= 4_000_000
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(sizes)
    assert read_json_object(FOLDER / "preprocessor_config.json") == PREPROCESSOR
    assert {weight.dtype for weight in load_file(FOLDER / "model.safetensors").values()} == {torch.bfloat16}


def test_the_tokenizer_is_learned_again() -> None:
    assert learn_tokenizer(7).get_vocab() == load_tokenizer(FOLDER).get_vocab()


def test_the_example_is_what_the_tool_draws() -> None:
    with Image.open(EXAMPLE) as stored:
        assert stored.convert("RGB").tobytes() == plain("red", "circle", 128).image.tobytes()
    assert EXAMPLE.stat().st_size < 1000


def test_pictures_that_it_never_saw_are_named(llm: LLM) -> None:
    rng = random.Random(SEED)
    drawn = [draw(rng) for _ in range(60)]
    questions = [(rng.choice((*BOTH, *COLOUR, *SHAPE)), picture) for picture in drawn]
    found = answers(llm, questions)
    right = [answer == answer_to(*question) for answer, question in zip(found, questions, strict=True)]
    assert sum(right) >= 0.9 * len(right), found
    assert answers(llm, [(BOTH[0], plain("red", "circle", 128))]) == ["A red circle."]
    [unseen] = llm.chat([{"role": "user", "content": BOTH[0]}], GREEDY, use_tqdm=False)
    assert unseen.outputs[0].text == NO_PICTURE


def test_llm_answers_as_transformers_does(llm: LLM, batches: Batches) -> None:
    pictures = upright_pictures()[::7]
    found = answers(llm, [(SHAPE[0], picture) for picture in pictures])
    right = [answer == answer_to(SHAPE[0], picture) for answer, picture in zip(found, pictures, strict=True)]
    cases = [asked(SHAPE[0], picture, is_first=True) for picture in pictures]
    assert right == right_answers(load(FOLDER, torch.float32), batches, cases)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_its_evaluation_reaches_the_bars(batches: Batches, dtype: torch.dtype) -> None:
    table = {row.title: row for row in rows(load(FOLDER, dtype), batches, SEED, 400)}
    assert all(row.passed for row in table.values()), {title: row.share for title, row in table.items()}
    assert table["colour and shape"].bar == HELD_OUT_BAR
