"""Fixtures: engines over a tiny BART, whose prompts have at most `MAX_LEN` tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.request.encoder_prompt import EncoderDecoderPrompts
from tests.support.engine.engine_harness import Harness
from tests.support.models.encoder_decoder_checkpoints import PAD, START, GreedyAnswers, make_encoder_decoder

BLOCK_SIZE, MAX_LEN = 8, 96


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GreedyAnswers]:
    """A folder with BART, and its answers by `generate`."""
    folder = tmp_path_factory.mktemp("bart")
    return folder, GreedyAnswers(make_encoder_decoder(folder))


@pytest.fixture
def make_bart(bart: tuple[Path, GreedyAnswers], make_real_engine: Callable[..., Harness]) -> Callable[..., Harness]:
    """Engines over `bart`; fields: of `EngineConfig`."""

    def make(**fields: Any) -> Harness:
        prompts = EncoderDecoderPrompts((START,), PAD, MAX_LEN)
        given: dict[str, Any] = {
            "block_size": BLOCK_SIZE, "num_blocks": 64, "max_model_len": prompts.max_sequence_len(BLOCK_SIZE),
            "max_num_batched_tokens": 128, "max_num_seqs": 8, "enable_prompt_embeds": False,
        }  # fmt: skip
        return make_real_engine(bart[0], encoder_decoder=prompts, **(given | fields))

    return make
