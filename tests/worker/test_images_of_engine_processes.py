"""Images through workers whose engine has a process of its own: pixels reach it, and the answers are those of `transformers`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from PIL import Image

from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import InvalidRequest
from pdserve.common.image_processor_config import ImageProcessorConfig
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.multimodal import PlaceholderRange, hashed_spans, images_extras
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.settings.worker_settings import PrefillSettings
from pdserve.engine.client import process_client
from pdserve.text.images.image_processor import ImageProcessor
from pdserve.text.images.placeholders import PromptWithImages, with_images
from pdserve.worker.worker import Worker
from pdserve.worker.worker_process import make_engine
from tests.support.engine.encoder_pair import is_at_rest, prefilled_at_decode, values_of
from tests.support.engine.forked_engine import start_forked
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.image_checkpoints import FAMILIES, IMAGE_TOKEN_ID, ImageOracle, make_image_checkpoint, picture
from tests.support.run.waiting import eventually
from tests.support.transfers.worker_pair import (
    BLOCK_SIZE,
    KEY,
    Pair,
    PairAnswer,
    ask_with_images,
    generation_request,
    running_pair,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

COUNT = 10
PROMPTS: list[tuple[list[int], list[Image.Image]]] = [
    ([*prompt_of(5), IMAGE_TOKEN_ID, *prompt_of(3), IMAGE_TOKEN_ID, 9], [picture(1), picture(2, 64, 48)]),
    ([IMAGE_TOKEN_ID, *prompt_of(40)], [picture(1)]),
    (prompt_of(21), []),
    ([*prompt_of(9), IMAGE_TOKEN_ID, 7], [picture(3, 8, 120)]),
]
# chunks end within images
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_blocks": 64, "max_model_len": 256, "max_num_batched_tokens": 32, "engine_process": True,
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def image_folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp(family), family)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(image_folder: Path) -> AsyncIterator[Pair]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(process_client, "start_program", start_forked)
        async with running_pair(image_folder, KEY, **SETTINGS) as made:
            yield made
            await eventually(lambda: is_at_rest(made.p) and is_at_rest(made.d))


def request_of(worker: Worker, prompt: PromptWithImages) -> GenerationRequest:
    """Greedy."""
    hasher = BlockHasher(KEY, BLOCK_SIZE)
    root = hasher.root(worker.identity.layout.model_fingerprint)
    hashes = hasher.extend(root, prompt.token_ids, hashed_spans(prompt.features))
    digest = hasher.request_digest(root, hashes, prompt.token_ids, images_extras(prompt.features))
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    return generation_request(
        worker, prompt.token_ids, mm_features=prompt.features, request_digest=digest, sampling_params=params
    )


async def test_i1_images_reach_both_engines(pair: Pair, image_folder: Path, family: str) -> None:
    oracle = ImageOracle(image_folder, family)
    processor = ImageProcessor(ImageProcessorConfig.read(image_folder), IMAGE_TOKEN_ID)
    for tokens, images in PROMPTS:
        prompt = with_images(tokens, [processor.process(image, "image") for image in images], IMAGE_TOKEN_ID, "prompt")
        expected = oracle.greedy(tokens, images, COUNT)
        # cold, from both caches, and from decode's alone
        cold = await ask_with_images(pair, request_of(pair.p, prompt))
        assert cold == PairAnswer(expected, -(-len(prompt.token_ids) // BLOCK_SIZE))
        cached = await ask_with_images(pair, request_of(pair.p, prompt))
        assert cached.token_ids == expected
        assert cached.num_landed < cold.num_landed
        assert await prefilled_at_decode(pair, request_of(pair.d, prompt)) == expected
    # an image that only decode encodes
    tokens, images = [IMAGE_TOKEN_ID, *prompt_of(6)], [picture(7)]
    prompt = with_images(tokens, [processor.process(images[0], "image")], IMAGE_TOKEN_ID, "prompt")
    assert await prefilled_at_decode(pair, request_of(pair.d, prompt)) == oracle.greedy(tokens, images, COUNT)


async def test_an_image_that_does_not_fit_is_refused_by_name(pair: Pair, image_folder: Path) -> None:
    processor = ImageProcessor(ImageProcessorConfig.read(image_folder), IMAGE_TOKEN_ID)
    prompt = with_images([IMAGE_TOKEN_ID, 5], [processor.process(picture(1), "image")], IMAGE_TOKEN_ID, "prompt")
    [feature] = prompt.features
    moved = msgspec.structs.replace(feature, mm_position=PlaceholderRange(1, feature.mm_position.length))
    cut = msgspec.structs.replace(feature, data=b"")
    for wrong, message in ((moved, r"mm_features\[0\]: prompt_token_ids has other tokens"), (cut, r"data has 0 bytes")):
        with pytest.raises(InvalidRequest, match=message):
            await prefilled_at_decode(pair, request_of(pair.d, PromptWithImages(prompt.token_ids, [wrong])))


async def test_the_worker_checks_as_an_engine_in_its_process_does(pair: Pair, image_folder: Path) -> None:
    engine = await make_engine(PrefillSettings(**SETTINGS | {"engine_process": False}), image_folder, KEY)
    try:
        assert values_of(pair.p.core.verifier) == values_of(engine.verifier)
        assert engine.verifier.encoder is not None
    finally:
        await engine.shutdown()
