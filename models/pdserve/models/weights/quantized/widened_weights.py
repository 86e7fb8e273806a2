"""`WidenedWeights`: a checkpoint whose quantized matrices are read as numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator

from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.models.weights.checkpoint import Checkpoint
from pdserve.models.weights.quantized.quantization_method import QuantizationMethod
from pdserve.models.weights.quantized.stored_matrix import StoredMatrix
from pdserve.models.weights.rank_shard import Part
from pdserve.models.weights.weight_source import FLOATS, WeightSource

log = logging.getLogger(__name__)
_PIECE_NUMBERS = 4 << 20
"""Numbers that are widened at a time: 16 MiB in float32."""
_ALIGNED = 128
"""Rows of a piece are a multiple, so that blocks of scales and packed rows are not cut."""


class WidenedWeights(WeightSource):
    """Names are those that the weights have where they are not quantized."""

    def __init__(self, checkpoint: Checkpoint, method: QuantizationMethod) -> None:
        """Raises: ConfigError, UnsupportedModel."""
        self.folder = checkpoint.folder
        self._checkpoint = checkpoint
        self._matrices = method.matrices(checkpoint)
        hidden = method.unused(checkpoint)
        if hidden:
            log.info(
                "%s: %d scales for an 8-bit KV cache, such as %s, are not applied: with kv_cache_dtype=auto keys and values are "
                "not rounded, and with int8 and fp8 each token has scales of its own",
                self.folder, len(hidden), min(hidden),
            )  # fmt: skip
        for matrix in self._matrices.values():
            hidden.update(matrix.tensors)
        self._names = [*self._matrices, *(name for name in checkpoint.names if name not in hidden)]

    @property
    def names(self) -> list[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        matrix = self._matrices.get(name)
        return self._checkpoint.shape(name) if matrix is None else matrix.shape

    def where(self, name: str) -> str:
        matrix = self._matrices.get(name)
        return self._checkpoint.where(name if matrix is None else next(iter(matrix.tensors)))

    def stored(self, name: str) -> StoredMatrix | None:
        return self._matrices.get(name)

    def pieces(
        self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS, part: Part | None = None
    ) -> Iterator[Tensor]:
        matrix = self._matrices.get(name)
        if matrix is None:
            yield from self._checkpoint.pieces(name, shape, dtypes, part)
            return
        if matrix.shape != shape:
            raise ConfigError(
                f"{self.where(name)} stands for shape {list(matrix.shape)}, config.json says {list(shape)}"
            )
        is_of_rows = part is not None and part.dim == 0
        first, last = (part.start, part.stop) if part is not None and is_of_rows else (0, shape[0])
        step = max(1, _PIECE_NUMBERS // math.prod(shape[1:]))
        step = max(_ALIGNED, step // _ALIGNED * _ALIGNED) if len(shape) == 2 else step
        for start in range(first, last, step):
            piece = matrix.rows(start, min(start + step, last))
            yield piece if part is None or is_of_rows else piece[part.slices(len(shape))]

    def release(self, tensor: Tensor) -> None:
        self._checkpoint.release(tensor)
