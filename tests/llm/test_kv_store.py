"""`kv_store` in `LLM`: engines share what they compute, with the same texts, through a real Mooncake Store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.llm import LLM
from tests.support.engine.llm_requests import core_of, greedy, prompts_of
from tests.support.processes.mooncake_master import MooncakeMaster, mooncake_master
from tests.support.run.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow]

TINY: dict[str, Any] = {"dtype": "float32", "num_blocks": 12, "max_model_len": 190, "max_num_seqs": 2}


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    with mooncake_master(tmp_path) as started:
        yield started


def ask(llm: LLM) -> list[list[int]]:
    """Three prompts of 100 tokens, twice; two do not fit into the pool."""
    prompts = prompts_of([100, 101, 102])
    answers = [llm.generate(prompt, greedy(), use_tqdm=False)[0] for prompt in prompts * 2]
    return [answer.outputs[0].token_ids for answer in answers]


@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_share_what_they_compute(master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    # the bundled model is so small that reading may not be worth it
    monkeypatch.setattr("pdserve.engine.scheduler.scheduler.Scheduler._compute_s", lambda self, num_tokens: None)
    shared: dict[str, Any] = {"kv_host_mib": 1, "kv_store": master.url(), "tensor_parallel_size": ranks}
    with LLM("demo", **TINY) as llm:
        expected = ask(llm)
    with LLM("demo", **TINY, **shared) as first, LLM("demo", **TINY, **shared) as second:
        assert ask(first) == expected
        wait_until(lambda: stats(first)["num_store_blocks_written"] >= 6, "blocks are written")
        assert ask(second) == expected
        assert stats(second)["num_store_blocks_found"] >= 6
        assert stats(second)["num_store_blocks_read"] >= 6
        assert stats(second)["num_store_blocks_failed"] == 0
        master.kill()
        assert ask(second) == ask(first) == expected
        for llm in (first, second):
            wait_until(lambda llm=llm: not core_of(llm).has_work, "all is written")  # type: ignore[misc]
            core_of(llm).scheduler.check(idle=True)


def stats(llm: LLM) -> Any:
    return llm.llm_engine.client.utility("get_stats")
