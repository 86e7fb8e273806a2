"""`MropePositions`: rotary positions of sequences with images, which have three axes: time, height and width.

A text token has one position on all axes. An image's tokens have the position after the text before it, plus their row and column;
the text after it continues after the longer side. So an output token's position is its place plus a constant, the sequence's
`mrope_position_delta`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdserve.common.request.multimodal import MultiModalFeatureSpec
from pdserve.engine.arrays import IntArray

NUM_AXES = 3


def prompt_positions(
    num_tokens: int, features: Sequence[MultiModalFeatureSpec], merge_size: int
) -> tuple[IntArray, int]:
    """Positions `[3, num_tokens]` of a prompt, and its `mrope_position_delta`. merge_size: patches of a token's side."""
    positions = np.empty((NUM_AXES, num_tokens), np.int64)
    token = position = 0
    for feature in features:
        offset, end = feature.mm_position.offset, feature.mm_position.end
        positions[:, token:offset] = np.arange(position, position + offset - token)
        position += offset - token
        _, height, width = (feature.grid_thw[0], *(side // merge_size for side in feature.grid_thw[1:]))
        grid = np.indices((1, height, width)).reshape(NUM_AXES, -1)
        positions[:, offset:end] = position + grid
        position += max(height, width)
        token = end
    positions[:, token:] = np.arange(position, position + num_tokens - token)
    return positions, position + num_tokens - token - num_tokens


class MropePositions:
    """Positions of a batch's rows."""

    def __init__(self, num_rows: int) -> None:
        self._prompts: dict[int, IntArray] = {}
        """Row -> positions of its prompt, of rows with images."""
        self._deltas = np.zeros(num_rows, np.int64)

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, row: int, num_prompt: int, features: Sequence[MultiModalFeatureSpec], merge_size: int) -> None:
        self._prompts[row], self._deltas[row] = prompt_positions(num_prompt, features, merge_size)

    def remove(self, row: int) -> None:
        """No effect for a row without images."""
        if self._prompts.pop(row, None) is not None:
            self._deltas[row] = 0

    def of_step(self, rows: IntArray, counts: IntArray, row_of_token: IntArray, positions: IntArray) -> IntArray:
        """`[T]`, or `[3, T]` if the step has tokens whose axes differ.

        rows, counts `[S]`; row_of_token `[T]`; positions `[T]`: places of the tokens in their sequences.
        """
        shifted = positions + self._deltas[row_of_token]
        ends = np.cumsum(counts)
        for row, end, count in zip(rows.tolist(), ends.tolist(), counts.tolist(), strict=True):
            prompt = self._prompts.get(row)
            if prompt is None:
                continue
            start = end - count
            first = int(positions[start])
            part = prompt[:, first : first + count]
            num_in_prompt = part.shape[1]
            if not num_in_prompt:
                continue
            if shifted.ndim == 1 and not (part == part[0]).all():
                shifted = np.tile(shifted, (NUM_AXES, 1))
            shifted[..., start : start + num_in_prompt] = part if shifted.ndim > 1 else part[0]
        return shifted
