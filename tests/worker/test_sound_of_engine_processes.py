"""Sound through workers whose engine has a process of its own and a tier in host memory: the transcripts are those of
`transformers`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from pdserve.common.audio_processor_config import AudioProcessorConfig
from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import Evicted, InvalidRequest
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.multimodal import MultiModalFeatureSpec, hashed_spans, images_extras
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.settings.worker_settings import PrefillSettings
from pdserve.engine.client import process_client
from pdserve.text.audio.audio_processor import AudioProcessor
from pdserve.worker.worker import Worker
from pdserve.worker.worker_process import make_engine
from tests.support.engine.encoder_pair import is_at_rest, prefilled_at_decode, values_of
from tests.support.engine.forked_engine import start_forked
from tests.support.engine.whisper_engines import whisper as whisper  # a fixture
from tests.support.models.whisper_checkpoints import EOS, MAX_LEN, POSITIONS, PROMPT_IDS, Transcripts, sound
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

COUNT = 20
NUM_SOUNDS = 4
ENCODER_BLOCKS = -(-POSITIONS // BLOCK_SIZE)
# the pool has room for two sequences: what others need again comes from the tier, or is encoded again
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_blocks": 14, "max_model_len": MAX_LEN, "engine_process": True, "kv_host_mib": 4,
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(whisper: tuple[Path, Transcripts]) -> AsyncIterator[Pair]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(process_client, "start_program", start_forked)
        async with running_pair(whisper[0], KEY, **SETTINGS) as made:
            yield made
            await eventually(lambda: is_at_rest(made.p) and is_at_rest(made.d))


def feature_of(folder: Path, seed: int) -> MultiModalFeatureSpec:
    return AudioProcessor(AudioProcessorConfig.read(folder)).process(sound(seed), "sound")


def request_of(worker: Worker, feature: MultiModalFeatureSpec) -> GenerationRequest:
    """Greedy."""
    hasher = BlockHasher(KEY, BLOCK_SIZE)
    root = hasher.root(worker.identity.layout.model_fingerprint)
    hashes = hasher.extend(root, PROMPT_IDS, hashed_spans([feature]))
    digest = hasher.request_digest(root, hashes, PROMPT_IDS, images_extras([feature]))
    params = SamplingParams(temperature=0.0, max_tokens=COUNT)
    return generation_request(
        worker, PROMPT_IDS, mm_features=[feature], request_digest=digest, sampling_params=params, eos_token_ids=(EOS,)
    )


def without_eos(tokens: list[int]) -> list[int]:
    return tokens[:-1] if tokens[-1:] == [EOS] else tokens


async def test_i1_sound_reaches_both_engines(pair: Pair, whisper: tuple[Path, Transcripts]) -> None:
    expected = {seed: whisper[1].answer(sound(seed), COUNT) for seed in range(NUM_SOUNDS)}
    for again in (False, True):
        for seed in range(NUM_SOUNDS):
            answer = await ask_with_images(pair, request_of(pair.p, feature_of(whisper[0], seed)))
            assert without_eos(answer.token_ids) == expected[seed], (seed, again)
            if not again:
                assert answer.num_landed > ENCODER_BLOCKS
    # at once
    answers = await asyncio.gather(
        *(ask_with_images(pair, request_of(pair.p, feature_of(whisper[0], seed))) for seed in range(NUM_SOUNDS)),
        return_exceptions=True,
    )
    for seed, found in enumerate(answers):
        if isinstance(found, PairAnswer):
            assert without_eos(found.token_ids) == expected[seed]
        else:  # a router places it again
            assert isinstance(found, Evicted), found
    assert any(isinstance(found, PairAnswer) for found in answers)


async def test_decode_encodes_alone(pair: Pair, whisper: tuple[Path, Transcripts]) -> None:
    for seed in (7, 0, 7):
        tokens = await prefilled_at_decode(pair, request_of(pair.d, feature_of(whisper[0], seed)))
        assert without_eos(tokens) == whisper[1].answer(sound(seed), COUNT)


async def test_blocks_of_a_sound_come_from_the_tier(pair: Pair, whisper: tuple[Path, Transcripts]) -> None:
    """Both pools have held more sounds by now than fit into them."""
    workers = (pair.p, pair.d)
    await eventually(lambda: all(worker.engine.stats.external_prefix_cache_hits for worker in workers))


async def test_sound_that_does_not_fit_is_refused_by_name(pair: Pair, whisper: tuple[Path, Transcripts]) -> None:
    feature = feature_of(whisper[0], 1)
    cut = msgspec.structs.replace(feature, data=feature.data[:-4])
    no_number = msgspec.structs.replace(feature, data=np.full(len(feature.data) // 4, np.nan, "<f4").tobytes())
    long = msgspec.structs.replace(feature, grid_thw=(1, 1, 10**6))
    for wrong, message in (
        (cut, r"mm_features\[0\].data has"),
        (no_number, r"mm_features\[0\].data: sample 0 is nan"),
        (long, r"mm_features\[0\].grid_thw is"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            await prefilled_at_decode(pair, request_of(pair.d, wrong))


async def test_the_worker_checks_as_an_engine_in_its_process_does(
    pair: Pair, whisper: tuple[Path, Transcripts]
) -> None:
    engine = await make_engine(PrefillSettings(**SETTINGS | {"engine_process": False}), whisper[0], KEY)
    try:
        assert values_of(pair.p.core.verifier) == values_of(engine.verifier)
    finally:
        await engine.shutdown()
