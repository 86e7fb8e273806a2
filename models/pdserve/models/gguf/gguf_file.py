"""`GgufFile`: metadata and list of tensors of a GGUF file, or of all files of a split one.

Source: the format's specification, "GGUF" in the documentation of ggml; the package `gguf` reads the container.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES, GGUFEndian, GGUFValueType
from numpy.typing import DTypeLike, NDArray

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.common.json_file import refuse_pointer
from pdserve.models.json_object import JsonObject

MAX_FILES = 1000
"""Limit of files of a split model: their names have five digits, and no known model has a hundred."""
_MAX_TENSORS = 1 << 20
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is stored, and how."""

    file: int
    """Number of its file in `GgufFile.paths`."""
    type: str
    """Name of its type of blocks, such as `Q4_K`."""
    shape: tuple[int, ...]
    """As in torch: the dimension whose numbers are next to each other is the last."""
    offset: int
    """Bytes from the beginning of the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, which has the numbers of the last dimension."""
        block, size = BLOCKS[self.type]
        return self.shape[-1] // block * size


BLOCKS: Mapping[str, tuple[int, int]] = {kind.name: sizes for kind, sizes in GGML_QUANT_SIZES.items()}
"""Type -> (numbers of a block, its bytes)."""


class _Reader(GGUFReader):
    """Ends at the file's end: the package takes what lies beyond it as empty, and walks a list of any length that is said there."""

    def _get(self, offset: int, dtype: DTypeLike, count: int = 1, override_order: Any = None) -> NDArray[Any]:
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError(f"it has {len(self.data)} bytes, and more follow")
        return super()._get(offset, dtype, count, override_order)


class GgufFile:
    """Read once, when a model folder is made of the file."""

    def __init__(self, paths: tuple[Path, ...], metadata: JsonObject, tensors: Mapping[str, StoredTensor]) -> None:
        """Use `read`."""
        self.paths = paths
        self.metadata = metadata
        """Key -> value. Numbers of 32 bits have the shortest decimal form that gives them, as configurations are written."""
        self.tensors = tensors

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """path: the file, or the first of a split one. Raises: ConfigError naming a file that is missing, cut off or another;
        UnsupportedModel for one in the byte order of other machines."""
        first = _reader(path)
        metadata = JsonObject(_values(first), str(path))
        paths = _paths(path, metadata)
        tensors: dict[str, StoredTensor] = {}
        for number, part in enumerate(paths):
            reader = first if number == 0 else _reader(part)
            for name, tensor in _tensors(reader, number, part).items():
                if name in tensors:
                    raise ConfigError(f"{part}: tensor {name[:80]} is in {paths[tensors[name].file].name}, too")
                tensors[name] = tensor
        count = metadata.integer("split.tensors.count", len(tensors), minimum=0)
        if count != len(tensors):
            raise ConfigError(f"{path}: its files have {len(tensors)} tensors, split.tensors.count is {count}")
        return cls(paths, metadata, tensors)

    def numbers(self, name: str) -> list[float] | None:
        """The numbers of a small tensor in float32, in the shortest decimal form; None: there is no such tensor."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type != "F32" or len(tensor.shape) != 1:
            raise ConfigError(f"{self.paths[tensor.file]}: {name} has type {tensor.type}, which is not read for it")
        stored = np.fromfile(self.paths[tensor.file], "<f4", tensor.shape[0], offset=tensor.offset)
        return [shortest(number) for number in stored]


def shortest(number: np.float32) -> float:
    """The float32 1e-5 is 9.99999974e-06 in float64, where a configuration has 1e-5."""
    return float(str(number))


def _reader(path: Path) -> GGUFReader:
    try:
        with path.open("rb") as file:
            refuse_pointer(path, file.read(64))
        reader = _Reader(path)
    except (ValueError, KeyError, IndexError, OverflowError, OSError) as error:
        raise ConfigError(f"{path} is truncated or no GGUF file: {' '.join(str(error).split())[:200]}") from error
    if reader.endianess is not GGUFEndian.LITTLE:
        raise UnsupportedModel(f"{path} is in big-endian byte order; little-endian files are read")
    return reader


def _values(reader: GGUFReader) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, field in reader.fields.items():
        value = field.contents()
        if field.types == [GGUFValueType.FLOAT32]:
            value = shortest(np.float32(value))
        values[name] = value
    return values


def _paths(path: Path, metadata: JsonObject) -> tuple[Path, ...]:
    """All files of the model, in order."""
    count = metadata.integer("split.count", 1, minimum=0, maximum=MAX_FILES)
    if count <= 1:
        return (path,)
    found = _SPLIT.fullmatch(path.name)
    if found is None or int(found[3]) != count:
        raise ConfigError(f"{path} is one of {count} files; their names end with -00001-of-{count:05}.gguf and so on")
    if metadata.integer("split.no", 0, minimum=0) != 0:
        raise ConfigError(f"{path} is not the first of {count} files: give {found[1]}-00001-of-{count:05}.gguf")
    paths = tuple(path.with_name(f"{found[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise ConfigError(f"{path} is one of {count} files, of which {', '.join(missing[:4])} are missing")
    return paths


def _tensors(reader: GGUFReader, number: int, path: Path) -> dict[str, StoredTensor]:
    if len(reader.tensors) > _MAX_TENSORS:
        raise ConfigError(f"{path} has {len(reader.tensors)} tensors, at most {_MAX_TENSORS} are read")
    return {
        tensor.name: StoredTensor(
            number,
            tensor.tensor_type.name,
            tuple(int(size) for size in reversed(tensor.shape)),
            int(tensor.data_offset),
        )
        for tensor in reader.tensors
    }
