"""The tool that trains a model for pictures: what it draws, what it asks, its own forward pass, and a checkpoint that is served."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from demo_image_model.batches import Batches, resized_side
from demo_image_model.checkpoint import load, save
from demo_image_model.conversations import (
    BOTH,
    COLOUR,
    IMAGE,
    NO_PICTURE,
    OTHER,
    SHAPE,
    Example,
    answer_to,
    asked,
    example,
    learn_tokenizer,
)
from demo_image_model.evaluate import right_answers
from demo_image_model.network import answer_logits, embed_images, hidden_states, network
from demo_image_model.pictures import COLOURS, SHAPES, any_ratio, draw, plain
from demo_image_model.train import train
from demo_model.corpus import Message
from demo_model.train import Schedule
from pdserve.llm import LLM, SamplingParams
from tests.support.models.image_checkpoints import data_url

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def batches() -> Batches:
    return Batches(learn_tokenizer(7))


def test_pictures_show_what_they_are_named_after() -> None:
    for colour, (first, *_) in COLOURS.items():
        for shape in SHAPES:
            assert plain(colour, shape).image.getpixel((32, 32)) == first
    drawn, again, other = (draw(random.Random(seed)) for seed in (1, 1, 2))
    assert drawn.image.tobytes() == again.image.tobytes() != other.image.tobytes()


def test_answers_follow_the_question() -> None:
    picture = plain("orange", "star")
    assert answer_to(BOTH[0], picture) == "An orange star."
    assert answer_to(COLOUR[0], picture) == "It is orange."
    assert answer_to(SHAPE[0], picture) == "It is a star."
    rng = random.Random(5)
    made = [example(rng, 1, 1.0, 0.5) for _ in range(400)]
    answers = {each.messages[-1].content for each in made if each.picture is None}
    assert answers == {NO_PICTURE, OTHER}
    assert all((IMAGE in each.messages[0].content) == (each.picture is not None) for each in made)


def test_all_sizes_have_few_tokens() -> None:
    rng = random.Random(2)
    sides = {resized_side(rng, any_ratio(rng)) for _ in range(2000)}
    assert {height * width // 256 for height, width in sides} <= set(range(9, 17))
    assert {(64, 64), (48, 64), (64, 48)} <= sides


@pytest.mark.parametrize("side", [(64, 64), (48, 64)])
def test_its_forward_pass_is_that_of_transformers(batches: Batches, side: tuple[int, int]) -> None:
    rng = random.Random(3)
    model = network(batches.encoder, 7).eval()
    with torch.inference_mode():
        cases = [resized(asked(BOTH[0], draw(rng)), side), resized(asked(SHAPE[0], draw(rng), is_first=True), side)]
        cases.append(Example((Message("user", BOTH[0]), Message("assistant", NO_PICTURE)), None))
        batch = batches.make(cases, side)
        hidden = hidden_states(model, batch, embed_images(model.model.visual, batch.pictures.pixels))
        given, is_answer = batches.for_transformers(cases)
        theirs = model.model(**given, use_cache=False).last_hidden_state
    is_real = batch.rows.is_real
    assert torch.equal(is_answer, batch.rows.is_answer)
    torch.testing.assert_close(hidden[is_real], theirs[is_real], atol=1e-4, rtol=1e-4)
    answered = batch.rows.input_ids[0][is_answer[0]].tolist()
    assert answered == batches.encoder.answer(cases[0].messages[-1].content)


def resized(case: Example, side: tuple[int, int]) -> Example:
    """With a picture that transformers' processor leaves in its size."""
    assert case.picture is not None
    return replace(case, picture=replace(case.picture, image=case.picture.image.resize(side[::-1])))


def test_training_lowers_the_loss(batches: Batches, capsys: pytest.CaptureFixture[str]) -> None:
    model = network(batches.encoder, 7)
    train(model, batches, Schedule(steps=1), half=False)
    train(model, batches, Schedule(steps=100, warmup=10), half=False)
    first, last = (
        float(line.split("answers ")[1].split()[0])
        for line in capsys.readouterr().out.splitlines()
        # a slow machine prints steps between them, too
        if re.search(r"(?<!\d)(1/1|100/100)(?!\d)", line)
    )
    # a mean over the last steps with questions: the first of 34 still counts a fifth
    assert last < 0.8 * first


def test_what_it_saves_is_served(batches: Batches, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = network(batches.encoder, 7)
    cases = [asked(BOTH[0], plain(colour, "square")) for colour in ("red", "blue")]
    batch = batches.make(cases, (64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        hidden = hidden_states(model, batch, embed_images(model.model.visual, batch.pictures.pixels))
        logits, expected = answer_logits(model, hidden, batch.rows.input_ids, batch.rows.is_answer)
        torch.nn.functional.cross_entropy(logits, expected).backward()
        optimizer.step()
        optimizer.zero_grad()
    save(model, learn_tokenizer(7), tmp_path)
    assert model.dtype == torch.float32
    assert right_answers(load(tmp_path, torch.float32), batches, cases) == [True, True]
    with LLM(str(tmp_path), dtype="float32", num_blocks=32, max_model_len=128) as llm:
        chats = [[{"role": "user", "content": [
            {"type": "text", "text": BOTH[0]}, {"type": "image_url", "image_url": {"url": data_url(each.picture.image)}}
        ]}] for each in cases if each.picture]  # fmt: skip
        answers = llm.chat(chats, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    assert [answer.outputs[0].text for answer in answers] == ["A red square.", "A blue square."]
