"""Prompts with images through prefill and decode engines: only prefill has pixels, and what decode lost comes back from there."""

from __future__ import annotations

import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.multimodal import without_pixels
from tests.engine.test_encoder_cache import Prompt, encoder, prompt_of
from tests.support.engine.engine_harness import MakeEngine
from tests.support.engine.engine_pair import Pair
from tests.support.models.hash_images import HashImageModel, image_answer


def prompts(count: int) -> dict[str, Prompt]:
    return {
        f"r{number}": prompt_of(3 + number, (number % 3, 2, 4), 2, (7, 1 + number % 3, 3), number % 4)
        for number in range(count)
    }


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", [None, *range(12)])
def test_decode_goes_on_from_kv_alone(make_engine: MakeEngine, seed: int | None) -> None:
    of_d = HashImageModel()
    p = make_engine(model=HashImageModel(), encoder=encoder(20, 20), max_num_batched_tokens=9, max_model_len=80)
    # too small for all: sequences are preempted, evicted, and placed again
    num_blocks = 64 if seed is None else 26
    d = make_engine(model=of_d, encoder=encoder(20, 20), num_blocks=num_blocks, max_model_len=80)
    pair = Pair(p, d, seed)
    asked = prompts(6)
    for name, (tokens, features) in asked.items():
        pair.add(tokens, name, mm_features=features, params={"max_tokens": 16})
    pair.run()
    for name, prompt in asked.items():
        assert pair.answer(name).token_ids == image_answer(*prompt, 16), name
    assert of_d.num_encoded == 0


def test_evictions_happen(make_engine: MakeEngine) -> None:
    p = make_engine(model=HashImageModel(), encoder=encoder(20, 20), max_model_len=80)
    d = make_engine(model=HashImageModel(), encoder=encoder(20, 20), num_blocks=26, max_model_len=80)
    pair = Pair(p, d)
    asked = prompts(6)
    for name, (tokens, features) in asked.items():
        pair.add(tokens, name, mm_features=features, params={"max_tokens": 24})
    pair.run()
    assert any(len(attempts) > 1 for attempts in pair.attempts.values())
    for name, prompt in asked.items():
        assert pair.answer(name).token_ids == image_answer(*prompt, 24), name


def test_an_engine_without_pixels_computes_no_image(make_engine: MakeEngine) -> None:
    engine = make_engine(model=HashImageModel(), encoder=encoder())
    tokens, features = prompt_of(3, (1, 2, 4), 3)
    with pytest.raises(InvalidRequest, match="data has 0 bytes, 24 are needed"):
        engine.request(tokens, mm_features=without_pixels(features))
