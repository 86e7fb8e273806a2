"""`GgufWeights`: the weights of a model folder that was made of a GGUF file, widened as they are read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.common.json_file import MAX_INDEX_BYTES, read_regular_file
from pdserve.kernels.layers.grouped_matrix import GroupedMatrix
from pdserve.models.gguf.gguf_file import BLOCKS
from pdserve.models.gguf.gguf_groups import GROUPED_TYPES, Groups
from pdserve.models.gguf.gguf_tensors import INDEX_FILE, GgufIndex, GgufWeight
from pdserve.models.weights.quantized.stored_matrix import GroupForm, StoredMatrix
from pdserve.models.weights.rank_shard import Part
from pdserve.models.weights.weight_source import FLOATS, WeightSource

_PIECE_NUMBERS = 4 << 20
"""Numbers that are widened at a time: 16 MiB in float32."""


class GgufWeights(WeightSource):
    """A `WeightSource`. Numbers are widened to float32 by the package `gguf`, some rows at a time."""

    def __init__(self, folder: Path, files: Mapping[str, NDArray[np.uint8]], index: GgufIndex) -> None:
        """files: name -> its bytes. Use `open`."""
        self.folder = folder
        self._files = files
        self._weights = index.weights

    @classmethod
    def open(cls, folder: Path) -> GgufWeights:
        """Raises: ConfigError for a file that is gone or shorter than its index says."""
        path = folder / INDEX_FILE
        try:
            index = msgspec.json.decode(read_regular_file(path, MAX_INDEX_BYTES), type=GgufIndex)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} is no index of weights: {error!s:.200}; delete its folder") from error
        files = {}
        for name in sorted({weight.file for weight in index.weights.values()}):
            try:
                files[name] = np.memmap(folder / name, mode="r")
            except (OSError, ValueError) as error:
                raise ConfigError(f"{(folder / name).resolve()} cannot be read: {error!s:.200}") from error
        for name, weight in index.weights.items():
            end = weight.offset + weight.num_rows * weight.row_bytes
            if end > len(files[weight.file]):
                raise ConfigError(
                    f"{(folder / weight.file).resolve()} is truncated: {name[:80]} ends at byte {end} of {len(files[weight.file])}"
                )
        return cls(folder, files, index)

    @property
    def names(self) -> list[str]:
        return list(self._weights)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weight(name).shape

    def where(self, name: str) -> str:
        """File and name, for messages."""
        return f"{(self.folder / self._weight(name).file).resolve()}: {name}"

    def pieces(
        self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS, part: Part | None = None
    ) -> Iterator[Tensor]:
        """float32; `dtypes` are those of safetensors."""
        weight = self._weight(name)
        if weight.shape != shape:
            raise ConfigError(f"{self.where(name)} has shape {list(weight.shape)}, config.json says {list(shape)}")
        if len(shape) == 1:
            numbers = self._widened(self.blocks(weight, np.arange(1)), weight)[0]
            if (order := _row_order(weight)) is not None:
                numbers = numbers[order]
            yield numbers if part is None else numbers[part.slices(1)]
            return
        is_of_rows = part is not None and part.dim == 0
        first, last = (part.start, part.stop) if part is not None and is_of_rows else (0, weight.num_rows)
        step = max(1, _PIECE_NUMBERS // shape[-1])
        for start in range(first, last, step):
            piece = self.rows(weight, start, min(start + step, last))
            yield piece if part is None or is_of_rows else piece[part.slices(2)]

    def stored(self, name: str) -> StoredMatrix | None:
        weight = self._weight(name)
        return GgufMatrix(self, weight) if len(weight.shape) == 2 else None

    def release(self, tensor: Tensor) -> None:
        """Nothing: what was read is a copy, and the kernel takes back pages of the file when it needs them."""

    def _weight(self, name: str) -> GgufWeight:
        found = self._weights.get(name)
        if found is None:
            raise ConfigError(f"{self.folder}: weight {name} is in none of {', '.join(self._files)}")
        return found

    def rows(self, weight: GgufWeight, start: int, stop: int) -> Tensor:
        """float32 `[stop - start, columns]`."""
        return self._widened(self.blocks(weight, self._places(weight, start, stop)), weight)

    def groups(self, weight: GgufWeight, start: int, stop: int) -> Groups:
        """Rows of a type of `GROUPED_TYPES`."""
        blocks = self.blocks(weight, self._places(weight, start, stop))
        return GROUPED_TYPES[weight.type].groups(blocks.reshape(len(blocks), -1, BLOCKS[weight.type][1]))

    def blocks(self, weight: GgufWeight, places: NDArray[Any]) -> NDArray[np.uint8]:
        """Bytes of stored rows `[rows, bytes]`."""
        size = weight.row_bytes
        stored = self._files[weight.file][weight.offset : weight.offset + weight.num_rows * size].reshape(-1, size)
        return np.asarray(stored[places])

    def _places(self, weight: GgufWeight, start: int, stop: int) -> NDArray[Any]:
        """Stored rows of the folder's."""
        order = _row_order(weight)
        return np.arange(start, stop) if order is None else order[start:stop]

    def _widened(self, blocks: NDArray[np.uint8], weight: GgufWeight) -> Tensor:
        # numbers that are not finite are reported by who reads them
        with np.errstate(invalid="ignore", over="ignore"):
            numbers = dequantize(blocks, GGMLQuantizationType[weight.type])
        tensor = torch.from_numpy(np.array(numbers, dtype=np.float32))
        return tensor.sub_(weight.added) if weight.added else tensor


class GgufMatrix(StoredMatrix):
    """A matrix of a GGUF file."""

    def __init__(self, weights: GgufWeights, weight: GgufWeight) -> None:
        self.shape = weight.shape
        self.is_plain = BLOCKS[weight.type][0] == 1
        self._weights = weights
        self._weight = weight

    def rows(self, start: int, stop: int) -> Tensor:
        return self._weights.rows(self._weight, start, stop)

    @property
    def group_form(self) -> GroupForm | None:
        found = GROUPED_TYPES.get(self._weight.type)
        if found is None or self._weight.added:
            return None
        return GroupForm(found.num_bits, found.group_size, found.has_offsets)

    def grouped(self, start: int, stop: int) -> GroupedMatrix:
        found = self._weights.groups(self._weight, start, stop)
        offsets = None if found.offsets is None else torch.from_numpy(found.offsets)
        bits = GROUPED_TYPES[self._weight.type].num_bits
        return GroupedMatrix(torch.from_numpy(found.values), torch.from_numpy(found.scales), offsets, bits)


def _row_order(weight: GgufWeight) -> NDArray[Any] | None:
    """Row of the folder -> stored row, where heads are stored in another order; None: the same.

    A stored head has the rows 0, h, 1, h + 1, ..., of which 2j and 2j + 1 are rotated together; h is half of its size.
    """
    if not weight.permuted_heads:
        return None
    rows = np.arange(weight.shape[0]).reshape(weight.permuted_heads, -1, 2)
    return rows.swapaxes(1, 2).reshape(-1)
