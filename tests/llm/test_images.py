"""`LLM` with images, against `transformers` on the same tiny random checkpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from pdserve.common.errors import InvalidRequest
from pdserve.engine.ranks import rank_processes
from pdserve.llm import LLM, AsyncLLM, BeamSearchParams, RequestOutput, StreamingInput
from tests.support.engine.forked_engine import start_rank
from tests.support.engine.llm_requests import core_of, greedy
from tests.support.models.image_checkpoints import (
    ALL_FAMILIES,
    FAMILIES,
    PICTURE,
    ImageOracle,
    chat_of,
    chat_text,
    make_image_checkpoint,
    picture,
)

TINY: dict[str, Any] = {
    "dtype": "float32", "block_size": 4, "num_blocks": 256, "max_model_len": 512, "max_num_batched_tokens": 24,
}  # fmt: skip
TEXT = f"The river {PICTURE} had another colour, {PICTURE} and the miller sang."
NUM_TOKENS = 12


@pytest.fixture(scope="module", params=[*FAMILIES, "qwen3_5", pytest.param(ALL_FAMILIES[-1], marks=pytest.mark.slow)])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory, family: str) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp(family), family, tie_word_embeddings=family == "qwen3_vl")


@pytest.fixture(scope="module")
def image_oracle(image_folder: Path, family: str) -> ImageOracle:
    return ImageOracle(image_folder, family)


@pytest.fixture
def make_image_llm(image_folder: Path) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        made.append(LLM(image_folder, **(TINY | options)))
        return made[-1]

    yield make
    for llm in made:
        if llm._engine is not None:
            core_of(llm).scheduler.check(idle=True)
        llm.shutdown()


def ask(llm: LLM, *prompts: tuple[str, list[Image.Image]], **params: Any) -> list[RequestOutput]:
    given = [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in prompts]
    return llm.generate(given, greedy(max_tokens=NUM_TOKENS, **params), use_tqdm=False)  # type: ignore[arg-type]


def expected(llm: LLM, oracle: ImageOracle, text: str, images: list[Image.Image]) -> list[int]:
    return oracle.greedy(llm.get_tokenizer().encode(text), images, NUM_TOKENS)


def test_images_in_chunks_and_prefixes(make_image_llm: Callable[..., LLM], image_oracle: ImageOracle) -> None:
    llm = make_image_llm()
    first, other = [picture(1), picture(2, 64, 48)], [picture(3), picture(2, 64, 48)]
    answers = []
    for images in (first, first, other):
        [answer] = ask(llm, (TEXT, images))
        assert answer.outputs[0].token_ids == expected(llm, image_oracle, TEXT, images)
        answers.append(answer)
    assert len(answers[0].outputs[0].token_ids) == NUM_TOKENS
    assert answers[0].outputs[0].token_ids != answers[2].outputs[0].token_ids
    prompt = answers[0].prompt_token_ids
    assert prompt is not None
    cached = [answer.num_cached_tokens for answer in answers]
    # the other first image shares the blocks before it alone
    assert cached[0] == 0
    assert cached[1] == (len(prompt) - 1) // 4 * 4
    assert cached[2] is not None
    assert 0 < cached[2] <= prompt.index(prompt[-1]) or cached[2] < 12


def test_many_at_once_with_preemption(make_image_llm: Callable[..., LLM], image_oracle: ImageOracle) -> None:
    llm = make_image_llm(num_blocks=40, max_model_len=160, max_num_seqs=6)
    prompts = [
        (TEXT, [picture(1), picture(2)]),
        ("No picture here.", []),
        (f"{PICTURE}", [picture(3, 16, 64)]),
        (f"One {PICTURE} alone, and a longer end of it.", [picture(1)]),
        (f"{PICTURE}{PICTURE} twice", [picture(4), picture(4)]),
        ("Nothing to see either; the wheel stood still.", []),
    ]
    answers = ask(llm, *prompts, ignore_eos=True)
    assert core_of(llm).scheduler.num_preemptions > 0
    for answer, (text, images) in zip(answers, prompts, strict=True):
        assert answer.outputs[0].token_ids == expected(llm, image_oracle, text, images), text


def test_sequences_beams_and_logprobs_of_a_prompt_with_images(
    make_image_llm: Callable[..., LLM], image_oracle: ImageOracle
) -> None:
    llm = make_image_llm(num_blocks=64, max_model_len=200, max_logprobs=4)
    images = [picture(1), picture(5)]
    tokens = expected(llm, image_oracle, TEXT, images)
    [answer] = ask(llm, (TEXT, images), n=3, logprobs=2, prompt_logprobs=1)
    assert [one.token_ids for one in answer.outputs] == [tokens] * 3
    assert answer.prompt_logprobs is not None
    inputs = image_oracle.inputs(llm.get_tokenizer().encode(TEXT), images)
    with torch.inference_mode():
        logprobs = image_oracle.model(**inputs).logits[0].log_softmax(-1)
    ids = inputs["input_ids"][0].tolist()
    assert list(answer.prompt_token_ids or ()) == ids
    for place in range(1, len(ids)):
        found = answer.prompt_logprobs[place]
        assert found is not None
        assert found[ids[place]].logprob == pytest.approx(float(logprobs[place - 1, ids[place]]), abs=2e-3)
    prompt = {"prompt": TEXT, "multi_modal_data": {"image": images}}
    [beams] = llm.beam_search(prompt, BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True), use_tqdm=False)  # type: ignore[arg-type]
    assert beams.sequences[0].tokens[len(ids) :] == tokens[:4]


def test_a_chat_with_images(make_image_llm: Callable[..., LLM], image_oracle: ImageOracle) -> None:
    llm = make_image_llm()
    parts: list[str | Image.Image] = ["Compare ", picture(1), " with ", picture(2), "!"]
    [answer] = llm.chat(chat_of(*parts), greedy(max_tokens=NUM_TOKENS), use_tqdm=False)
    images = [part for part in parts if isinstance(part, Image.Image)]
    assert answer.outputs[0].token_ids == expected(llm, image_oracle, chat_text(*parts), images)
    # a client's text is no place for an image
    with pytest.raises(InvalidRequest, match="messages has 1 images, and messages has 2 places for them"):
        llm.chat(chat_of(PICTURE, picture(1)), greedy(), use_tqdm=False)


def test_text_alone_is_that_of_the_language_model(
    make_image_llm: Callable[..., LLM], image_oracle: ImageOracle
) -> None:
    llm = make_image_llm(enforce_eager=True)
    text = "In winter the wheel stood still, and the questions were longer than the evenings."
    [answer] = llm.generate(text, greedy(max_tokens=NUM_TOKENS), use_tqdm=False)
    assert answer.outputs[0].token_ids == expected(llm, image_oracle, text, [])


@pytest.mark.slow
def test_an_engine_in_its_own_process(
    make_image_llm: Callable[..., LLM], image_oracle: ImageOracle, image_folder: Path
) -> None:
    images = [picture(1), picture(2)]
    with LLM(image_folder, **TINY, engine_process=True) as llm:
        [answer] = ask(llm, (TEXT, images))
        assert answer.outputs[0].token_ids == expected(llm, image_oracle, TEXT, images)


def test_refusals_name_the_image(make_image_llm: Callable[..., LLM], image_folder: Path, folder: Path) -> None:
    llm = make_image_llm()
    one = picture(1)
    cases: list[tuple[Any, str]] = [
        ({"image": [one]}, "multi_modal_data has 1 images, and prompt has 2 places for them"),
        ({"image": []}, "multi_modal_data has 0 images"),
        ({"image": [one, "path"]}, r"multi_modal_data.image\[1\] is of type str"),
        ({"image": [one, one], "video": []}, "multi_modal_data must be a dict with 'image' or 'audio', not"),
        ([one, one], "multi_modal_data must be a dict with 'image' or 'audio', not list"),
    ]
    for data, message in cases:
        with pytest.raises(InvalidRequest, match=message):
            llm.generate({"prompt": TEXT, "multi_modal_data": data}, greedy(), use_tqdm=False)
    given: Any = {"prompt": TEXT, "multi_modal_data": {"image": [one, one]}}
    with pytest.raises(InvalidRequest, match="the prompt of an embedding has no images"):
        llm.embed(given, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens is given, and the prompt has images"):
        llm.generate(given, greedy(), tokenization_kwargs={"truncate_prompt_tokens": 5}, use_tqdm=False)
    big = [picture(place, 64, 64) for place in range(9)]
    with pytest.raises(InvalidRequest, match="594 tokens; the model's length is 512"):
        llm.generate({"prompt": PICTURE * 9, "multi_modal_data": {"image": big}}, greedy(), use_tqdm=False)
    with LLM(folder, **TINY) as text_model, pytest.raises(InvalidRequest, match="this model takes text alone"):
        text_model.generate(given, greedy(), use_tqdm=False)


@pytest.mark.slow
def test_two_ranks_encode_alike(
    make_image_llm: Callable[..., LLM], image_oracle: ImageOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "start_program", start_rank)
    llm = make_image_llm(tensor_parallel_size=2, num_blocks=48, max_model_len=160)
    given = [
        (TEXT, [picture(1), picture(2)]),
        (PICTURE, [picture(3, 8, 200)]),
        ("No picture.", []),
        (PICTURE, [picture(1)]),
    ]
    for _ in range(2):
        answers = ask(llm, *given, ignore_eos=True)
        for answer, (text, images) in zip(answers, given, strict=True):
            assert answer.outputs[0].token_ids == expected(llm, image_oracle, text, images), text


async def test_sessions_take_text_alone(image_folder: Path) -> None:
    async def turns() -> AsyncIterator[StreamingInput]:
        yield StreamingInput({"prompt": TEXT, "multi_modal_data": {"image": [picture(1), picture(2)]}})

    async with AsyncLLM(image_folder, **TINY) as llm:
        with pytest.raises(InvalidRequest, match="the prompt of a session has no images"):
            [_ async for _ in llm.generate(turns(), greedy(), "session")]
