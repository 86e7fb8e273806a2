"""How the context of decode rows, and the query tokens of chunks, are cut for the Triton kernels. Pure numpy."""

from __future__ import annotations

import numpy as np
import pytest

from pdserve.kernels.attention.attention_batch import StepLengths
from pdserve.kernels.triton.attention.decode_pieces import ALIGNMENT, MAX_PIECES, PIECE_TOKENS, cut_into_pieces
from pdserve.kernels.triton.attention.prefill_tiles import cut_into_tiles
from pdserve.kernels.triton.attention.step_lists import StepLists, decode_places
from tests.support.kernels.attention_cases import make_spec


def lens(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("window", "chunk"), [(None, None), (1, None), (100, None), (4096, None), (None, 1), (None, 100), (None, 8192)]
)
def test_pieces_cover_what_each_row_sees_once(window: int | None, chunk: int | None) -> None:
    seq_lens = lens(0, 1, 63, 64, 65, 255, 256, 257, 5000, 16384, 16385, 131072, 0, 1 << 20)
    pieces, first_piece = cut_into_pieces(seq_lens, window, chunk=chunk)
    assert pieces.dtype == first_piece.dtype == np.int32
    assert first_piece[-1] == len(pieces)
    by_place = pieces[np.argsort(pieces[:, 3])]
    assert by_place[:, 3].tolist() == list(range(len(pieces)))
    for row, seq_len in enumerate(seq_lens):
        own = by_place[first_piece[row] : first_piece[row + 1]]
        assert len(own) <= MAX_PIECES
        assert (own[:, 0] == row).all()
        if seq_len == 0:
            assert len(own) == 0
            continue
        first_seen = 0 if chunk is None else (seq_len - 1) // chunk * chunk
        assert own[0, 1] == (first_seen if window is None else max(seq_len - window, 0))
        assert own[-1, 2] == seq_len
        assert (own[1:, 1] == own[:-1, 2]).all()
        assert (own[:, 1] < own[:, 2]).all()
        assert (own[1:, 1] % ALIGNMENT == 0).all()


def test_the_longest_pieces_come_first() -> None:
    pieces, _ = cut_into_pieces(lens(300, 100, 700), None)
    sizes = (pieces[:, 2] - pieces[:, 1]).tolist()
    assert sizes == sorted(sizes, reverse=True) == [PIECE_TOKENS] * 3 + [188, 100, 44]


def test_a_row_is_cut_alike_alone_and_beside_any_other() -> None:
    for window in (None, 1000):
        for length in (1, 77, 256, 3000, 20000, 100_001):
            alone, _ = cut_into_pieces(lens(length), window)
            pieces, first_piece = cut_into_pieces(lens(5, 131072, length, 0), window)
            own = pieces[pieces[:, 0] == 2]
            own[:, 0] = 0
            own[:, 3] -= first_piece[2]
            assert own.tolist() == alone.tolist()


def test_no_rows_and_no_keys_make_no_pieces() -> None:
    for seq_lens in (lens(), lens(0, 0)):
        pieces, first_piece = cut_into_pieces(seq_lens, None)
        assert pieces.shape == (0, 4)
        assert first_piece.tolist() == [0] * (len(seq_lens) + 1)


def test_tiles_cover_each_query_token_once_with_its_position() -> None:
    query_lens, seq_lens = lens(1, 1, 20, 16, 1, 33), lens(9, 0, 50, 16, 7, 34)
    tiles = cut_into_tiles(query_lens, seq_lens, np.arange(2, 6), 16)
    assert tiles.dtype == np.int32
    assert sorted(tiles.tolist()) == [
        [2, 2, 16, 30, 50],
        [2, 18, 4, 46, 50],
        [3, 22, 16, 0, 16],
        [4, 38, 1, 6, 7],
        [5, 39, 16, 1, 34],
        [5, 55, 16, 17, 34],
        [5, 71, 1, 33, 34],
    ]
    ends = (tiles[:, 2] + tiles[:, 3]).tolist()
    assert ends == sorted(ends, reverse=True)


def test_the_lists_of_a_step_are_cut_once_for_all_specs() -> None:
    lengths = StepLengths(lens(1, 1, 20, 16, 5), lens(300, 0, 50, 16, 7), 2)
    lists = StepLists(lengths)
    whole, capped, windowed = make_spec((4, 2, 8)), make_spec((4, 2, 8), softcap=2.0), make_spec((4, 2, 8), window=40)
    found = [lists.of_spec(spec, 16, 4) for spec in (whole, capped, windowed)]
    assert found[0] == found[1]
    pieces, tiles, full_chunks = found[0].pieces, found[0].tiles, found[0].full_chunks
    assert pieces is not None
    assert tiles is not None
    places = decode_places(2)
    array = lists.arrays[pieces]
    assert array[places.count] == 2
    assert array[places.first_piece].tolist() == [0, 2, 2]
    assert array[places.pieces :].tolist() == cut_into_pieces(lengths.seq_lens[:2], None)[0].reshape(-1).tolist()
    # 20 and 16 tokens are multiples of 4; the window hides keys of the first of them
    assert [(chunk.start, chunk.stop, chunk.tiles is None) for chunk in full_chunks] == [(2, 22, False), (22, 38, True)]
    assert [chunk.start for chunk in found[2].full_chunks] == [22]
    assert found[2].pieces != pieces
    assert found[2].tiles != tiles
    again = StepLists(lengths, lists.arrays)
    assert [again.of_spec(spec, 16, 4) for spec in (whole, capped, windowed)] == found
    assert all(again.arrays[name] is array for name, array in lists.arrays.items())
    assert len(again.arrays) == 5


def test_only_the_named_sequences_are_cut() -> None:
    tiles = cut_into_tiles(lens(1, 20, 16, 5), lens(9, 20, 16, 7), lens(1, 3), 16)
    assert sorted(tiles.tolist()) == [[1, 1, 16, 0, 20], [1, 17, 4, 16, 20], [3, 37, 5, 2, 7]]


def test_a_step_without_chunks_has_no_tiles() -> None:
    assert cut_into_tiles(lens(1, 1), lens(5, 6), lens(), 16).shape == (0, 5)
