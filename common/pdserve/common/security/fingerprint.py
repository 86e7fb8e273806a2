"""Fingerprints of a model folder: two workers whose fingerprints are equal make and read the same KV blocks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import xxhash

from pdserve.common.errors import ConfigError
from pdserve.common.kv_layout import FORMAT

_CONFIG_FILES = ("config.json", "preprocessor_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_WEIGHT_FILES = ("*.safetensors", "*.gguf")
_CHUNK_BYTES = 16 << 20


def model_fingerprint(folder: Path, dtype: str, drawn: str = "none") -> str:
    """32 hex digits over config (RoPE included), tokenizer, every weight file's bytes, dtype and block format.

    Reads all weights once, at memory speed (xxh3). dtype: of weights and blocks, with the weights' quantization after a slash.
    drawn: what decides the weights of the load format `dummy`, which reads no weight file. Raises: ConfigError when a file cannot
    be read.
    """
    files = [path.name for form in _WEIGHT_FILES for path in sorted(folder.glob(form))] if drawn == "none" else []
    names = [*_CONFIG_FILES, *_TOKENIZER_FILES, *files]
    digest = hashlib.blake2b(f"{dtype}/{drawn}/{FORMAT}".encode(), digest_size=16, person=b"model")
    return _over_files(digest, folder, names)


def tokenizer_fingerprint(folder: Path) -> str:
    """32 hex digits over the files that decide token ids: router and workers must agree."""
    return _over_files(hashlib.blake2b(digest_size=16, person=b"tokenizer"), folder, list(_TOKENIZER_FILES))


def _over_files(digest: hashlib.blake2b, folder: Path, names: list[str]) -> str:
    for name in names:
        path = folder / name
        if path.is_file():
            digest.update(f"{name}:{_file_hash(path)};".encode())
    return digest.hexdigest()


def _file_hash(path: Path) -> str:
    state = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                state.update(chunk)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return state.hexdigest()
