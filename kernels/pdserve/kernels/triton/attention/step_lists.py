"""`StepLists`: what the attention kernels read of a step's lengths, cut on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.kernels.attention.attention_batch import StepLengths
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.triton.attention.decode_pieces import PIECE_TOKENS, cut_into_pieces
from pdserve.kernels.triton.attention.prefill_tiles import cut_into_tiles

_QUAD = 4
"""Numbers of a piece; everything in a decode list begins at a multiple of this."""


@dataclass(frozen=True, slots=True)
class FullChunk:
    """A chunk that attends to itself in torch's fused attention."""

    start: int
    """First row of the batch."""
    stop: int
    tiles: str | None
    """List of the chunk's rows over the keys before it; None: there are none."""


@dataclass(frozen=True, slots=True)
class SpecLists:
    """Names of the lists that the plan of one spec reads."""

    pieces: str | None
    """See `decode_places`; None: there are no decode rows."""
    tiles: str | None
    """`[n * FIELDS]`, of the chunks but the full ones; None: there is no other."""
    full_chunks: tuple[FullChunk, ...]


class StepLists:
    """Flat int32 arrays by name. Each is cut once, whatever number of specs needs it."""

    def __init__(self, lengths: StepLengths, arrays: Mapping[str, NDArray[np.int32]] | None = None) -> None:
        """arrays: those that were cut from these lengths before; None: none."""
        self._lengths = lengths
        self.arrays = dict(arrays or {})

    def of_spec(
        self, spec: AttentionSpec, tile_tokens: int, full_chunk: int | None, piece_tokens: int = PIECE_TOKENS
    ) -> SpecLists:
        """tile_tokens: query tokens of a prefill tile; full_chunk: a full chunk has a multiple of this number of tokens, None: no
        chunk is full; piece_tokens: of `cut_into_pieces`."""
        full = (
            () if full_chunk is None or self._lengths.most_chunks is not None else self._full_chunks(spec, full_chunk)
        )
        return SpecLists(
            self._pieces(spec, piece_tokens) if self._lengths.num_decodes else None,
            self._tiles(tile_tokens, full),
            tuple(self._full_chunk(tile_tokens, sequence) for sequence in full),
        )

    def _pieces(self, spec: AttentionSpec, piece_tokens: int) -> str:
        num_rows = self._lengths.num_decodes
        name = f"pieces of {piece_tokens} tokens, window {spec.window}, chunk {spec.chunk}, {num_rows} rows"
        if name not in self.arrays:
            seq_lens = self._lengths.seq_lens[:num_rows]
            pieces, first_piece = cut_into_pieces(seq_lens, spec.window, piece_tokens, spec.chunk)
            places = decode_places(num_rows)
            array = np.zeros(places.pieces + pieces.size, np.int32)
            array[places.count] = len(pieces)
            array[places.first_piece] = first_piece
            array[places.pieces :] = pieces.reshape(-1)
            self.arrays[name] = array
        return name

    def _full_chunks(self, spec: AttentionSpec, multiple: int) -> tuple[int, ...]:
        """Sequences whose chunk has a multiple of this number of tokens, and no key that a window or a chunk hides."""
        query_lens, seq_lens = self._lengths.query_lens.tolist(), self._lengths.seq_lens.tolist()
        longest = spec.reach or max(seq_lens, default=0)
        return tuple(
            sequence
            for sequence in range(self._lengths.num_decodes, len(seq_lens))
            if query_lens[sequence] % multiple == 0 and seq_lens[sequence] <= longest
        )

    def _tiles(self, tile_tokens: int, full: tuple[int, ...]) -> str | None:
        lengths = self._lengths
        sequences = [
            sequence
            for sequence in range(lengths.num_decodes, len(lengths.seq_lens))
            if sequence not in full and lengths.seq_lens[sequence]
        ]
        if not sequences:
            return None
        # specs have different full chunks only by their windows and chunks, and then different numbers of them
        name = f"tiles of {tile_tokens} tokens next to {len(full)} full chunks"
        if lengths.most_chunks is not None:
            num_tokens = int(lengths.query_lens.sum())
            name = f"tiles of {tile_tokens} tokens of at most {lengths.most_chunks} chunks with {num_tokens}"
        if name not in self.arrays:
            tiles = cut_into_tiles(lengths.query_lens, lengths.seq_lens, np.array(sequences), tile_tokens)
            if lengths.most_chunks is not None:
                # tiles without rows: nothing is read or written for them
                padding = num_tokens // tile_tokens + lengths.most_chunks - len(tiles)
                tiles = np.pad(tiles, ((0, padding), (0, 0)))
            self.arrays[name] = tiles.reshape(-1)
        return name

    def _full_chunk(self, tile_tokens: int, sequence: int) -> FullChunk:
        lengths = self._lengths
        start, num_tokens = int(lengths.query_lens[:sequence].sum()), int(lengths.query_lens[sequence])
        context_len = int(lengths.seq_lens[sequence]) - num_tokens
        if context_len == 0:
            return FullChunk(start, start + num_tokens, None)
        name = f"tiles of {tile_tokens} tokens of sequence {sequence}"
        if name not in self.arrays:
            tiles = cut_into_tiles(np.array([num_tokens]), np.array([context_len]), np.zeros(1, np.int64), tile_tokens)
            tiles[:, 0] = sequence
            self.arrays[name] = tiles.reshape(-1)
        return FullChunk(start, start + num_tokens, name)


@dataclass(frozen=True, slots=True)
class DecodePlaces:
    """Places of the parts of a decode list, which depend only on the number of rows."""

    count: int
    """Number of pieces."""
    first_piece: slice
    """See `cut_into_pieces`."""
    pieces: int
    """First number of the pieces, which are the rest."""


def decode_places(num_rows: int) -> DecodePlaces:
    return DecodePlaces(0, slice(_QUAD, _QUAD + num_rows + 1), _QUAD + -(-(num_rows + 1) // _QUAD) * _QUAD)
