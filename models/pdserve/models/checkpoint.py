"""The weight files of a model folder: one `model.safetensors`, or shards that an index lists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.json_object import JsonObject

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class Checkpoint:
    """Open weight files; tensors are read through a memory map, one at a time."""

    def __init__(self, folder: Path, files: dict[str, Any]) -> None:
        self.folder = folder
        self._files = files
        self._file_of = {name: file for file, handle in files.items() for name in handle.keys()}  # noqa: SIM118

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(name).get_slice(name).get_shape())

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A view of the file, or of a copy; the caller copies what it keeps, for a file may change."""
        found = self.shape(name)
        if found != shape:
            raise ConfigError(
                f"{self.folder / self._file_of[name]}: {name} has shape {list(found)}, config.json says {list(shape)}"
            )
        tensor: Tensor = self._handle(name).get_tensor(name)
        if tensor.dtype not in TORCH_DTYPES.values():
            # Eight-bit floats too: they mean nothing without scales that only their own loader knows.
            raise ConfigError(f"{self.folder / self._file_of[name]}: {name} has dtype {tensor.dtype}")
        return tensor

    def _handle(self, name: str) -> Any:
        file = self._file_of.get(name)
        if file is None:
            raise ConfigError(f"{self.folder}: weight {name} is in none of {', '.join(self._files)}")
        return self._files[file]


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Open all weight files, checking that each is whole."""
    with ExitStack() as stack:
        files = {}
        for file in _weight_files(folder):
            path = folder / file
            if not path.is_file():
                raise ConfigError(f"{path} does not exist; {_INDEX} names it")
            try:
                files[file] = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} is truncated or no safetensors file: {error}") from error
        yield Checkpoint(folder, files)


def _weight_files(folder: Path) -> list[str]:
    """File names inside the folder; an index that names a path elsewhere is refused."""
    if not (folder / _INDEX).exists():
        if (folder / _SINGLE).exists():
            return [_SINGLE]
        raise ConfigError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
    index = JsonObject.read(folder / _INDEX)
    weight_map = index.child("weight_map")
    if weight_map is None:
        raise ConfigError(f"{folder / _INDEX}: weight_map is missing")
    files = sorted({weight_map.text(name) for name in weight_map.names})
    for file in files:
        if Path(file).name != file:
            raise ConfigError(f"{folder / _INDEX}: weight_map names {file!r}, which is not a file of this folder")
    return files
