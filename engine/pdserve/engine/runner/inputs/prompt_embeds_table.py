"""`PromptEmbedsTable`: the embeddings of prompts that have no token ids, by row of the batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pdserve.common.request.prompt_embeds import PromptEmbeds
from pdserve.engine.arrays import IntArray

_TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def embeds_tensor(embeds: PromptEmbeds) -> Tensor:
    """`[num_tokens, H]`, in its own dtype; shares no memory with the bytes."""
    flat = torch.frombuffer(bytearray(embeds.data), dtype=_TORCH_DTYPES[embeds.dtype])
    return flat.view(embeds.num_tokens, embeds.hidden_size)


class PromptEmbedsTable:
    """The rows with embeddings. Costs nothing if there are none."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def add(self, row: int, embeds: PromptEmbeds, dtype: torch.dtype, device: torch.device) -> None:
        """dtype, device: of the model."""
        self._tensors[row] = embeds_tensor(embeds).to(device, dtype)

    def remove(self, row: int) -> None:
        """Forget a row; no effect if it has no embeddings."""
        self._tensors.pop(row, None)

    def are_read(self, rows: IntArray, num_computed: IntArray) -> bool:
        """True if a step computes a position of some prompt's embeddings. num_computed: the batch's, by row."""
        return any(
            tensor is not None and num_computed[row] < len(tensor)
            for row in rows.tolist()
            if (tensor := self._tensors.get(row)) is not None
        )

    def put(self, embedded: Tensor, rows: IntArray, counts: IntArray, num_computed: IntArray) -> None:
        """Replace the embeddings of placeholders. embedded `[T, H]`: of a step's tokens, `counts[i]` of row `rows[i]`.

        num_computed: the batch's, by row, before the step.
        """
        starts = np.cumsum(counts) - counts
        for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
            tensor = self._tensors.get(row)
            if tensor is None:
                continue
            first = int(num_computed[row])
            given = tensor[first : first + count]
            embedded[start : start + len(given)] = given
