"""`FourBitFloats`: floating-point numbers of four bits (E2M1), two in a byte, with a scale for 16 or 32 of them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.kernels.layers.grouped_matrix import GroupedMatrix
from pdserve.models.weights.checkpoint import Checkpoint
from pdserve.models.weights.quantized.stored_matrix import CheckpointMatrix, GroupForm
from pdserve.models.weights.rank_shard import Part

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the low three bits; the fourth is the sign."""
_SCALE_GROUP, _EXPONENT_GROUP = 16, 32
"""Numbers with one scale in NVFP4 and in MXFP4."""
_BIAS = 127
"""Of an exponent of eight bits."""


class FourBitFloats(CheckpointMatrix):
    """NVFP4: scales in F8_E4M3 for 16 numbers, and one in float32 for all. MXFP4: exponents of 2 for 32 numbers.

    Source: "OCP Microscaling Formats (MX) Specification" 1.0, sections 5.2 and 5.3; ModelOpt and compressed-tensors for NVFP4.
    """

    def __init__(
        self, checkpoint: Checkpoint, values: str, scales: str, factor: float | None, tensors: Collection[str]
    ) -> None:
        """values: `[..., columns / 2]`, the first of a pair in the low bits. factor: of all scales; None: these are exponents.
        Raises: ConfigError."""
        *outer, pairs = checkpoint.shape(values)
        super().__init__(checkpoint, (*outer, 2 * pairs), tensors)
        self._values = values
        self._scales = scales
        self._factor = factor
        found = checkpoint.shape(scales)
        size = _EXPONENT_GROUP if factor is None else _SCALE_GROUP
        if found != (*outer, 2 * pairs // size) or 2 * pairs % size:
            raise self.error(scales, f"{[*outer, 2 * pairs // size]}")

    @property
    def group_form(self) -> GroupForm | None:
        if len(self.shape) != 2:
            return None
        return GroupForm(8, self.shape[1] // self.checkpoint.shape(self._scales)[1], has_offsets=False)

    def grouped(self, start: int, stop: int) -> GroupedMatrix:
        # twice a number of E2M1 is an integer
        values, scales = self._stored(start, stop)
        return GroupedMatrix(widened_pairs(values).mul_(2).to(torch.int8), scales / 2, None, 8)

    def rows(self, start: int, stop: int) -> Tensor:
        values, scales = self._stored(start, stop)
        groups = widened_pairs(values).view(*scales.shape, -1)
        return groups.mul_(scales.unsqueeze(-1)).flatten(-2)

    def _stored(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Pairs of numbers, and the scales of groups."""
        part = Part(0, start, stop)
        *outer, columns = self.shape
        values = self.read(self._values, ("U8",), *outer, columns // 2, part=part)
        stored = self.checkpoint.shape(self._scales)
        if self._factor is None:
            exponents = self.read(self._scales, ("U8", "F8_E8M0"), *stored, part=part).view(torch.uint8)
            scales = _powers(exponents)
        else:
            scales = self.read(self._scales, ("F8_E4M3",), *stored, part=part).float() * self._factor
        return values, scales


class StackedFourBitFloats(CheckpointMatrix):
    """Experts of one tensor `[E, in, out]`, stored as blocks `[E, out, in / 32, 16]` and exponents `[E, out, in / 32]`: gpt-oss."""

    def __init__(self, checkpoint: Checkpoint, blocks: str, scales: str, tensors: Collection[str]) -> None:
        """Raises: ConfigError."""
        found = checkpoint.shape(blocks)
        if len(found) != 4 or found[-1] != 16:
            raise ConfigError(f"{checkpoint.where(blocks)} has shape {list(found)}, [E, OUT, GROUPS, 16] is expected")
        experts, rows, groups, _ = found
        super().__init__(checkpoint, (experts, groups * 32, rows), tensors)
        self._blocks, self._scales = blocks, scales

    def rows(self, start: int, stop: int) -> Tensor:
        experts, columns, rows = self.shape
        part = Part(0, start, stop)
        blocks = self.read(self._blocks, ("U8",), experts, rows, columns // 32, 16, part=part)
        exponents = self.read(self._scales, ("U8",), experts, rows, columns // 32, part=part)
        scales = _powers(exponents)
        return widened_pairs(blocks).mul_(scales.unsqueeze(-1)).flatten(-2).transpose(1, 2)


def _powers(exponents: Tensor) -> Tensor:
    """uint8, a power of 2 each -> float32."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - _BIAS)


def widened_pairs(values: Tensor) -> Tensor:
    """uint8 `[..., N]`, two numbers in a byte -> float32 `[..., 2 N]`."""
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    return torch.stack((table[(values & 15).int()], table[(values >> 4).int()]), -1).flatten(-2)
