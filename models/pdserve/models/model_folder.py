"""`model_folder`: the value of `--model` as a folder."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from pdserve.common.errors import ConfigError

DEMO = "demo"


def model_folder(model: str) -> Path:
    """The folder of the bundled model for `demo`, else the given folder.

    Raises: ConfigError if the folder or its config.json is missing.
    """
    folder = Path(str(files("pdserve.models"))) / "demo" if model == DEMO else Path(model).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"model {model!r}: no such folder (a Hugging Face checkpoint, or {DEMO!r} for the bundled model)"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model {model!r}: {folder} has no config.json, so it is not a Hugging Face checkpoint")
    return folder
