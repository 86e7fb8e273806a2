"""`read_json_object`: an object from a JSON file of a model folder, within bounded time and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdserve.common.errors import ConfigError

MAX_JSON_BYTES = 1 << 20
"""generation_config.json and its like have some kilobytes."""
MAX_CONFIG_BYTES = 16 << 20
"""config.json of a quantized mixture of experts may name every matrix that is left as it is: 3 MB are known."""
MAX_TOKENIZER_CONFIG_BYTES = 16 << 20
"""tokenizer_config.json repeats every added token."""
MAX_TOKENIZER_BYTES = 512 << 20
"""Limit of tokenizer.json; the largest vocabularies have about 40 MB."""
MAX_INDEX_BYTES = 32 << 20
"""An index has about 100 bytes per weight."""


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """The bytes of a file.

    Raises: ConfigError for a path that is not there, no regular file (a pipe would block, a device never end), longer
    than `max_bytes`, or not readable.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist")
    if not path.is_file():
        raise ConfigError(f"{path} is not a regular file")
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise ConfigError(f"{path} has more than {max_bytes} bytes, which is the limit")
    refuse_pointer(path, data)
    return data


def refuse_pointer(path: Path, beginning: bytes) -> None:
    """Raises: ConfigError where a file begins as the pointer that git-lfs leaves in a clone without the file itself."""
    if beginning.startswith(b"version https://git-lfs"):
        raise ConfigError(f"{path} is a git-lfs pointer, not the file itself: run git lfs pull in its folder")


def read_text_file(path: Path, max_bytes: int) -> str:
    """The text of a UTF-8 file. Raises: ConfigError, also as `read_regular_file`."""
    try:
        return read_regular_file(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: byte {error.start} is not UTF-8") from error


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises: ConfigError for a file that is no JSON object, names a field twice or nests too deeply; as `read_text_file`.
    """
    return parse_json_object(read_text_file(path, max_bytes), str(path))


def parse_json_object(text: str | bytes, where: str) -> dict[str, Any]:
    """The object that a text holds. where: its file, for messages. Raises: ConfigError, as `read_json_object`."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ConfigError(f"{where} is not valid JSON: objects and lists are nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must hold a JSON object, not {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises: ValueError for a duplicate name: parsers differ in which value they take."""
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the field {name[:80]!r} is there twice")
            seen.add(name)
    return values


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises: as `read_json_object`."""
    return read_json_object(folder / "config.json", MAX_CONFIG_BYTES)
