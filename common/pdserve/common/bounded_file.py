"""`read_bounded`: a file that a setting or an option names, within bounded memory."""

from __future__ import annotations

from pathlib import Path

from pdserve.common.errors import ConfigError


def read_bounded(path: Path, max_bytes: int, name: str) -> bytes:
    """The bytes of a file. name: of what names it, for messages. Raises: ConfigError for one that is longer, or cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{name} {path}: {error.strerror}") from error
    if len(data) > max_bytes:
        raise ConfigError(f"{name} {path} has more than {max_bytes} bytes")
    return data
