"""A sequence without room is tried again when it may fit, and costs a comparison per step before."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.engine.kv_cache.kv_cache_manager import KVCacheManager
from pdserve.engine.request import Request
from tests.support.engine.engine_harness import Harness, MakeEngine

PROMPT = list(range(10, 40))


def crowded(make_engine: MakeEngine, **config: Any) -> Harness:
    """An engine in which a first sequence has left no room for `PROMPT`."""
    engine = make_engine(num_blocks=10, block_size=4, max_model_len=40, max_num_seqs=4, **config)
    engine.add([1] * 10, "runs", params={"max_tokens": 20})
    engine.step()
    engine.add(PROMPT, "waits", params={"max_tokens": 4})
    engine.step()
    assert "waits" not in engine.scheduler.running
    return engine


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the sequences that were looked up in the prefix cache."""
    found: list[str] = []
    look_up = KVCacheManager.get_computed_blocks

    def noted(self: KVCacheManager, request: Request, limit_tokens: int) -> Any:
        found.append(request.request_id)
        return look_up(self, request, limit_tokens)

    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", noted)
    return found


def test_it_is_not_looked_up_while_nothing_helps_it(make_engine: MakeEngine, lookups: list[str]) -> None:
    engine = crowded(make_engine)
    tried = len(lookups)
    for _ in range(3):
        engine.step()
    assert len(lookups) == tried
    assert engine.run()["waits"].finish_reason is not None


def test_it_runs_once_blocks_are_free(make_engine: MakeEngine) -> None:
    engine = crowded(make_engine)
    engine.core.abort_request("runs")
    engine.step()
    assert "waits" in engine.scheduler.running
    engine.run()


def test_it_is_looked_up_again_when_its_prefix_may_have_been_cached(
    make_engine: MakeEngine, lookups: list[str]
) -> None:
    """Each block that enters the cache may be one of its own."""
    engine = crowded(make_engine)
    pool = engine.scheduler.pool
    del lookups[:]
    pool.num_remembered += engine.config.blocks_for(len(PROMPT))
    engine.step()
    assert lookups == ["waits"]
    engine.run()
