"""`is_hub_name`: distinguishes a model of the Hugging Face Hub from a folder."""

from __future__ import annotations

import re
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")


def is_hub_name(model: str) -> bool:
    """True for `ORG/NAME`, unless there is a folder or file of this name."""
    return _HUB_NAME.fullmatch(model) is not None and not Path(model).exists()
