"""Cuts the prompt chunks of a step into tiles of query tokens, one program of the prefill kernel per tile and KV head."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FIELDS = 5


def cut_into_tiles(
    query_lens: NDArray[np.int64], seq_lens: NDArray[np.int64], sequences: NDArray[np.int64], tile_tokens: int
) -> NDArray[np.int32]:
    """Tiles of some sequences.

    query_lens and seq_lens `[B]`; sequences: numbers of those that are cut; tile_tokens: query tokens of a tile -> `[n, 5]`:
    sequence, first row of the batch, number of rows, position of the first one, tokens of the sequence. Tiles that see the most
    keys come first, so that short ones fill the end of a launch.
    """
    counts = -(-query_lens[sequences] // tile_tokens)
    sequences = np.repeat(sequences, counts)
    starts = (np.arange(len(sequences)) - np.repeat(counts.cumsum() - counts, counts)) * tile_tokens
    lens = query_lens[sequences]
    tiles = np.empty((len(sequences), FIELDS), np.int32)
    tiles[:, 0] = sequences
    tiles[:, 1] = (query_lens.cumsum() - query_lens)[sequences] + starts
    tiles[:, 2] = np.minimum(tile_tokens, lens - starts)
    tiles[:, 3] = seq_lens[sequences] - lens + starts
    tiles[:, 4] = seq_lens[sequences]
    return tiles[np.argsort(-(tiles[:, 2] + tiles[:, 3]), kind="stable")]
