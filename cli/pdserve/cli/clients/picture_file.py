"""`data_url`: a file of a picture, as chats have it."""

from __future__ import annotations

import base64
import mimetypes
from pathlib import Path

from pdserve.common.errors import ConfigError


def data_url(path: Path) -> str:
    """The file in a URL; its format is left to the router to check. Raises: ConfigError if it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"image {str(path)!r} cannot be read: {error.strerror}") from error
    kind = mimetypes.guess_type(path.name)[0] or ""
    return f"data:{kind if kind.startswith('image/') else 'image/png'};base64,{base64.b64encode(data).decode()}"
