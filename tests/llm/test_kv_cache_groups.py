"""`LLM` with a model that has windows in some layers: longer sequences fit into the same memory, with the texts of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.runner.pool.memory_needs import memory_needs
from pdserve.llm import LLM
from tests.support.engine.llm_requests import core_of, greedy
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.family_checkpoints import make_windowed_model
from tests.support.models.oracle import Oracle

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_blocks": 12, "block_size": 8, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 layers, one of them without a window of 13 tokens."""
    return make_windowed_model(tmp_path_factory.mktemp("gemma3"))


@pytest.mark.slow
def test_i1_longer_sequences_fit_and_no_text_changes(gemma3: Path) -> None:
    longest, oracle = [], Oracle(gemma3)
    for is_disabled in (False, True):
        with LLM(str(gemma3), disable_hybrid_kv_cache_manager=is_disabled, **OPTIONS) as llm:
            core = core_of(llm)
            longest.append(core.config.max_model_len)
            prompt = prompt_of(longest[-1] - 20)
            for _ in range(2):
                [answer] = llm.generate(prompt, greedy(max_tokens=20), use_tqdm=False)
                oracle.check(prompt, answer.outputs[0].token_ids)
            core.scheduler.check(idle=True)
            assert core.scheduler.kv.num_groups == (1 if is_disabled else 4)
    # of 48 blocks of one layer, each of three groups with a window needs 6
    assert longest == [(48 - 3 * 6) * 8, 12 * 8]


def test_the_pool_has_the_memory_that_the_settings_say(gemma3: Path) -> None:
    settings = WorkerSettings(model=str(gemma3), num_blocks=12, block_size=8)
    needs = [
        memory_needs(gemma3, msgspec.structs.replace(settings, disable_hybrid_kv_cache_manager=is_disabled)).pool
        for is_disabled in (False, True)
    ]
    assert needs[0] == needs[1] > 0
