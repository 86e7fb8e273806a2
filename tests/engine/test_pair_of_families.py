"""Each model family through prefill and decode gives the answers of `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.models.kv_cache import (
    STATE_WINDOW,
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    StateSpec,
)
from tests.support.engine.engine_harness import Harness
from tests.support.engine.engine_pair import Pair
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.family_checkpoints import OPTIONS, cases, make_family
from tests.support.models.oracle import Oracle


@pytest.mark.slow
@pytest.mark.parametrize("family", OPTIONS)
def test_i1_a_family_through_p_and_d_equals_transformers(
    family: str, tmp_path: Path, make_real_engine: Callable[..., Harness]
) -> None:
    make_family(tmp_path, family, cases(family)[0])
    oracle = Oracle(tmp_path)
    pair = Pair(make_real_engine(tmp_path, max_num_batched_tokens=20), make_real_engine(tmp_path))
    prompts = {f"r{n}": prompt_of(n) for n in (1, 16, 17, 50)}
    for request_id, prompt in prompts.items():
        pair.add(prompt, request_id, params={"max_tokens": 20})
    pair.run()
    for request_id, prompt in prompts.items():
        oracle.check(prompt, pair.answer(request_id).token_ids)
    assert {name: len(pair.transfers[name].landed) for name in prompts} == {
        name: sum(-(-len(prompt) // 16) - _first_seen(spec, len(prompt)) // 16 for spec in pair.d.config.kv_cache_specs)
        for name, prompt in prompts.items()
    }


def _first_seen(spec: KVCacheSpec, position: int) -> int:
    """By the token at this position."""
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return position - position % spec.attention_chunk_size
    if isinstance(spec, StateSpec):
        return max(0, position - STATE_WINDOW + 1)
    return max(0, position - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0
