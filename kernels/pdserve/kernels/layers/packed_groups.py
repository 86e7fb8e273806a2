"""`PackedGroups`: grouped matrices in the order in which a GPU reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.layers.grouped_matrix import GroupedMatrix, float8_inputs

FEWEST_INPUTS, MOST_INPUTS = 16, 64
"""Inputs of a tile: the least that a product in tensor cores takes, and as many as one thread group loads at once."""


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """One weight `[out, in]`, or one for each of E experts.

    The inputs are divided into runs of `width` inputs, or of twice as many with four bits: byte i of a run has input i in its low
    half and input `width + i` in its high half. The bytes of all outputs of a run lie side by side.
    """

    values: Tensor
    """int8 `[(E,) runs, out, width]`, zeros after the last input."""
    scales: Tensor
    """float32 `[(E,) groups, out]`, zeros for groups after the last input."""
    offsets: Tensor | None
    """As the scales; None: 0."""
    num_bits: int
    num_inputs: int
    group_size: int
    """Inputs of a group, a multiple of `width`."""
    is_float: bool
    """The values are the bytes of float8_e4m3fn."""
    rounds_inputs: bool = False
    """See `GroupedMatrix.rounds_inputs`: rows have a scale per `group_size` inputs."""

    @property
    def width(self) -> int:
        return self.values.shape[-1]

    @property
    def num_outputs(self) -> int:
        return self.values.shape[-2]

    @property
    def num_runs(self) -> int:
        return self.values.shape[-3]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values, scales and offsets; without offsets any tensor."""
        return self.values, self.scales, self.scales if self.offsets is None else self.offsets

    @classmethod
    def of(cls, matrix: GroupedMatrix) -> PackedGroups:
        """The matrix must be one that `fits`."""
        num_outputs, num_inputs = matrix.values.shape
        width = tile_width(num_inputs, matrix.group_size)
        run = width * 8 // matrix.num_bits
        padded = F.pad(matrix.values, (0, -num_inputs % run))
        if matrix.num_bits == 4:
            low, high = padded.view(num_outputs, -1, 2, width).unbind(2)
            packed = low.bitwise_and(15).bitwise_or_(high.bitwise_left_shift(4))
        else:
            packed = padded.view(num_outputs, -1, width)
        whole = padded.shape[1]
        group_size = whole if matrix.scales.shape[1] == 1 else matrix.group_size
        num_groups = -(-whole // group_size)

        def by_group(numbers: Tensor) -> Tensor:
            return F.pad(numbers, (0, num_groups - numbers.shape[1])).t().contiguous()

        return cls(
            packed.transpose(0, 1).contiguous(),
            by_group(matrix.scales),
            None if matrix.offsets is None else by_group(matrix.offsets),
            matrix.num_bits,
            num_inputs,
            group_size,
            matrix.is_float,
            matrix.rounds_inputs,
        )

    @classmethod
    def stacked(cls, matrices: Sequence[PackedGroups]) -> PackedGroups:
        """Experts, all in one form. Raises: TypeError."""
        if len({matrix.form for matrix in matrices}) > 1:
            raise TypeError(f"{len(matrices)} experts are quantized in different ways")
        offsets = [matrix.offsets for matrix in matrices if matrix.offsets is not None]
        return replace(
            matrices[0],
            values=torch.stack([matrix.values for matrix in matrices]),
            scales=torch.stack([matrix.scales for matrix in matrices]),
            offsets=torch.stack(offsets) if offsets else None,
        )

    @property
    def form(self) -> tuple[object, ...]:
        """Equal for matrices that can be stacked."""
        shapes = self.values.shape, self.scales.shape, self.offsets is None
        return *shapes, self.num_bits, self.num_inputs, self.group_size, self.is_float, self.rounds_inputs

    def to(self, device: torch.device | str) -> PackedGroups:
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(self, values=self.values.to(device), scales=self.scales.to(device), offsets=offsets)

    def rounded(self, x: Tensor) -> Tensor:
        """Rows `[T, in]` as they are multiplied, in the dtype of x: themselves, or rounded to float8."""
        if not self.rounds_inputs:
            return x
        values, scales = float8_inputs(x, min(self.group_size, self.num_inputs))
        groups = values.float().view(*scales.shape, -1).mul_(scales.unsqueeze(-1))
        return groups.flatten(1).to(x.dtype)

    def widened(self) -> Tensor:
        """float32 `[(E,) out, in]`."""
        values = self.values
        if self.num_bits == 4:
            halves = torch.stack((values << 4 >> 4, values >> 4), -2)
            numbers = halves.movedim(-3, -4).flatten(-3)
        else:
            numbers = (
                (values.view(torch.float8_e4m3fn) if self.is_float else values).float().movedim(-2, -3).flatten(-2)
            )
        numbers = numbers.float()
        groups = -(-numbers.shape[-1] // self.group_size)

        def spread(each: Tensor) -> Tensor:
            return (
                each[..., :groups, :].transpose(-1, -2).repeat_interleave(self.group_size, -1)[..., : numbers.shape[-1]]
            )

        numbers *= spread(self.scales)
        if self.offsets is not None:
            numbers += spread(self.offsets)
        return numbers[..., : self.num_inputs].contiguous()


def tile_width(num_inputs: int, group_size: int) -> int:
    """Inputs of a tile, which lie in one group: a power of two, at most `MOST_INPUTS`. Below `FEWEST_INPUTS` none is."""
    return MOST_INPUTS if group_size == num_inputs else min(MOST_INPUTS, group_size & -group_size)


def fits(num_inputs: int, group_size: int) -> bool:
    """True if a matrix can be packed."""
    return tile_width(num_inputs, group_size) >= FEWEST_INPUTS
