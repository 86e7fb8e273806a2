"""Images in an engine whose model two ranks share: each encodes every image, and the tokens are those of `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.common.image_processor_config import ImageProcessorConfig
from pdserve.engine.config import EncoderConfig, EngineConfig
from pdserve.text.images.image_processor import ImageProcessor
from pdserve.text.images.placeholders import with_images
from tests.support.engine.engine_harness import Harness
from tests.support.engine.rank_threads import RankThreads
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.image_checkpoints import FAMILIES, IMAGE_TOKEN_ID, ImageOracle, make_image_checkpoint, picture

PROMPTS = [
    ([*prompt_of(5), IMAGE_TOKEN_ID, *prompt_of(3), IMAGE_TOKEN_ID, 9], [picture(1), picture(2, 64, 48)]),
    ([IMAGE_TOKEN_ID, *prompt_of(4)], [picture(1)]),
    (prompt_of(21), []),
    ([*prompt_of(9), IMAGE_TOKEN_ID, 7], [picture(3, 8, 120)]),
]
NUM_TOKENS = 10


@pytest.mark.parametrize("family", [FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.slow)])
def test_i1_two_ranks_give_the_tokens_of_transformers(family: str, tmp_path: Path, harnesses: list[Harness]) -> None:
    folder = make_image_checkpoint(tmp_path, family)
    encoder = EncoderConfig(
        image_token_id=IMAGE_TOKEN_ID,
        patch_size=4,
        merge_size=2,
        max_num_encoder_input_tokens=64,
        encoder_cache_size=64,
    )
    # chunks end within images, and few blocks preempt
    config = EngineConfig(
        block_size=4, num_blocks=40, max_model_len=128, max_num_batched_tokens=24, encoder=encoder, num_host_blocks=(8,)
    )
    ranks = RankThreads(folder, config, 2)
    engine = Harness(config, ranks.decoder, ranks.kv_cache, ranks.decoder.config.vocab_size, ranks=ranks)
    harnesses.append(engine)
    oracle = ImageOracle(folder, family)
    processor = ImageProcessor(ImageProcessorConfig.read(folder), IMAGE_TOKEN_ID)
    try:
        expected = {}
        for tokens, images in PROMPTS:
            processed = [processor.process(image, "image") for image in images]
            prompt = with_images(tokens, processed, IMAGE_TOKEN_ID, "prompt")
            name = engine.add(prompt.token_ids, mm_features=prompt.features, params={"max_tokens": NUM_TOKENS})
            expected[name] = oracle.greedy(tokens, images, NUM_TOKENS)
        answers = engine.run()
        assert {name: answers[name].token_ids for name in expected} == expected
        assert engine.scheduler.num_preemptions > 0
        others = [loop.runner.encoder.encoder_cache for loop in ranks._loops.values()]
        assert [cache.keys() for cache in others] == [engine.runner.encoder.encoder_cache.keys()]
    finally:
        ranks.close()
    ranks.check(engine.runner)
