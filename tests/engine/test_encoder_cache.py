"""Images in the scheduler: chunks, encoder cache, prefixes, preemption. The hash model's answers need every image in its place."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.multimodal import MultiModalFeatureSpec, PlaceholderRange
from pdserve.engine.config import EncoderConfig
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.models.hash_images import IMAGE, HashImageModel, image_answer, image_of


def encoder(budget: int = 32, cache: int = 32) -> EncoderConfig:
    return EncoderConfig(
        image_token_id=IMAGE, patch_size=1, merge_size=1, max_num_encoder_input_tokens=budget, encoder_cache_size=cache
    )


Prompt = tuple[list[int], list[MultiModalFeatureSpec]]


def prompt_of(*parts: int | tuple[int, int, int]) -> Prompt:
    """parts: a number of text tokens, or (seed, height, width) of an image."""
    tokens: list[int] = []
    features = []
    for part in parts:
        if isinstance(part, int):
            tokens += [(5 * place + part + len(tokens)) % 60 for place in range(part)]
        else:
            seed, height, width = part
            features.append(image_of(seed, height, width, len(tokens)))
            tokens += [IMAGE] * (height * width)
    return tokens, features


def ask(engine: Harness, prompt: Prompt, count: int = 6, **fields: Any) -> str:
    return engine.add(prompt[0], mm_features=prompt[1], params={"max_tokens": count}, **fields)


@pytest.mark.parametrize("chunk", [3, 7, 64])
def test_answers_in_chunks(make_engine: MakeEngine, chunk: int) -> None:
    engine = make_engine(model=HashImageModel(), max_num_batched_tokens=chunk, encoder=encoder(12, 12))
    prompts = [
        prompt_of(3, (1, 2, 4), 2, (2, 3, 4), 5),
        prompt_of((3, 1, 5), 1, (3, 1, 5)),  # ends within an image, which it has twice
        prompt_of(9),
        prompt_of(4, (4, 4, 3), (5, 2, 1), 3),
    ]
    names = [ask(engine, prompt) for prompt in prompts]
    answers = engine.run()
    for name, prompt in zip(names, prompts, strict=True):
        assert answers[name].token_ids == image_answer(*prompt, 6)
    assert not engine.scheduler.running.encoder.cache.num_freeable_slots - 12


def test_a_chunk_ends_before_an_image_without_room(make_engine: MakeEngine) -> None:
    engine = make_engine(model=HashImageModel(), encoder=encoder(8, 8))
    prompt = prompt_of(3, (1, 2, 3), 2, (2, 2, 3), 4)
    name = ask(engine, prompt)
    engine.step()
    # both together have 12 tokens
    assert engine.scheduler.requests[name].num_computed_tokens == 3 + 6 + 2
    assert engine.run()[name].token_ids == image_answer(*prompt, 6)


def test_an_image_is_encoded_once_for_several_requests(make_engine: MakeEngine) -> None:
    model = HashImageModel()
    engine = make_engine(model=model, encoder=encoder())
    prompts = [prompt_of(size, (1, 2, 4), 3) for size in (2, 5, 9)]
    names = [ask(engine, prompt) for prompt in prompts]
    answers = engine.run()
    assert [answers[name].token_ids for name in names] == [image_answer(*prompt, 6) for prompt in prompts]
    assert model.num_encoded == 1


def test_a_prefix_is_shared_by_equal_images_alone(make_engine: MakeEngine) -> None:
    model = HashImageModel()
    engine = make_engine(model=model, encoder=encoder())
    first, same, other = (prompt_of(6, (seed, 2, 4), 6) for seed in (1, 1, 2))
    found = []
    for prompt in (first, same, other):
        name = ask(engine, prompt)
        answer = engine.run()[name]
        assert answer.token_ids == image_answer(*prompt, 6)
        found.append(answer.num_cached_tokens)
    # blocks of 4: the other image's differ from the second block on
    assert found == [0, 16, 4]
    assert model.num_encoded == 2


def test_a_prefix_may_end_within_an_image(make_engine: MakeEngine) -> None:
    engine = make_engine(model=HashImageModel(), encoder=encoder())
    for prompt in (prompt_of(2, (1, 3, 5), 1), prompt_of(2, (1, 3, 5), 9)):
        name = ask(engine, prompt)
        assert engine.run()[name].token_ids == image_answer(*prompt, 6)


def test_output_fills_a_block_that_an_image_began(make_engine: MakeEngine) -> None:
    engine = make_engine(model=HashImageModel(), encoder=encoder())
    for seed in (1, 2):
        prompt = prompt_of(1, (seed, 1, 6))
        name = ask(engine, prompt, 8)
        answer = engine.run()[name].token_ids
        longer = prompt[0] + answer, prompt[1]
        name = ask(engine, longer)
        again = engine.run()[name]
        # one block was filled by image and output
        assert again.num_cached_tokens == 12
        assert again.token_ids == image_answer(*longer, 6)


@pytest.mark.few(8)
@pytest.mark.parametrize("seed", range(40))
def test_random_schedules_leave_nothing_behind(make_engine: MakeEngine, seed: int) -> None:
    draw = random.Random(seed)
    cache = draw.choice([12, 16, 40])
    engine = make_engine(
        model=HashImageModel(),
        num_blocks=draw.choice([24, 40]),
        max_num_batched_tokens=draw.choice([5, 16, 64]),
        max_num_seqs=draw.choice([2, 6]),
        max_model_len=80,
        async_scheduling=bool(seed % 2),
        encoder=encoder(draw.choice([12, cache]), cache),
        reserve_whole_prompt=draw.random() < 0.5,
    )
    prompts: dict[str, tuple[Prompt, int]] = {}
    aborted = set()
    for _ in range(draw.randint(3, 12)):
        parts: list[int | tuple[int, int, int]] = [draw.randint(1, 9)]
        for _ in range(draw.randint(0, 3)):
            parts += [(draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 4)), draw.randint(0, 6)]
        prompt, count = prompt_of(*parts), draw.randint(1, 14)
        prompts[ask(engine, prompt, count)] = prompt, count
        for _ in range(draw.randint(0, 4)):
            engine.step()
        if draw.random() < 0.2:
            aborted.add(name := draw.choice(list(prompts)))
            engine.core.abort_request(name)
    answers = engine.run()
    for name, (prompt, count) in prompts.items():
        said, expected = answers[name].token_ids, image_answer(*prompt, count)
        assert said == expected[: len(said)]
        assert len(said) == count or name in aborted
    engine.scheduler.running.encoder.cache.check(idle=True)
    kept = engine.scheduler.running.encoder.cache.cached
    dropped = set(engine.scheduler.running.encoder.cache._freed)
    assert engine.runner.encoder.encoder_cache.keys() - dropped <= kept.keys()


def test_sequences_of_one_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine(model=HashImageModel(), encoder=encoder(), num_blocks=24, max_model_len=80)
    prompt = prompt_of(3, (1, 3, 4), 2)
    answers = engine.ask_many(prompt[0], 3, mm_features=prompt[1], params={"max_tokens": 20})
    assert [answer.token_ids for answer in answers] == [image_answer(*prompt, 20)] * 3


def refusal(engine: Harness, prompt: Prompt, **fields: Any) -> str:
    with pytest.raises(InvalidRequest) as refused:
        ask(engine, prompt, **fields)
    return refused.value.message


def test_refusals_name_the_field(make_engine: MakeEngine) -> None:
    engine = make_engine(model=HashImageModel(), encoder=encoder(8, 10))
    tokens, [image] = prompt_of(3, (1, 2, 4), 3)

    def changed(**changes: Any) -> Prompt:
        values = {name: getattr(image, name) for name in image.__struct_fields__}
        return tokens, [MultiModalFeatureSpec(**(values | changes))]

    assert "mm_features[0] has 9 tokens, an image may have 8" in refusal(engine, prompt_of(1, (1, 3, 3)))
    assert "data has 23 bytes, 24 are needed" in refusal(engine, changed(data=image.data[1:]))
    assert "grid_thw is (1, 0, 8)" in refusal(engine, changed(grid_thw=(1, 0, 8)))
    for place in ((2, 8), (-1, 8), (3, 7), (9, 8)):
        refused = refusal(engine, changed(mm_position=PlaceholderRange(*place)))
        assert "mm_features[0]" in refused
    assert "identifier is 'x'" in refusal(engine, changed(identifier="x"))
    assert "modality is 'audio'" in refusal(engine, changed(modality="audio"))
    assert "multi_modal_data is given, and the prompt of a session" in refusal(
        engine, (tokens, [image]), resumable=True
    )
    text_alone = make_engine()
    assert "this model takes text alone" in refusal(text_alone, (tokens, [image]))
