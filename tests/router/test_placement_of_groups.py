"""Placement with KV cache groups: what a prompt takes of a pool, and what a transfer moves."""

from __future__ import annotations

import pytest

from pdserve.router.placement.placement import estimate
from tests.router.candidates import seen, worker
from tests.router.fake_worker import LAYOUT
from tests.support.models.kv_layouts import with_windows


def test_of_groups_with_a_window_a_transfer_moves_what_is_seen():
    """1 group of 3 has no window: 800 tokens are 50 blocks of it, and 2 of each other one."""
    layout = with_windows(LAYOUT, 0, 20, 20)
    decode = seen(worker("d", layout=layout, prefill_tokens_per_s=1000.0), 800, 40)
    source = seen(worker("p", "prefill", layout=layout, prefill_tokens_per_s=1000.0), 800, 0)
    block_s = 0.01
    found = estimate(decode, source, layout.shapes[0].total_block_bytes / block_s)
    assert found.remote_s == pytest.approx(0.8 + (10 + 2 + 2) * block_s)


def test_of_states_alone_a_transfer_moves_the_last():
    """A prompt of 800 tokens ends with a full block, which has its only state."""
    layout = with_windows(LAYOUT, 2)
    decode = seen(worker("d", layout=layout, prefill_tokens_per_s=1000.0), 800, 0)
    source = seen(worker("p", "prefill", layout=layout, prefill_tokens_per_s=1000.0), 800, 0)
    block_s = 0.01
    found = estimate(decode, source, layout.shapes[0].total_block_bytes / block_s)
    assert found.remote_s == pytest.approx(0.8 + block_s)
    assert layout.hits_need_last_block
    assert not any(with_windows(LAYOUT, *windows).hits_need_last_block for windows in ((0,), (0, 2), (20, 2)))


def test_a_block_of_each_group_is_one_held_block():
    layout = with_windows(LAYOUT, 0, 20, 20)
    it = worker("d", layout=layout, blocks_in_use=31)
    assert (it.num_blocks, it.held_blocks) == (333, 11)
    share = seen(it, 800, 40).share(prefills=False, grows=False)
    assert (share.all_blocks, share.new_blocks) == (18, 5)
