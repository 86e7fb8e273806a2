"""The weight files of a model folder: one `model.safetensors`, or shards that an index lists.

Each header is checked before the library maps the file: its length, before memory of that size is allocated, and that no name
occurs twice. The library checks offsets, sizes and types.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.common.json_file import MAX_INDEX_BYTES, parse_json_object, refuse_pointer
from pdserve.models.json_object import JsonObject
from pdserve.models.other_formats import other_weights
from pdserve.models.weights.mapped_pages import drop_mapped_pages
from pdserve.models.weights.rank_shard import Part
from pdserve.models.weights.weight_source import FLOATS, WeightSource

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 << 20
"""Limit of one file's header: about 100 bytes per tensor, and no model has 100,000 tensors in a file."""
MAX_FILES = 4096
_MAX_NAME_BYTES = 255
_NUM_NAMED = 4


class Checkpoint(WeightSource):
    """Open weight files; tensors are read through a memory map, one at a time."""

    def __init__(self, folder: Path, files: Mapping[str, Any]) -> None:
        """files: name -> opened file. Raises: ConfigError for a tensor that two files have."""
        self.folder = folder
        self._files = files
        self._file_of: dict[str, str] = {}
        for file, handle in files.items():
            for name in handle.keys():  # noqa: SIM118
                if name in self._file_of:
                    raise ConfigError(f"{folder}: {name[:80]} is in {self._file_of[name]} and in {file}")
                self._file_of[name] = file

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """By its name in the file's header. Raises: ConfigError for a name that is missing."""
        return str(self._handle(name).get_slice(name).get_dtype())

    def where(self, name: str) -> str:
        """File and name, for messages."""
        return f"{self.folder / self._file_of[name]}: {name}"

    def number(self, name: str) -> float:
        """The one number of a tensor, positive and finite. Raises: ConfigError."""
        tensor = self.read(name, self.shape(name))
        if tensor.numel() != 1 or not 0 < float(tensor) < math.inf:
            raise ConfigError(f"{self.where(name)} is not one positive number")
        return float(tensor)

    def pieces(
        self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS, part: Part | None = None
    ) -> Iterator[Tensor]:
        """One view of the file, or of a copy; the caller copies the values that it keeps, because the file may change."""
        found = self.shape(name)
        if found != shape:
            raise ConfigError(f"{self.where(name)} has shape {list(found)}, config.json says {list(shape)}")
        dtype = self.dtype(name)
        if dtype not in dtypes:
            # eight bits need scales
            raise ConfigError(f"{self.where(name)} has dtype {dtype}; read are {', '.join(dtypes)}")
        handle = self._handle(name)
        tensor: Tensor = handle.get_tensor(name) if part is None else handle.get_slice(name)[part.slices(len(shape))]
        yield tensor

    def release(self, tensor: Tensor) -> None:
        """The file stays mapped while it is open, and its pages would count as memory of this process."""
        drop_mapped_pages(tensor)

    def _handle(self, name: str) -> Any:
        file = self._file_of.get(name)
        if file is None:
            raise ConfigError(f"{self.folder}: weight {name} is in none of {_few(self._files)}; {self._seen(name)}")
        return self._files[file]

    def _seen(self, name: str) -> str:
        """Names in the checkpoint that differ only by a prefix, as those of a wrapped model or of a body without a head do."""
        names = sorted(self._file_of)
        if not names:
            return "there are no weights in them"
        alike = [found for found in names if found.endswith(f".{name}") or name.endswith(f".{found}")]
        if alike:
            return f"there is {alike[0][:80]}, whose prefix is another"
        return f"there are {_few(names)}"


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Open all safetensors files, checking that each is whole. Raises: ConfigError naming the file."""
    with ExitStack() as stack:
        files = {}
        for file in _weight_files(folder):
            path = folder / file
            if not path.is_file():
                raise ConfigError(f"{path} does not exist or is no regular file; {_INDEX} names it")
            try:
                _check_header(path)
                files[file] = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} is truncated or no safetensors file: {error!s:.300}") from error
        yield Checkpoint(folder, files)


def _check_header(path: Path) -> None:
    """Raises: ConfigError for a header that is too long, names a tensor twice or is not a JSON object; OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        beginning = file.read(64)
        refuse_pointer(path, beginning)
        length = int.from_bytes(beginning[:_LENGTH_BYTES], "little")
        if len(beginning) < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise ConfigError(
                f"{path} is truncated or no safetensors file: it has {size} bytes, its header alone would have {length}"
            )
        if length > MAX_HEADER_BYTES:
            raise ConfigError(f"{path} has a header of {length} bytes, at most {MAX_HEADER_BYTES} are read")
        file.seek(_LENGTH_BYTES)
        header = file.read(length)
    parse_json_object(header, f"{path}: the header")


def _weight_files(folder: Path) -> list[str]:
    """File names inside the folder, chosen as in transformers. Raises: ConfigError for an index that names a path elsewhere."""
    if (folder / _SINGLE).exists():
        return [_SINGLE]
    if not (folder / _INDEX).exists():
        raise ConfigError(f"{folder} has neither {_SINGLE} nor {_INDEX}{other_weights(folder)}")
    index = JsonObject.read(folder / _INDEX, MAX_INDEX_BYTES)
    weight_map = index.child("weight_map")
    if weight_map is None:
        raise ConfigError(f"{folder / _INDEX}: weight_map is missing")
    files = sorted({weight_map.text(name) for name in weight_map.names})
    if len(files) > MAX_FILES:
        raise ConfigError(f"{folder / _INDEX}: weight_map names {len(files)} files, at most {MAX_FILES} are read")
    for file in files:
        if not _is_file_name(file):
            raise ConfigError(f"{folder / _INDEX}: weight_map names {file[:80]!r}, which is not a file of this folder")
    return files


def _is_file_name(name: str) -> bool:
    """False for a path, and for an invalid file name."""
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return 0 < len(encoded) <= _MAX_NAME_BYTES and name not in (".", "..") and "\0" not in name and "/" not in name


def _few(names: Mapping[str, Any] | list[str]) -> str:
    """The first names of a list, for a message."""
    shown = [name[:80] for name in list(names)[:_NUM_NAMED]]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
