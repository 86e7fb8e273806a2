"""`ScaledMatrix`: one number of eight bits per weight, times the scale of its block."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.kernels.layers.grouped_matrix import GroupedMatrix
from pdserve.models.weights.checkpoint import Checkpoint
from pdserve.models.weights.quantized.stored_matrix import CheckpointMatrix, GroupForm
from pdserve.models.weights.rank_shard import Part

EIGHT_BITS = ("I8", "F8_E4M3", "F8_E5M2")


class ScaledMatrix(CheckpointMatrix):
    """`values * scales`: one scale in all, one per row, one per group of columns of a row, or one per block of rows and columns.

    Source: `weight_scale` of compressed-tensors, ModelOpt and FBGEMM, `weight_scale_inv` of DeepSeek V3, which divides nothing
    despite its name.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        values: str,
        scales: str,
        block: tuple[int, int] | None,
        tensors: Collection[str],
        *,
        rounds_inputs: bool = False,
    ) -> None:
        """block: rows and columns of a scale; None: as the shape of the scales says. rounds_inputs: inputs of these int8 numbers
        are rounded too, per row, and products computed in integers. Raises: ConfigError."""
        shape = checkpoint.shape(values)
        super().__init__(checkpoint, shape, tensors)
        if len(shape) != 2:
            raise self.error(values, "a matrix")
        self._values = values
        self.rounds_inputs = rounds_inputs
        self._scales = self.scales(scales)
        found = tuple(self._scales.shape)
        rows, columns = shape
        if block is None:
            if found in ((), (1,), (1, 1)):
                block = (rows, columns)
            elif found in ((rows,), (rows, 1)):
                block = (1, columns)
            else:
                raise self.error(scales, f"[] or [{rows}, 1]")
        expected = (-(-rows // block[0]), -(-columns // block[1]))
        if self._scales.numel() != expected[0] * expected[1] or (len(found) == 2 and found != expected):
            raise self.error(scales, f"{list(expected)}")
        self._scales = self._scales.reshape(expected)
        self._block = block

    def integers(self, part: Part | None) -> tuple[Tensor, Tensor]:
        """int8 `[rows, columns]` of a part, and float32 `[rows]`: for scales of rows. Raises: ConfigError for other numbers."""
        values = self.read(self._values, ("I8",), *self.shape, part=part)
        scales = self._scales.expand(self.shape[0], -1)
        if scales.shape[1] != 1:
            raise ConfigError(
                f"{self.checkpoint.where(self._values)} has several scales in a row, with rounded inputs one is read"
            )
        of_rows = scales[:, 0] if part is None or part.dim else scales[part.start : part.stop, 0]
        return values, of_rows.contiguous()

    @property
    def group_form(self) -> GroupForm | None:
        dtype = self.checkpoint.dtype(self._values)
        width = min(self._block[1], self.shape[1])
        if dtype not in ("I8", "F8_E4M3") or self.shape[1] % width:
            return None
        return GroupForm(8, width, has_offsets=False, is_float=dtype == "F8_E4M3")

    def grouped(self, start: int, stop: int) -> GroupedMatrix:
        values = self.read(self._values, ("I8", "F8_E4M3"), *self.shape, part=Part(0, start, stop))
        is_float = values.dtype is torch.float8_e4m3fn
        return GroupedMatrix(values.view(torch.int8), self._scales_of(start, stop).contiguous(), None, 8, is_float)

    def _scales_of(self, start: int, stop: int) -> Tensor:
        """`[stop - start, groups]`"""
        height = self._block[0]
        first = start // height
        scales = self._scales[first : -(-stop // height)]
        return (
            scales.repeat_interleave(height, 0)[start - first * height : stop - first * height]
            if height > 1
            else scales
        )

    def rows(self, start: int, stop: int) -> Tensor:
        values = self.read(self._values, EIGHT_BITS, *self.shape, part=Part(0, start, stop)).float()
        scales, width = self._scales_of(start, stop), self._block[1]
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(width, 1)[:, : self.shape[1]]
        return values.mul_(scales)
