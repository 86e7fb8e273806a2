"""`gguf_folder`: a model folder for a GGUF file.

Configuration and tokenizer are written once, next to links to the file, under the user's cache, and all that reads model folders
reads that one. Weights stay in the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from pdserve.common.errors import ConfigError
from pdserve.models.gguf.gguf_config import gguf_architecture, gguf_config
from pdserve.models.gguf.gguf_file import GgufFile
from pdserve.models.gguf.gguf_tensors import INDEX_FILE, folder_files, gguf_index
from pdserve.models.gguf.gguf_tokenizer import GgufTokenizer

_FORM = 1
"""Increases with every change of what is written here, so that folders of before are not used."""


def gguf_folder(path: Path, name: str) -> Path:
    """path: the file, or the first of a split model. name: of the folder, and so of the model.

    Folders that were made of the same file before are used again; several processes may make one at a time.
    Raises: ConfigError, UnsupportedModel; both name the file and the key.
    """
    path = path.resolve()
    state = path.stat()
    told = f"{_FORM}/{path}/{state.st_size}/{state.st_mtime_ns}"
    folder = _cache() / hashlib.blake2b(told.encode(), digest_size=12).hexdigest() / name
    if (folder / INDEX_FILE).is_file():
        return folder
    file = GgufFile.read(path)
    architecture = gguf_architecture(file)
    config = gguf_config(file, architecture)
    tokenizer = GgufTokenizer(file.metadata)
    index = gguf_index(file, architecture, config)
    written = {
        "config.json": json.dumps(config, indent=2),
        "tokenizer.json": tokenizer.tokenizer_json(),
        "tokenizer_config.json": json.dumps(tokenizer.tokenizer_config(), indent=2),
        "generation_config.json": json.dumps(tokenizer.generation_config(), indent=2),
        INDEX_FILE: msgspec.json.encode(index).decode(),
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            for name, text in written.items():
                (made / name).write_text(text)
            for name, target in zip(folder_files(len(file.paths)), file.paths, strict=True):
                (made / name).symlink_to(target)
            made.chmod(0o755)
            made.rename(folder)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            # another process may have made it meanwhile
            if not (folder / INDEX_FILE).is_file():
                raise
    except OSError as error:
        raise ConfigError(
            f"{path}: a folder for its configuration cannot be made in {folder.parent}: {error.strerror}; the variable "
            "XDG_CACHE_HOME says where else"
        ) from error
    return folder


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve" / "gguf"
