"""A JSON file's fields, read with their types checked; every error names the file, the field and the value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pdserve.common.errors import ConfigError

Value = TypeVar("Value")


class JsonObject:
    """An object of a JSON file; `null` counts as absent."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self.where = where

    @classmethod
    def read(cls, path: Path) -> JsonObject:
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold a JSON object, not {type(values).__name__}")
        return cls(values, str(path))

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def get(self, name: str) -> object:
        return self._values.get(name)

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """True where the field is there and null, which some fields tell from absence."""
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

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.get(name)
        if value is None:
            value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"an integer of at least {minimum}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None:
            value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(name, "a positive number")
        return float(value)

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
        items = self.items(name)
        if items is None:
            raise ConfigError(f"{self.where}: {name} is missing")
        values = [float(item) for item in items if isinstance(item, int | float) and not isinstance(item, bool)]
        if len(values) != length or len(items) != length:
            raise self.error(name, f"a list of {length} numbers")
        return tuple(values)

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """One id or a list of them; None where the field is absent."""
        value = self.get(name)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
            raise self.error(name, "a token id or a list of token ids")
        return tuple(ids)

    def error(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} must be {expected}, not {json.dumps(self.get(name))[:80]}")

    def _required(self, name: str, default: Value | None) -> Value:
        if default is None:
            raise ConfigError(f"{self.where}: {name} is missing")
        return default
