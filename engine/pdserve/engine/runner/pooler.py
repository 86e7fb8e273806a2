"""`Pooler`: a prompt's last hidden states become one vector, chunk by chunk.

Only the sums of means live from step to step; a sequence that comes back after a preemption begins a new one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.common.request.pooling_params import PoolingParams


class Pooler:
    """The pooled sequences in the batch, by row. Without any it costs nothing."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._params: dict[int, PoolingParams] = {}
        self._is_pooled = np.zeros(num_rows, dtype=np.bool_)
        self._is_mean = np.zeros(num_rows, dtype=np.bool_)
        self._sums: Tensor | None = None
        """`[num_rows, H]` float32, made with the first mean."""

    def __len__(self) -> int:
        return len(self._params)

    def add(self, row: int, params: PoolingParams) -> None:
        self._params[row] = params
        self._is_pooled[row] = True
        self._is_mean[row] = params.pooling_type == "mean"
        if self._is_mean[row] and self._sums is not None:
            self._sums[row] = 0

    def remove(self, row: int) -> None:
        """Harmless when it is not pooled."""
        if self._params.pop(row, None) is not None:
            self._is_pooled[row] = self._is_mean[row] = False

    def is_pooled(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these rows are pooled; the others are sampled."""
        return self._is_pooled[rows]

    def add_chunks(self, hidden: Tensor, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Take a step's share of every mean. hidden `[T, H]`: `counts[i]` tokens of row `rows[i]`, one after the other."""
        row_of_token = np.repeat(rows, counts)
        places = np.flatnonzero(self._is_mean[row_of_token])
        if not len(places):
            return
        if self._sums is None:
            self._sums = torch.zeros(self._num_rows, hidden.shape[1], dtype=torch.float32, device=hidden.device)
        index = torch.from_numpy(row_of_token[places]).to(hidden.device)
        self._sums.index_add_(0, index, hidden[torch.from_numpy(places).to(hidden.device)].float())

    def finish(self, last: Tensor, rows: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> list[list[float]]:
        """The vectors of rows whose every token has been computed.

        last `[R, H]`: hidden states of their last tokens. num_tokens `[R]`: of their prompts.
        """
        vectors = last.to(torch.float32, copy=True)
        means = np.flatnonzero(self._is_mean[rows])
        if len(means) and self._sums is not None:
            counts = torch.from_numpy(num_tokens[means]).to(vectors).unsqueeze(-1)
            places, sums = (torch.from_numpy(index).to(vectors.device) for index in (means, rows[means]))
            vectors[places] = self._sums[sums] / counts
        return [_shaped(vector, self._params[row]).tolist() for vector, row in zip(vectors, rows.tolist(), strict=True)]


def _shaped(vector: Tensor, params: PoolingParams) -> Tensor:
    """`[H]` -> `[dimensions]`: cut, then normalised."""
    vector = vector[: params.dimensions]
    return torch.nn.functional.normalize(vector, dim=0) if params.normalize else vector
