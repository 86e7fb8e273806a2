"""Copies of whole blocks, within a pool or between a pool and a ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.layer_ops import Block, check_pairs
from pdserve.kernels.triton.launch_configs import LaunchConfigs

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def move_words(source, target, pairs, words, BLOCK: tl.constexpr):
    """`target[pairs[i, 1]] = source[pairs[i, 0]]`; a block is `words` words, of which a program copies BLOCK."""
    pair = pairs + tl.program_id(0).to(tl.int64) * 2
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < words
    read, written = tl.load(pair) * words, tl.load(pair + 1) * words
    tl.store(target + written + at, tl.load(source + read + at, mask=mask), mask=mask)


def move_blocks(source: Tensor, target: Tensor, pairs: Sequence[Block], configs: LaunchConfigs) -> None:
    """See `LayerOps.move_blocks`. Through a buffer if a block is both read and written, since programs have no order."""
    check_pairs(source, target, pairs)
    if not pairs:
        return
    read, written = zip(*pairs, strict=True)
    if source.data_ptr() == target.data_ptr() and not {*read}.isdisjoint(written):
        buffer = source.new_empty((len(pairs), *source.shape[1:]))
        _launch(source, buffer, list(zip(read, range(len(pairs)), strict=True)), configs)
        source, pairs = buffer, list(zip(range(len(pairs)), written, strict=True))
    _launch(source, target, pairs, configs)


def _launch(source: Tensor, target: Tensor, pairs: Sequence[Block], configs: LaunchConfigs) -> None:
    size = source[:1].numel() * source.element_size()
    width = next(width for width in _WORDS if size % width == 0)
    words = size // width
    if words == 0:
        return
    block = min(configs.move_words, triton.next_power_of_2(words))
    move_words[(len(pairs), triton.cdiv(words, block))](
        source.view(-1).view(_WORDS[width]),
        target.view(-1).view(_WORDS[width]),
        torch.tensor(pairs).to(target.device, non_blocking=True),
        words,
        BLOCK=block,
        num_warps=configs.move_warps,
        enable_fp_fusion=True,
    )
