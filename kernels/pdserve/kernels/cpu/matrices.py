"""`Matrix`: a weight `[out, in]` of a linear layer, as numbers or quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdserve.kernels.cpu.int8_linear import Int8Matrix
from pdserve.kernels.layers.grouped_matrix import GroupedMatrix

Matrix = Tensor | Int8Matrix | GroupedMatrix


def tensors(matrices: Sequence[object]) -> list[Tensor]:
    """The matrices, none of which is quantized. Raises: TypeError."""
    found = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
    if len(found) < len(matrices):
        raise TypeError(f"{len(matrices) - len(found)} of {len(matrices)} matrices are quantized")
    return found


def stack_rows(matrices: Sequence[Matrix]) -> Matrix:
    """The weight whose output is the concatenated outputs of these; all are quantized in one way, or none is. Raises: TypeError."""
    if len(matrices) == 1:
        return matrices[0]
    if len({type(matrix) for matrix in matrices}) > 1:
        raise TypeError(f"some of {len(matrices)} matrices are quantized, and some are not")
    eights = [matrix for matrix in matrices if isinstance(matrix, Int8Matrix)]
    if eights:
        return Int8Matrix.stacked(eights)
    grouped = [matrix for matrix in matrices if isinstance(matrix, GroupedMatrix)]
    return GroupedMatrix.stacked(grouped) if grouped else torch.cat(tensors(matrices))


def with_rows(matrix: Matrix, arranged: Callable[[Tensor], Tensor]) -> Matrix:
    """The weight with its rows in another order. arranged: of any tensor `[out, ...]`."""
    return arranged(matrix) if isinstance(matrix, Tensor) else matrix.with_rows(arranged)
