"""`StoredMatrix`: a weight in few bits; `CheckpointMatrix`: one that a checkpoint stores in several tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.kernels.layers.grouped_matrix import GroupedMatrix, can_group
from pdserve.models.weights.checkpoint import Checkpoint
from pdserve.models.weights.rank_shard import Part
from pdserve.models.weights.weight_source import FLOATS


class GroupCut(NamedTuple):
    """A part of a matrix in groups."""

    rows: slice
    columns: slice
    groups: slice


class GroupForm(NamedTuple):
    """Sizes of a `GroupedMatrix`."""

    num_bits: int
    group_size: int
    """Inputs of a group."""
    has_offsets: bool
    is_float: bool = False

    def cut(self, shape: tuple[int, ...], part: Part | None) -> GroupCut | None:
        """A rank's part of a matrix of this shape; None: it does not end where groups and words of integers do."""
        rows, columns = slice(0, shape[0]), slice(0, shape[1])
        if part is not None and part.dim == 0:
            rows = slice(part.start, part.stop)
        elif part is not None:
            columns = slice(part.start, part.stop)
        length = columns.stop - columns.start
        if self.group_size == shape[1]:
            # one group of a whole row may be cut anywhere
            return GroupCut(rows, columns, slice(0, 1)) if can_group(length, length, self.num_bits) else None
        if columns.start % self.group_size or not can_group(length, self.group_size, self.num_bits):
            return None
        return GroupCut(rows, columns, slice(columns.start // self.group_size, columns.stop // self.group_size))

    def on_meta(self, rows: int, columns: int) -> GroupedMatrix:
        """A matrix without numbers."""
        values = torch.empty(rows, columns, dtype=torch.int8, device="meta")
        scales = torch.empty(rows, columns // self.group_size, device="meta")
        return GroupedMatrix(values, scales, scales if self.has_offsets else None, self.num_bits, self.is_float)


class StoredMatrix(ABC):
    """A weight that is not stored as numbers of one dtype."""

    shape: tuple[int, ...]
    """Of the widened weight."""
    is_plain = False
    """True: its numbers are floats, each by itself."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Tensor:
        """float32 `[stop - start, ...]`. Raises: ConfigError for a tensor of another shape or type."""

    @property
    def group_form(self) -> GroupForm | None:
        """How `grouped` has it; None: this form has no numbers in groups."""
        return None

    def grouped(self, start: int, stop: int) -> GroupedMatrix:
        """Rows in the form in which they can be multiplied, where `group_form` is not None. Raises: ConfigError."""
        raise NotImplementedError


class CheckpointMatrix(StoredMatrix):
    """Numbers, their scales and what else belongs to them, by the names in a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, shape: tuple[int, ...], tensors: Collection[str]) -> None:
        """shape: of the widened weight. tensors: names that count as read with it."""
        self.checkpoint = checkpoint
        self.shape = shape
        self.tensors = tensors

    def read(self, name: str, dtypes: Collection[str], *shape: int, part: Part | None = None) -> Tensor:
        """A copy of a tensor of this shape and one of these dtypes. part: of it only."""
        source = self.checkpoint.read(name, shape, dtypes, part)
        tensor = source.clone()
        self.checkpoint.release(source)
        return tensor

    def scales(self, name: str, dtypes: Collection[str] = FLOATS) -> Tensor:
        """float32, in the shape in which they are stored; each finite and above 0. Raises: ConfigError."""
        found = self.read(name, dtypes, *self.checkpoint.shape(name)).float()
        if not bool(((found > 0) & found.isfinite()).all()):
            raise ConfigError(f"{self.checkpoint.where(name)} has a scale that is not a positive number")
        return found

    def error(self, name: str, expected: str) -> ConfigError:
        """For a tensor of another shape than it may have."""
        return ConfigError(
            f"{self.checkpoint.where(name)} has shape {list(self.checkpoint.shape(name))}, {expected} is expected"
        )


def unpacked(packed: Tensor, num_bits: int, dim: int) -> Tensor:
    """Numbers of `num_bits` bits in int32, the first in the lowest bits, along a dimension -> int32 from 0 on."""
    count = 32 // num_bits
    shifts = torch.arange(0, count * num_bits, num_bits, dtype=torch.int32)
    moved = packed.movedim(dim, -1)
    numbers = (moved.unsqueeze(-1) >> shifts) & ((1 << num_bits) - 1)
    return numbers.flatten(-2).movedim(-1, dim)


def packed_length(length: int, num_bits: int) -> int:
    """Number of int32 that hold `length` numbers."""
    return -(-length // (32 // num_bits))
