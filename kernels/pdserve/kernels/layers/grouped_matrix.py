"""`GroupedMatrix`: a weight as numbers of 4 or 8 bits in groups.

w = value * scale + offset    scale and offset of the group: some inputs of one output channel
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_LARGEST_FLOAT8 = 448.0
_SMALLEST_RANGE = 1e-30
"""A group of zeros has this range, so that nothing is divided by 0."""


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """A weight `[out, in]`."""

    values: Tensor
    """int8 `[out, in]`, of `num_bits` bits, or the bytes of float8_e4m3fn."""
    scales: Tensor
    """float32 `[out, groups]`"""
    offsets: Tensor | None
    """float32 `[out, groups]`; None: 0."""
    num_bits: int
    """4 or 8."""
    is_float: bool = False
    """The values are the bytes of float8_e4m3fn."""
    rounds_inputs: bool = False
    """Of values in float8: inputs are rounded to float8, too. See `float8_inputs`."""

    @property
    def nbytes(self) -> int:
        """Of the packed weight."""
        numbers = self.scales.nbytes * (1 if self.offsets is None else 2)
        return self.values.numel() * self.num_bits // 8 + numbers

    @property
    def group_size(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]

    @classmethod
    def quantized(cls, weight: Tensor, num_bits: int, group_size: int) -> GroupedMatrix:
        """Round a weight `[out, in]` to the nearest multiples of each group's `max |w| / largest`. in: a multiple of the group."""
        largest = (1 << (num_bits - 1)) - 1
        groups = weight.float().view(len(weight), -1, group_size)
        scales = groups.abs().amax(-1).clamp_min_(_SMALLEST_RANGE).div_(largest)
        values = (groups / scales.unsqueeze(-1)).round_().to(torch.int8)
        return cls(values.flatten(1), scales, None, num_bits)

    @classmethod
    def in_float8(cls, weight: Tensor, group_size: int) -> GroupedMatrix:
        """Round a weight `[out, in]` to float8 with each group's `max |w| / 448` as its scale. Inputs are rounded, too."""
        values, scales = float8_inputs(weight, group_size)
        return cls(values.view(torch.int8), scales, None, 8, is_float=True, rounds_inputs=True)

    def widened(self) -> Tensor:
        """float32 `[out, in]`."""
        values = self.values.view(torch.float8_e4m3fn) if self.is_float else self.values
        groups = values.float().view(len(self.values), self.scales.shape[1], -1).mul_(self.scales.unsqueeze(-1))
        if self.offsets is not None:
            groups += self.offsets.unsqueeze(-1)
        return groups.flatten(1)

    @staticmethod
    def can_stack(matrices: Sequence[GroupedMatrix]) -> bool:
        """True if all values are integers or none are, and the groups of each are divided by the smallest ones."""
        num_groups = max(matrix.scales.shape[1] for matrix in matrices)
        is_divided = all(num_groups % matrix.scales.shape[1] == 0 for matrix in matrices)
        return is_divided and len({matrix.is_float for matrix in matrices}) == 1

    @classmethod
    def stacked(cls, matrices: Sequence[GroupedMatrix]) -> GroupedMatrix:
        """With the most bits of any, and the most groups. Raises: TypeError where not `can_stack`."""
        if not cls.can_stack(matrices):
            raise TypeError(f"{len(matrices)} matrices with one input are quantized in different ways")
        num_groups = max(matrix.scales.shape[1] for matrix in matrices)

        def spread(matrix: GroupedMatrix, numbers: Tensor | None) -> Tensor:
            found = torch.zeros_like(matrix.scales) if numbers is None else numbers
            return found.repeat_interleave(num_groups // found.shape[1], 1)

        has_offsets = any(matrix.offsets is not None for matrix in matrices)
        return cls(
            torch.cat([matrix.values for matrix in matrices]),
            torch.cat([spread(matrix, matrix.scales) for matrix in matrices]),
            torch.cat([spread(matrix, matrix.offsets) for matrix in matrices]) if has_offsets else None,
            max(matrix.num_bits for matrix in matrices),
            matrices[0].is_float,
            matrices[0].rounds_inputs,
        )

    def columns(self, inputs: slice, groups: slice) -> GroupedMatrix:
        """The weight of these inputs, which are those of whole groups, or of the one group that there is."""
        offsets = None if self.offsets is None else self.offsets[:, groups].contiguous()
        values, scales = self.values[:, inputs].contiguous(), self.scales[:, groups].contiguous()
        return replace(self, values=values, scales=scales, offsets=offsets)

    def with_rows(self, arranged: Callable[[Tensor], Tensor]) -> GroupedMatrix:
        """See `matrices.with_rows`."""
        offsets = None if self.offsets is None else arranged(self.offsets)
        return replace(self, values=arranged(self.values), scales=arranged(self.scales), offsets=offsets)

    def to(self, device: torch.device | str) -> GroupedMatrix:
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(self, values=self.values.to(device), scales=self.scales.to(device), offsets=offsets)


def float8_inputs(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Rows `[T, in]` as float8_e4m3fn, and their float32 scales `[T, groups]`: `max |x| / 448` of each group of inputs."""
    groups = x.float().view(len(x), -1, group_size)
    scales = groups.abs().amax(-1).clamp_min_(_SMALLEST_RANGE).div_(_LARGEST_FLOAT8)
    return (groups / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(1), scales


def can_group(num_inputs: int, group_size: int, num_bits: int) -> bool:
    """True if words of integers do not cross groups."""
    return num_inputs % group_size == 0 and group_size % (32 // num_bits) == 0
