"""Bytes behind a sequence's end are cleared once per block, when a decode step first ends in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.kernels.attention.kv_pages import KvPages
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.pretend_device import DEVICE, usable


@pytest.mark.few(1)
@pytest.mark.parametrize(("device", "backend"), [("cpu", "torch"), ("cpu", "auto"), (str(DEVICE), "auto")])
def test_stale_bytes_change_no_answer_and_are_cleared_once_per_block(
    make_real_engine: Callable[..., Harness],
    tiny_checkpoints: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    backend: str,
) -> None:
    """NaN wherever nothing has been written, also in blocks that an ended sequence leaves and another takes over.

    A back end that reads no byte behind the end, as the native one, clears none.
    """
    cleared: list[int] = []
    clear = KvPages.clear_tails

    def counted(pages: KvPages, last_blocks: torch.Tensor, num_used: torch.Tensor) -> None:
        cleared.append(len(last_blocks))
        clear(pages, last_blocks, num_used)

    monkeypatch.setattr(KvPages, "clear_tails", counted)
    prompts = [[(7 * i + size) % 300 for i in range(size)] for size in (3, 15, 33)]
    with usable(device):
        folder = tiny_checkpoints("llama")
        clean, stale = (
            make_real_engine(folder, device=device, num_blocks=12, max_model_len=80, attention_backend=backend)
            for _ in range(2)
        )
        stale.kv_cache.fill_(torch.nan)
        asked: list[dict[str, Any]] = [
            {"max_tokens": 20}, {"max_tokens": 2}, {"max_tokens": 20, "temperature": 1.0, "seed": 3}
        ]  # fmt: skip
        for params in asked:
            expected = [clean.add(prompt, params=params) for prompt in prompts]
            answers = clean.run()
            cleared.clear()
            found = [stale.add(prompt, params=params) for prompt in prompts]
            of_stale = stale.run()
            assert [of_stale[name].token_ids for name in found] == [answers[name].token_ids for name in expected]
            # the last token is sampled, not computed: a sequence of n tokens decodes at lengths p + 1 to p + n - 1
            lengths = [range(len(prompt) + 1, len(prompt) + params["max_tokens"]) for prompt in prompts]
            num_blocks = sum(len({(length - 1) // 16 for length in row}) for row in lengths)
            assert sum(cleared) == num_blocks or (backend == "auto" and not cleared)


def test_rows_that_are_new_and_blocks_that_are(make_engine: MakeEngine) -> None:
    batch = make_engine(block_size=4).runner.batch
    rows, ones = np.array([2, 5]), np.array([1, 1])
    assert batch.take_new_tails(rows, ones, np.array([4, 6])).tolist() == [0, 1]
    assert batch.take_new_tails(rows, ones, np.array([5, 7])).tolist() == [0]
    assert batch.take_new_tails(rows, ones, np.array([6, 8])).tolist() == []
    # a chunk of a prompt reads nothing behind its end
    assert batch.take_new_tails(rows, np.array([1, 5]), np.array([7, 13])).tolist() == []
    assert batch.take_new_tails(rows, ones, np.array([8, 14])).tolist() == [1]
