"""Integers of a few bits in int32, with a scale per group: compressed-tensors, GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.kernels.layers.grouped_matrix import GroupedMatrix
from pdserve.models.weights.checkpoint import Checkpoint
from pdserve.models.weights.quantized.stored_matrix import CheckpointMatrix, GroupForm, packed_length, unpacked
from pdserve.models.weights.rank_shard import Part

_INTEGERS = ("I32", "I64")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in an int32 of the numbers 0, 1, 2, ... of eight."""


class PackedRows(CheckpointMatrix):
    """`weight_packed` of compressed-tensors: a row's numbers side by side; `(values - zeros) * scales`."""

    def __init__(
        self, checkpoint: Checkpoint, name: str, num_bits: int, group_size: int, tensors: Collection[str]
    ) -> None:
        """name: without `.weight_packed`. group_size: 0: a whole row. Raises: ConfigError."""
        shape = checkpoint.read(f"{name}.weight_shape", (2,), _INTEGERS).tolist()
        super().__init__(checkpoint, (int(shape[0]), int(shape[1])), tensors)
        self._name = name
        self._num_bits = num_bits
        rows = self.shape[0]
        self._scales = self.scales(f"{name}.weight_scale")
        if self._scales.dim() != 2 or self._scales.shape[0] not in (1, rows):
            raise self.error(f"{name}.weight_scale", f"[{rows}, GROUPS]")
        groups = self._scales.shape[1]
        indexes = f"{name}.weight_g_idx"
        self._group_of = _group_indexes(
            self, indexes if indexes in tensors else None, f"{name}.weight_scale", groups, group_size
        )
        zeros = f"{name}.weight_zero_point"
        self._zeros: Tensor | None = None
        if zeros in tensors:
            packed = self.read(zeros, ("I32",), packed_length(rows, num_bits), groups)
            self._zeros = unpacked(packed, num_bits, 0)[:rows]

    @property
    def group_form(self) -> GroupForm | None:
        return _group_form(self._num_bits, self._group_of, has_offsets=self._zeros is not None)

    def grouped(self, start: int, stop: int) -> GroupedMatrix:
        zeros = None if self._zeros is None else self._zeros[start:stop]
        return _grouped(
            self._values(start, stop), zeros, self._scales.expand(self.shape[0], -1)[start:stop], self._num_bits
        )

    def rows(self, start: int, stop: int) -> Tensor:
        scales = self._scales.expand(self.shape[0], -1)[start:stop]
        half = 1 << (self._num_bits - 1)
        zeros = half if self._zeros is None else self._zeros[start:stop][:, self._group_of]
        return (self._values(start, stop) - zeros).float().mul_(scales[:, self._group_of])

    def _values(self, start: int, stop: int) -> Tensor:
        """int32 from 0 on."""
        rows, columns = self.shape
        length = packed_length(columns, self._num_bits)
        packed = self.read(f"{self._name}.weight_packed", ("I32",), rows, length, part=Part(0, start, stop))
        return unpacked(packed, self._num_bits, 1)[:, :columns]


