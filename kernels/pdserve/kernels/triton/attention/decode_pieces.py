"""Cuts the context of decode rows into pieces, which the decode kernel divides among its programs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PIECE_TOKENS = 256
"""Keys of a piece, at least."""
MAX_PIECES = 64
"""Pieces of one row; a longer sequence has longer pieces."""
ALIGNMENT = 128
"""Pieces begin at multiples of this position: of every tile of the kernel, and of a page of up to 64 tokens."""


def cut_into_pieces(
    seq_lens: NDArray[np.int64], window: int | None, piece_tokens: int = PIECE_TOKENS, chunk: int | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Pieces of B rows, for `attend_pieces` and `join_pieces`.

    A row is cut only by its own length, so its result has the same bits whatever rows are next to it. seq_lens `[B]`: 0 for a row
    without keys; window: keys that a row sees, its own included; None: all; piece_tokens: keys of a piece, a multiple of
    `ALIGNMENT`; a row that sees more than `MAX_PIECES` of them has longer ones -> pieces `[n, 4]`: row, first key, end, place in
    the order of rows; the longest pieces come first, so that short ones fill the end of a launch. `[B + 1]`: row i has places
    `first_piece[i]..first_piece[i + 1] - 1`. chunk: see `AttentionSpec`.
    """
    first_keys = np.maximum(seq_lens - window, 0) if window is not None else np.zeros_like(seq_lens)
    if chunk is not None:
        first_keys = np.maximum(seq_lens - 1, 0) // chunk * chunk
    starts = first_keys // ALIGNMENT * ALIGNMENT
    visible = seq_lens - starts
    sizes = np.maximum(-(-visible // (MAX_PIECES * ALIGNMENT)) * ALIGNMENT, piece_tokens)
    counts = -(-visible // sizes)
    first_piece = np.zeros(len(seq_lens) + 1, np.int32)
    counts.cumsum(out=first_piece[1:])
    rows = np.repeat(np.arange(len(seq_lens)), counts)
    places = np.arange(len(rows))
    begins = starts[rows] + (places - first_piece[rows]) * sizes[rows]
    pieces = np.empty((len(rows), 4), np.int32)
    pieces[:, 0] = rows
    pieces[:, 1] = np.maximum(begins, first_keys[rows])
    pieces[:, 2] = np.minimum(begins + sizes[rows], seq_lens[rows])
    pieces[:, 3] = places
    return pieces[np.argsort(pieces[:, 1] - pieces[:, 2], kind="stable")], first_piece
