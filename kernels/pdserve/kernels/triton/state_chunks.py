"""Chunks of prompts through states in a pool: the gated delta rule and the selective scan, a tile of tokens at once.

A matrix is one of keys and values, whichever its rows are: a token decays it, adds `k u^T`, and reads it with q. In the delta rule
u is the corrected value (`delta_rule.py`); in the scan it is x, k is b and q is c (`selective_scan.py`). What depends on no state
is computed in a first launch, for all tiles at once. In a second one each program takes columns of values through a chunk's tiles.

What is left of a token at a later one is the exponential of the sum of the decays between them. Such a sum is made of these decays,
never as a difference of longer sums: in float32 that would lose a weak decay next to strong ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.state.in_place_plan import num_decays
from pdserve.kernels.triton.launch_configs import LaunchConfigs, register_limit
from pdserve.kernels.triton.pooled_states import PooledMatrices
from pdserve.kernels.triton.state_steps import strides_of

LEAST = 16
"""Numbers of a key, and columns of values, of a program at least: what a product takes."""


@triton.jit
def product(a, b, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    """`[M, K]` times `[K, N]`, as a sum over parts of 16 numbers: an exact product keeps its operands in registers."""
    a = tl.permute(tl.reshape(a, (M, K // 16, 16)), (1, 0, 2))
    b = tl.reshape(b, (K // 16, 16, N))
    return tl.sum(tl.dot(a, b, input_precision="ieee"), 0)


@triton.jit(do_not_specialize=["num_decodes", "num_tiles"])
def pair_tokens(
    starts, query, key, decay, beta, seen, solved,
    query_row, query_matrix, key_row, key_matrix, decay_row, decay_matrix, beta_row, beta_matrix, num_decodes, num_tiles,
    KEYS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, DECAY_BY_KEY: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """For BLOCK_T tokens i and j of a chunk: how much of u_j is in the result of i, and with CORRECTS the matrix `(1 + L)^-1 b`.

    Programs (chunk and tile of its tokens, matrix); those of tiles that a chunk lacks end at once. -> seen and solved
    `[rows, M, BLOCK_T]`: i is the row, counted from the first one after the decode rows.
    """
    matrix = tl.program_id(1)
    sequence = num_decodes + tl.program_id(0) // num_tiles
    first = tl.load(starts + sequence) + tl.program_id(0) % num_tiles * BLOCK_T
    stop = tl.load(starts + sequence + 1)
    if first < stop:
        t, n = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
        i, j = t[:, None], t[None, :]
        token = first + t
        is_token, is_key = token < stop, n < KEYS
        here = is_token[:, None] & is_key[None, :]
        keys = key + matrix * key_matrix + n
        k = tl.load(keys[None, :] + token[:, None] * key_row, mask=here, other=0.0)
        q = tl.load(query + matrix * query_matrix + token[:, None] * query_row + n[None, :], mask=here, other=0.0)
        decays = decay + matrix * decay_matrix
        if DECAY_BY_KEY:
            # such decays are no factor of a product of keys: one token j after the other, the last first
            num = tl.minimum(stop - first, BLOCK_T)
            sums = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
            pairs = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
            reads = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
            for step in range(num):
                place = num - 1 - step
                is_next = is_key & (place + 1 < num)
                next_decays = tl.load(decays + (first + place + 1) * decay_row + n, mask=is_next, other=0.0)
                sums = tl.where(i > place, sums + next_decays[None, :], 0.0)
                left = tl.exp(sums) * tl.load(keys + (first + place) * key_row, mask=is_key, other=0.0)[None, :]
                reads = tl.where(j == place, tl.sum(q * left, 1)[:, None], reads)
                if CORRECTS:
                    pairs = tl.where(j == place, tl.sum(k * left, 1)[:, None], pairs)
        else:
            logs = tl.load(decays + token * decay_row, mask=is_token, other=0.0)
            left = tl.exp(tl.cumsum(tl.where(i > j, logs[:, None], 0.0), 0))
            reads = product(q, tl.trans(k), BLOCK_T, BLOCK_K, BLOCK_T) * left
            if CORRECTS:
                pairs = product(k, tl.trans(k), BLOCK_T, BLOCK_K, BLOCK_T) * left
        spot = ((token - num_decodes)[:, None] * tl.num_programs(1) + matrix) * BLOCK_T + j
        tl.store(seen + spot, tl.where(i >= j, reads, 0.0), mask=is_token[:, None])
        if CORRECTS:
            strength = tl.load(beta + token * beta_row + matrix * beta_matrix, mask=is_token, other=0.0)
            # each row of (1 + L)^-1 from those before it
            lower = tl.trans(tl.where(i > j, pairs * strength[:, None], 0.0))
            rows = tl.where(i == j, 1.0, 0.0)
            for place in range(1, BLOCK_T):
                own = tl.sum(tl.where(j == place, lower, 0.0), 1)
                rows -= tl.where(i == place, tl.sum(own[:, None] * rows, 0)[None, :], 0.0)
            tl.store(solved + spot, rows * strength[None, :], mask=is_token[:, None])


@triton.jit(do_not_specialize=["layer", "num_sequences", "num_decodes"])
def change_by_chunks(
    states, blocks, starts, query, key, value, decay, seen, solved, out,
    block_stride, head_stride, layer_stride, layer, num_sequences, num_decodes, first_number, from_key, from_value,
    query_row, query_matrix, key_row, key_matrix, value_row, value_matrix, decay_row, decay_matrix,
    PER_HEAD: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr, DECAY_BY_KEY: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of values of a matrix through all tokens of a chunk. seen, solved: of `pair_tokens`.

    from_key, from_value: from one number of a matrix to that of the next key, or value. Programs (chunk, matrix, block of columns).
    Reference: `Recurrence.in_chunks`.
    """
    sequence, matrix = num_decodes + tl.program_id(0), tl.program_id(1)
    t, n = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = n < KEYS, v < VALUES
    here = is_key[:, None] & is_value[None, :]
    before, after = tl.load(blocks + sequence), tl.load(blocks + num_sequences + sequence)
    numbers = (matrix // PER_HEAD) * head_stride + layer.to(tl.int64) * layer_stride + first_number
    numbers = numbers + (matrix % PER_HEAD) * KEYS * VALUES + n[:, None] * from_key + v[None, :] * from_value
    state = tl.load(states + before * block_stride + numbers, mask=here & (before >= 0), other=0.0)
    keys, queries = key + matrix * key_matrix + n[None, :], query + matrix * query_matrix + n[None, :]
    values, decays = value + matrix * value_matrix + v[None, :], decay + matrix * decay_matrix
    stop = tl.load(starts + sequence + 1)
    for start in range(tl.load(starts + sequence), stop, BLOCK_T):
        token = start + t
        is_token = token < stop
        is_next = (t + 1 < BLOCK_T) & (token + 1 < stop)
        is_vector, is_own = is_token[:, None] & is_key[None, :], is_token[:, None] & is_value[None, :]
        # decays from the tile's first token to each
        if DECAY_BY_KEY:
            at = decays + token[:, None] * decay_row + n[None, :]
            logs = tl.load(at, mask=is_vector, other=0.0)
        else:
            logs = tl.load(decays + token * decay_row, mask=is_token, other=0.0)[:, None]
        whole = tl.exp(tl.cumsum(logs, 0))
        k = tl.load(keys + token[:, None] * key_row, mask=is_vector, other=0.0)
        update = tl.load(values + token[:, None] * value_row, mask=is_own, other=0.0)
        pairs = ((token - num_decodes)[:, None] * tl.num_programs(1) + matrix) * BLOCK_T + t[None, :]
        if CORRECTS:
            update -= product(k * whole, state, BLOCK_T, BLOCK_K, BLOCK_V)
            factors = tl.load(solved + pairs, mask=is_token[:, None], other=0.0)
            update = tl.dot(factors, update, input_precision="ieee")
        q = tl.load(queries + token[:, None] * query_row, mask=is_vector, other=0.0)
        found = product(q * whole, state, BLOCK_T, BLOCK_K, BLOCK_V)
        factors = tl.load(seen + pairs, mask=is_token[:, None], other=0.0)
        found = tl.dot(factors, update, found, input_precision="ieee")
        tl.store(out + (token[:, None] * tl.num_programs(1) + matrix) * VALUES + v[None, :], found, mask=is_own)
        # and after each up to the last
        if DECAY_BY_KEY:
            nexts = tl.load(at + decay_row, mask=is_next[:, None] & is_key[None, :], other=0.0)
            every = tl.exp(tl.sum(logs, 0))[:, None]
        else:
            nexts = tl.load(decays + (token + 1) * decay_row, mask=is_next, other=0.0)[:, None]
            every = tl.exp(tl.sum(logs))
        left = tl.exp(tl.cumsum(nexts, 0, reverse=True))
        state = tl.dot(tl.trans(k * left), update, state * every, input_precision="ieee")
    tl.store(states + after * block_stride + numbers, state, mask=here & (after >= 0))


def delta_chunks(matrices: PooledMatrices, tokens: Sequence[Tensor], out: Tensor, configs: LaunchConfigs) -> None:
    """Two launches. tokens: of `DELTA_RULE`, `[T, M, ...]`; out: `[T, M, ...]`, contiguous."""
    query, key, value, decay, beta = tokens
    _launch(matrices, (query, key, value, decay), beta, 0, out, configs)


def scan_chunks(matrices: PooledMatrices, tokens: Sequence[Tensor], out: Tensor, configs: LaunchConfigs) -> None:
    """Two launches. tokens: of `SELECTIVE_SCAN` with a decay per matrix; out: as of `delta_chunks`."""
    x, b, c, rates, steps = tokens
    _launch(matrices, (c, b, x, rates[..., 0, 0] * steps[..., 0]), None, 1, out, configs)


def _launch(
    matrices: PooledMatrices,
    tokens: Sequence[Tensor],
    beta: Tensor | None,
    key_axis: int,
    out: Tensor,
    configs: LaunchConfigs,
) -> None:
    """tokens: queries, keys, values and decays. key_axis: the dimension of a matrix along which a key has its numbers."""
    (query, key, _, decay), num_matrices, num_tokens = tokens, out.shape[1], configs.chunk_tokens
    pooled, (rows, columns) = matrices.pooled, matrices.shape
    # numbers of a key and of a value, and from one of a matrix to that of the next key, or value
    sizes, from_next = ((rows, columns), (columns, 1)) if key_axis == 0 else ((columns, rows), (1, columns))
    high, wide = (max(LEAST, triton.next_power_of_2(size)) for size in sizes)
    wide = min(wide, max(LEAST, configs.chunk_numbers // high))
    tiles = triton.cdiv(pooled.longest, num_tokens)
    parts = 1 if beta is None else 2
    work = torch.empty(
        (parts, len(out) - pooled.num_decodes, num_matrices, num_tokens), dtype=torch.float32, device=out.device
    )
    seen, solved, strength = work[0], work[-1], decay if beta is None else beta
    forms = {
        "KEYS": sizes[0],
        "BLOCK_K": high,
        "BLOCK_T": num_tokens,
        "DECAY_BY_KEY": num_decays(tokens) > 1,
        "CORRECTS": parts == 2,
    }
    options = {"num_stages": 1, "enable_fp_fusion": True, **register_limit(configs.max_registers)}
    pair_tokens[(pooled.num_chunks * tiles, num_matrices)](
        pooled.starts, query, key, decay, strength, seen, solved, *strides_of((query, key, decay, strength)),
        pooled.num_decodes, tiles, **forms, num_warps=configs.state_warps, **options,
    )  # fmt: skip
    change_by_chunks[(pooled.num_chunks, num_matrices, triton.cdiv(sizes[1], wide))](
        pooled.states, pooled.blocks, pooled.starts, *tokens, seen, solved, out,
        *pooled.states.stride()[:3], pooled.layer, pooled.num_sequences, pooled.num_decodes, matrices.first, *from_next,
        *strides_of(tokens), PER_HEAD=num_matrices // pooled.states.shape[1], VALUES=sizes[1], BLOCK_V=wide, **forms,
        num_warps=configs.chunk_warps, **options,
    )  # fmt: skip
