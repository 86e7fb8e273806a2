"""`kv_host_mib` in `LLM`: prompts that left the pool come back from host memory, with the same texts."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.llm import LLM
from tests.support.engine.llm_requests import core_of, greedy, prompts_of

TINY: dict[str, Any] = {"num_blocks": 12, "max_model_len": 190, "max_num_seqs": 2}


def ask(llm: LLM) -> list[list[int]]:
    """Three prompts of 100 tokens, twice; two do not fit into the pool."""
    prompts = prompts_of([100, 101, 102])
    answers = [llm.generate(prompt, greedy(), use_tqdm=False)[0] for prompt in prompts * 2]
    return [answer.outputs[0].token_ids for answer in answers]


@pytest.mark.slow
def test_texts_are_those_without_it() -> None:
    found = []
    for kv_host_mib in (0, 2):
        with LLM("demo", dtype="float32", kv_host_mib=kv_host_mib, **TINY) as llm:
            found.append(ask(llm))
            stats = llm.llm_engine.client.utility("get_stats")
            core_of(llm).scheduler.check(idle=True)
    assert found[0] == found[1]
    # 6 full blocks of 16 tokens each
    assert stats["num_host_blocks_loaded"] >= 3 * 6 - 12
    assert stats["external_prefix_cache_hits"] == 16 * stats["num_host_blocks_loaded"]
    assert stats["num_host_blocks_stored"] >= sum(stats["num_host_blocks_used"]) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_host_mib": -1}, "kv_host_mib is -1"),
        ({"kv_host_mib": 1, "enable_prefix_caching": False}, "kv_host_mib is 1 and enable_prefix_caching is false"),
        (
            {"kv_host_mib": 1, "block_size": 4096, "num_blocks": 2},
            "kv_host_mib is 1, and one block of each shape takes",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("demo", **options)
