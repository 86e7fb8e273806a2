"""Drafts behind prompts with images: the texts of a model that hashes contents and positions, whatever is drafted."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pdserve.engine.speculation.drafter import DraftRows
from pdserve.engine.speculation.ngram_drafter import NgramDrafter
from tests.engine.test_encoder_cache import Prompt, ask, encoder, prompt_of
from tests.support.engine.drafters import drafter_of, speculation, use_drafter
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.engine_pair import Pair
from tests.support.models.hash_images import IMAGE, HashImageModel, image_answer
from tests.support.processes.dying_pair import DyingPair

COUNT, LONG = 14, 40
MAX_LEN = 80
ENDS_WITHIN = "ends within an image"
PROMPTS: Mapping[str, Prompt] = {
    "two images": prompt_of(3, (1, 2, 4), 2, (2, 3, 4), 5),
    ENDS_WITHIN: prompt_of(7, (3, 1, 5), 1, (4, 3, 2)),
    "text": prompt_of(9),
    "an image first": prompt_of((4, 4, 3), 6),
}


def drafted(engine: Harness, right: float, count: int = COUNT) -> Harness:
    """The engine with a drafter that knows the answers, and says something else with probability `1 - right`."""
    texts = [[*prompt[0], *image_answer(*prompt, count)] for prompt in PROMPTS.values()]
    use_drafter(engine, drafter_of(texts, right))
    return engine


def num_accepted(engine: Harness) -> int:
    stats = engine.scheduler.drafts.stats
    assert stats is not None
    return stats.num_accepted_tokens


@pytest.mark.parametrize(("right", "chunk"), [(1.0, 64), (0.6, 7)])
def test_texts_are_the_undrafted_ones(make_engine: MakeEngine, right: float, chunk: int) -> None:
    """Also where the first draft stands behind an image that ends the prompt, and with blocks for two sequences."""
    engine = make_engine(
        model=HashImageModel(), encoder=encoder(12, 12), max_num_batched_tokens=chunk, num_blocks=24, max_model_len=MAX_LEN,
        speculative_config=speculation(4),
    )  # fmt: skip
    drafted(engine, right, count=LONG)
    names = {ask(engine, prompt, LONG): prompt for prompt in PROMPTS.values()}
    answers = engine.run()
    for name, prompt in names.items():
        assert answers[name].token_ids == image_answer(*prompt, LONG)
    assert num_accepted(engine) > 10
    assert engine.scheduler.num_preemptions > 0


def test_right_drafts_save_steps_from_the_first_token_on(make_engine: MakeEngine) -> None:
    engine = make_engine(model=HashImageModel(), encoder=encoder(), speculative_config=speculation(4))
    drafted(engine, 1.0)
    prompt = PROMPTS[ENDS_WITHIN]
    name = ask(engine, prompt, 11)
    num_steps = 0
    while engine.core.has_work:
        engine.step()
        num_steps += 1
    assert engine.collect()[name].token_ids == image_answer(*prompt, 11)
    # the prompt with the first token, then five tokens in each step
    assert num_steps == 3


def test_sequences_of_one_prompt_are_drafted(make_engine: MakeEngine) -> None:
    engine = make_engine(
        model=HashImageModel(), encoder=encoder(), max_model_len=MAX_LEN, speculative_config=speculation(3)
    )
    drafted(engine, 0.8)
    prompt = PROMPTS["two images"]
    answers = engine.ask_many(prompt[0], 3, mm_features=prompt[1], params={"max_tokens": COUNT, "logprobs": 1})
    assert [answer.token_ids for answer in answers] == [image_answer(*prompt, COUNT)] * 3
    assert all(answer.logprobs is not None and len(answer.logprobs.logprobs) == COUNT for answer in answers)
    assert num_accepted(engine) > 0


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))])
def test_decode_drafts_from_kv_alone(make_engine: MakeEngine, seed: int) -> None:
    """Decode has no pixels; few blocks evict sequences, which are placed again with their output."""
    of_d = HashImageModel()
    common: dict[str, Any] = {"encoder": encoder(20, 20), "max_model_len": MAX_LEN}
    p = make_engine(model=HashImageModel(), max_num_batched_tokens=9, **common)
    d = make_engine(model=of_d, num_blocks=30, speculative_config=speculation(4), **common)
    pair = Pair(p, drafted(d, 0.7), seed)
    for name, (tokens, features) in PROMPTS.items():
        pair.add(tokens, name, mm_features=features, params={"max_tokens": COUNT})
    pair.run()
    for name, prompt in PROMPTS.items():
        assert pair.answer(name).token_ids == image_answer(*prompt, COUNT), name
    assert num_accepted(d) > 0
    assert of_d.num_encoded == 0


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 100))])
def test_i2_i4_random_deaths_with_drafts(make_engine: MakeEngine, seed: int) -> None:
    """A second attempt begins with output that was drafted in the first."""
    draw = random.Random(seed)
    common: dict[str, Any] = {"encoder": encoder(16, 16), "max_model_len": MAX_LEN}

    def make_d() -> Harness:
        fields: dict[str, Any] = {"num_blocks": 30, "async_scheduling": bool(seed % 2)} | common
        return drafted(make_engine(model=HashImageModel(), speculative_config=speculation(1 + seed % 4), **fields), 0.7)

    pair = DyingPair(lambda: make_engine(model=HashImageModel(), **common), make_d, seed)
    for name, (tokens, features) in PROMPTS.items():
        pair.ask(name, tokens, COUNT, mm_features=features)
    for _ in range(5):
        for _ in range(draw.randint(0, 9)):
            pair.round()
        draw.choice([pair.kill_prefill, pair.kill_decode])()
    pair.run()
    for name, prompt in PROMPTS.items():
        assert pair.asked[name].said == image_answer(*prompt, COUNT), name


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, IMAGE, IMAGE, 5, 1], [2]),
        ([2, IMAGE, 5, 2], []),
        ([1, 2, 3, IMAGE, 1], [2, 3]),
        ([IMAGE, IMAGE, 4, 9, 4], [9, 4]),
    ],
)
def test_n_grams_end_before_an_image(tokens: list[int], drafts: list[int]) -> None:
    rows = DraftRows(np.array([0]), np.array([4]), np.array([tokens]), np.array([len(tokens)]), lambda *_: None)
    assert NgramDrafter(1, 3, IMAGE).propose(rows) == [drafts]
