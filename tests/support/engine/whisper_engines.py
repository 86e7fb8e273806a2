"""Fixtures: engines over a tiny Whisper, whose prompts are sound of at most one second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.audio_processor_config import AudioProcessorConfig
from pdserve.common.request.encoder_prompt import EncoderDecoderPrompts
from pdserve.common.request.multimodal import MultiModalFeatureSpec
from pdserve.text.audio.audio_processor import AudioProcessor
from tests.support.engine.engine_harness import Harness
from tests.support.models.whisper_checkpoints import (
    BEGIN_SUPPRESSED,
    IDS,
    MAX_LEN,
    PAD,
    SUPPRESSED,
    Transcripts,
    make_whisper,
    sound,
)

BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Transcripts]:
    """A folder with Whisper, and its transcripts by `generate`."""
    folder = tmp_path_factory.mktemp("whisper")
    return folder, make_whisper(folder)


@pytest.fixture
def make_whisper_engine(
    whisper: tuple[Path, Transcripts], make_real_engine: Callable[..., Harness]
) -> Callable[..., Harness]:
    """Engines over `whisper`; fields: of `EngineConfig`."""
    audio = AudioProcessorConfig.read(whisper[0])

    def make(**fields: Any) -> Harness:
        prompts = EncoderDecoderPrompts((IDS["startoftranscript"],), PAD, MAX_LEN, audio, SUPPRESSED, BEGIN_SUPPRESSED)
        given: dict[str, Any] = {
            "block_size": BLOCK_SIZE, "num_blocks": 64, "max_model_len": prompts.max_sequence_len(BLOCK_SIZE),
            "max_num_batched_tokens": 128, "max_num_seqs": 8, "enable_prompt_embeds": False,
        }  # fmt: skip
        return make_real_engine(whisper[0], encoder_decoder=prompts, **(given | fields))

    return make


def features_of(folder: Path, seed: int) -> list[MultiModalFeatureSpec]:
    """The sound of a prompt; `sound(seed)`."""
    return [AudioProcessor(AudioProcessorConfig.read(folder)).process(sound(seed), "sound")]
