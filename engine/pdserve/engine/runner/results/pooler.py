"""`Pooler`: makes one vector of a prompt's hidden states, chunk by chunk.

Only the sums of mean pooling persist between steps; a preempted sequence begins a new sum.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.common.request.pooling_params import PoolingParams
from pdserve.engine.arrays import IntArray
from pdserve.models.layers.classification_head import ClassificationHead


class Pooler:
    """The pooled sequences of the batch, by row. Costs nothing if there are none."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._params: dict[int, PoolingParams] = {}
        self._is_pooled = np.zeros(num_rows, dtype=np.bool_)
        self._is_mean = np.zeros(num_rows, dtype=np.bool_)
        self._sums: Tensor | None = None
        """`[num_rows, H]` float32; None before the first sequence with mean pooling."""

    def __len__(self) -> int:
        return len(self._params)

    def add(self, row: int, params: PoolingParams) -> None:
        self._params[row] = params
        self._is_pooled[row] = True
        self._is_mean[row] = params.pooling_type == "mean"
        if self._is_mean[row] and self._sums is not None:
            self._sums[row] = 0

    def remove(self, row: int) -> None:
        """Forget a row; no effect if it is not pooled."""
        if self._params.pop(row, None) is not None:
            self._is_pooled[row] = self._is_mean[row] = False

    def is_pooled(self, rows: IntArray) -> NDArray[np.bool_]:
        """True for each row that is pooled; other rows are sampled."""
        return self._is_pooled[rows]

    def add_chunks(self, hidden: Tensor, rows: IntArray, counts: IntArray) -> None:
        """Add a step's hidden states to the sums. hidden `[T, H]`: `counts[i]` consecutive tokens of row `rows[i]`."""
        row_of_token = np.repeat(rows, counts)
        places = np.flatnonzero(self._is_mean[row_of_token])
        if not len(places):
            return
        if self._sums is None:
            self._sums = torch.zeros(self._num_rows, hidden.shape[1], dtype=torch.float32, device=hidden.device)
        index = torch.from_numpy(row_of_token[places]).to(hidden.device)
        self._sums.index_add_(0, index, hidden[torch.from_numpy(places).to(hidden.device)].float())

    def finish(
        self, last: Tensor, rows: IntArray, num_tokens: IntArray, classifier: ClassificationHead | None = None
    ) -> list[list[float]]:
        """The vectors of rows whose prompt is complete.

        last `[R, H]`: hidden states of their last tokens. num_tokens `[R]`: lengths of their prompts. classifier: of the model,
        which all rows use; None: all are embeddings.
        """
        if classifier is not None:
            activated = [self._params[row].use_activation for row in rows.tolist()]
            values: list[list[float]] = classifier.forward(last, torch.tensor(activated, device=last.device)).tolist()
            return values
        vectors = last.to(torch.float32, copy=True)
        means = np.flatnonzero(self._is_mean[rows])
        if len(means) and self._sums is not None:
            counts = torch.from_numpy(num_tokens[means]).to(vectors).unsqueeze(-1)
            places, sums = (torch.from_numpy(index).to(vectors.device) for index in (means, rows[means]))
            vectors[places] = self._sums[sums] / counts
        return [_shaped(vector, self._params[row]).tolist() for vector, row in zip(vectors, rows.tolist(), strict=True)]


def _shaped(vector: Tensor, params: PoolingParams) -> Tensor:
    """`[H]` -> `[dimensions]`: truncated, then normalised."""
    vector = vector[: params.dimensions]
    return torch.nn.functional.normalize(vector, dim=0) if params.normalize else vector