class GptqMatrix(CheckpointMatrix):
    """`qweight` `[in / n, out]`, `qzeros` `[groups, out / n]`, `scales` `[groups, out]`; n numbers in an int32.

    Source: AutoGPTQ and GPTQModel. The first form stores zeros reduced by one, the second (`gptq_v2`) as they are.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        num_bits: int,
        group_size: int,
        zero_offset: int,
        tensors: Collection[str],
    ) -> None:
        """name: without `.qweight`. group_size: 0: all inputs. zero_offset: added to stored zeros. Raises: ConfigError."""
        length, columns = checkpoint.shape(f"{name}.qweight")
        super().__init__(checkpoint, (columns, length * (32 // num_bits)), tensors)
        self._name = name
        self._num_bits = num_bits
        groups = checkpoint.shape(f"{name}.scales")[0]
        scales = self.scales(f"{name}.scales")
        if tuple(scales.shape) != (groups, columns):
            raise self.error(f"{name}.scales", f"[GROUPS, {columns}]")
        self._scales = scales
        packed = self.read(f"{name}.qzeros", ("I32",), groups, packed_length(columns, num_bits))
        mask = (1 << num_bits) - 1
        self._zeros = (unpacked(packed, num_bits, 1)[:, :columns] + zero_offset) & (mask if zero_offset else -1)
        indexes = f"{name}.g_idx"
        self._group_of = _group_indexes(
            self, indexes if indexes in tensors else None, f"{name}.scales", groups, group_size
        )

    @property
    def group_form(self) -> GroupForm | None:
        return _group_form(self._num_bits, self._group_of, has_offsets=True)

    def grouped(self, start: int, stop: int) -> GroupedMatrix:
        zeros, scales = self._zeros[:, start:stop], self._scales[:, start:stop]
        return _grouped(self._values(start, stop).t(), zeros.t(), scales.t(), self._num_bits)

    def rows(self, start: int, stop: int) -> Tensor:
        zeros, scales = self._zeros[:, start:stop], self._scales[:, start:stop]
        return (self._values(start, stop) - zeros[self._group_of]).float().mul_(scales[self._group_of]).t()

    def _values(self, start: int, stop: int) -> Tensor:
        """int32 `[in, stop - start]` from 0 on."""
        columns, inputs = self.shape
        packed = self.read(
            f"{self._name}.qweight", ("I32",), inputs * self._num_bits // 32, columns, part=Part(1, start, stop)
        )
        return unpacked(packed, self._num_bits, 0)


class AwqMatrix(CheckpointMatrix):
    """`qweight` `[in, out / 8]`, `qzeros` `[groups, out / 8]`, `scales` `[groups, out]`, in four bits.

    Source: AutoAWQ, whose GEMM kernel orders the eight numbers of an int32 in its own way.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, group_size: int, tensors: Collection[str]) -> None:
        """name: without `.qweight`. group_size: 0: all inputs. Raises: ConfigError."""
        inputs, length = checkpoint.shape(f"{name}.qweight")
        super().__init__(checkpoint, (8 * length, inputs), tensors)
        self._name = name
        self._scales = self.scales(f"{name}.scales")
        groups = len(self._scales)
        if tuple(self._scales.shape) != (groups, 8 * length):
            raise self.error(f"{name}.scales", f"[GROUPS, {8 * length}]")
        self._zeros = _in_order(self.read(f"{name}.qzeros", ("I32",), groups, length))
        self._group_of = _group_indexes(self, None, f"{name}.scales", groups, group_size)

    @property
    def group_form(self) -> GroupForm | None:
        return _group_form(4, self._group_of, has_offsets=True)

    def grouped(self, start: int, stop: int) -> GroupedMatrix:
        zeros, scales = self._zeros[:, start:stop], self._scales[:, start:stop]
        return _grouped(self._values(start, stop).t(), zeros.t(), scales.t(), 4)

    def rows(self, start: int, stop: int) -> Tensor:
        zeros, scales = self._zeros[:, start:stop], self._scales[:, start:stop]
        return (self._values(start, stop) - zeros[self._group_of]).float().mul_(scales[self._group_of]).t()

    def _values(self, start: int, stop: int) -> Tensor:
        """int32 `[in, stop - start]` from 0 on."""
        columns, inputs = self.shape
        first = start // 8
        part = Part(1, first, -(-stop // 8))
        values = _in_order(self.read(f"{self._name}.qweight", ("I32",), inputs, columns // 8, part=part))
        return values[:, start - 8 * first : stop - 8 * first]


def _group_form(num_bits: int, group_of: Tensor, *, has_offsets: bool) -> GroupForm | None:
    """None: groups whose inputs are not next to each other, or numbers of other bits."""
    groups = int(group_of.max()) + 1
    size, rest = divmod(len(group_of), groups)
    if rest or num_bits not in (4, 8) or not torch.equal(group_of, torch.arange(len(group_of)) // size):
        return None
    return GroupForm(num_bits, size, has_offsets)


def _grouped(values: Tensor, zeros: Tensor | None, scales: Tensor, num_bits: int) -> GroupedMatrix:
    """values: from 0 on; zeros, scales: `[out, groups]`; None: the middle."""
    half = 1 << (num_bits - 1)
    offsets = None if zeros is None else (half - zeros).float().mul_(scales).contiguous()
    return GroupedMatrix((values - half).to(torch.int8).contiguous(), scales.contiguous(), offsets, num_bits)


def _in_order(packed: Tensor) -> Tensor:
    """int32 `[*, N]` -> int32 `[*, 8 N]`."""
    numbers = unpacked(packed, 4, -1)
    return numbers.view(len(packed), -1, 8)[..., _AWQ_ORDER].flatten(-2)


def _group_indexes(matrix: CheckpointMatrix, name: str | None, scales: str, groups: int, group_size: int) -> Tensor:
    """int64 `[columns]`: group of each input. name: of a tensor that says so; None: groups follow one another. scales: name of the
    scales, for messages. group_size: inputs of a group, of which the last may have fewer; 0: all."""
    columns = matrix.shape[1]
    size = group_size or columns
    if -(-columns // size) != groups:
        raise matrix.error(scales, f"{-(-columns // size)} groups of {size} for {columns} inputs")
    if name is None:
        return torch.arange(columns) // size
    found = matrix.read(name, _INTEGERS, columns).long()
    if not bool(((found >= 0) & (found < groups)).all()):
        raise ConfigError(f"{matrix.checkpoint.where(name)} has a group that is not one of {groups}")
    return found
