"""A JSON file's fields, read with their types checked; every error names the file, the field and the value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pdserve.common.errors import ConfigError
from pdserve.common.json_file import MAX_JSON_BYTES, read_json_object, read_model_config

Value = TypeVar("Value")
MAX_INTEGER = 2**31 - 1
MAX_SHOWN_CHARS = 80
"""Limit of characters of a value in a message."""


class JsonObject:
    """An object of a JSON file; `null` counts as absent."""

    def __init__(self, values: Mapping[str, object], where: str, names: Mapping[str, str] | None = None) -> None:
        """names: a field's name to callers -> its name in the file; others have one."""
        self._values = values
        self._names = names or {}
        self.where = where

    @classmethod
    def read(cls, path: Path, max_bytes: int = MAX_JSON_BYTES) -> JsonObject:
        """Read a file. Raises: ConfigError if it is missing, too long, or not a JSON object."""
        return cls(read_json_object(path, max_bytes), str(path))

    @classmethod
    def of_model(cls, folder: Path) -> JsonObject:
        """config.json of a model folder. Raises: as `read`."""
        return cls(read_model_config(folder), str(folder / "config.json"))

    def with_names(self, names: Mapping[str, str]) -> JsonObject:
        """The same fields by other names: a field's name to callers -> its name in the file, which messages have.

        A file may have the first name all the same. Raises: ConfigError if it has both, with different values.
        """
        for name, in_file in names.items():
            if self.has(name) and self.has(in_file) and self.get(name) != self.get(in_file):
                raise self.error(name, f"as {in_file} ({self.shown(in_file)})")
        return JsonObject(self._values, self.where, names)

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def get(self, name: str) -> object:
        return self._values.get(self._in_file(name))

    def _in_file(self, name: str) -> str:
        other = self._names.get(name, name)
        return name if other not in self._values and name in self._values else other

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """True if the field is present and null, which some fields distinguish from absence."""
        name = self._in_file(name)
        return name in self._values and self._values[name] is None

    def has_objects(self) -> bool:
        return any(isinstance(value, dict) for value in self._values.values())

    def child(self, name: str) -> JsonObject | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return JsonObject(value, f"{self.where}: {name}")

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        value = self.get(name)
        if value is None:
            value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"an integer of at least {minimum}")
        if value > maximum:
            raise self.error(name, f"at most {maximum}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self.get(name)
        if value is None:
            value = self._required(name, default)
        number = _as_float(value)
        if number is None or not 0 < number < math.inf:
            raise self.error(name, "a positive number")
        return number

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.get(name)
        if value is None:
            value = self._required(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def items(self, name: str) -> list[object] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise self.error(name, "a list")
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """`length` positive, finite numbers."""
        items = self.items(name)
        if items is None:
            raise self._missing(name)
        values = [number for item in items if (number := _as_float(item)) is not None and 0 < number < math.inf]
        if len(values) != length or len(items) != length:
            raise self.error(name, f"a list of {length} positive numbers")
        return tuple(values)

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """One id or a list of ids; None if the field is absent."""
        value = self.get(name)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
            raise self.error(name, "a token id or a list of token ids")
        return tuple(ids)

    def shown(self, name: str) -> str:
        """The value as JSON, shortened for a message."""
        try:
            text = json.dumps(self.get(name))
        except RecursionError:
            return "a deeply nested value"
        return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."

    def error(self, name: str, expected: str) -> ConfigError:
        shown = self._in_file(name)[:MAX_SHOWN_CHARS]
        return ConfigError(f"{self.where}: {shown} must be {expected}, not {self.shown(name)}")

    def _missing(self, name: str) -> ConfigError:
        return ConfigError(f"{self.where}: {self._in_file(name)} is missing")

    def _required(self, name: str, default: Value | None) -> Value:
        if default is None:
            raise self._missing(name)
        return default


def _as_float(value: object) -> float | None:
    """None for a value that is not a number, or is too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
