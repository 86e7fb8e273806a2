"""Files of traces, which others wrote: every read has a limit, and every error names the file."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from pdserve.common.errors import ConfigError

MAX_FILE_BYTES = 64 << 20
"""Limit of a file that is read as a whole."""
MAX_LINE_BYTES = 16 << 20
T = TypeVar("T")


def unreadable(path: Path, error: OSError) -> ConfigError:
    """The error for a file or folder that cannot be read."""
    return ConfigError(f"--trace is {path}, which cannot be read: {error.strerror}")


def whole_file(path: Path) -> bytes:
    """Raises: ConfigError for a file that cannot be read, or has more than `MAX_FILE_BYTES`."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: more than {MAX_FILE_BYTES} bytes")
    return data


def first_bytes(path: Path, num: int) -> bytes:
    """Raises: ConfigError for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(num)
    except OSError as error:
        raise unreadable(path, error) from error


def decoded(label: str, data: bytes, decode: Callable[[bytes], T]) -> T:
    """What msgspec's `decode` makes of JSON. label: for errors. Raises: ConfigError."""
    try:
        return decode(data)
    except RecursionError as error:
        raise ConfigError(f"{label}: values are nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{label}: {error}") from error


def lines_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """Lines that are not empty, each after a label for errors. Raises: ConfigError for a line of more than `MAX_LINE_BYTES`."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                label = f"{path}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"{label}: longer than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    yield label, line
    except OSError as error:
        raise unreadable(path, error) from error


def rows_of(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Rows of a CSV file whose fields have no line breaks, each after a label for errors. Raises: ConfigError."""
    for label, line in lines_of(path):
        try:
            [row] = csv.reader([line.decode("utf-8-sig").rstrip("\r\n")], strict=True)
        except (csv.Error, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"{label}: no row of a CSV file: {error}") from error
        yield label, [field.strip() for field in row]
