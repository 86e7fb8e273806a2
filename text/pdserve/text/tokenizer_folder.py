"""The files of a model folder that say how its text is made, read and checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from pdserve.common.errors import ConfigError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class TokenizerFolder:
    """Parsed JSON files beside tokenizer.json; a file that is not there is an empty object."""

    path: Path
    tokenizer_config: dict[str, Any]
    special_tokens_map: dict[str, Any]
    generation_config: dict[str, Any]
    config: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> TokenizerFolder:
        """Raises: ConfigError naming the folder that is missing, or the file that is no JSON object."""
        if not path.is_dir():
            raise ConfigError(f"{path} is not a folder")
        if not (path / "tokenizer.json").is_file():
            raise ConfigError(f"{path / 'tokenizer.json'} is missing; other tokenizer formats are not read")
        names = ("tokenizer_config", "special_tokens_map", "generation_config", "config")
        return cls(path, *(_read_object(path / f"{name}.json") for name in names))

    def token(self, name: str) -> str | None:
        """The text of a token that the files name, such as `bos_token`."""
        for source in (self.tokenizer_config, self.special_tokens_map):
            if text := _content(source.get(name)):
                return text
        return None

    def special_tokens(self) -> dict[str, str]:
        """Name -> text of all named tokens that there are: the variables of a chat template."""
        return {name: text for name in NAMED_TOKENS if (text := self.token(name)) is not None}

    def added_tokens(self) -> Iterator[AddedToken]:
        """Tokens that tokenizer_config.json and special_tokens_map.json declare, in the order of their ids.

        Normally all of them stand in tokenizer.json as well; older folders rely on the loader to add them.
        """
        declared = self._require(self.tokenizer_config, "tokenizer_config", "added_tokens_decoder", dict, {})
        try:
            entries = [entry for _, entry in sorted(declared.items(), key=lambda item: int(item[0]))]
            named = set(self.special_tokens().values())
            for entry in entries:
                options = {k: v for k, v in entry.items() if k in ("single_word", "lstrip", "rstrip", "normalized")}
                special = bool(entry.get("special", False)) or entry["content"] in named
                yield AddedToken(entry["content"], special=special, **options)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.path / 'tokenizer_config.json'}: added_tokens_decoder is malformed") from error
        for text in self.special_tokens().values():
            yield AddedToken(text, special=True)
        for source in (self.tokenizer_config, self.special_tokens_map):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                extra = source.get(key)
                for token in extra if isinstance(extra, list) else ():
                    if content := _content(token):
                        yield AddedToken(content, special=True)

    def declared_ids(self, name: str) -> tuple[int, ...]:
        """`eos_token_id` or `bos_token_id`: generation_config.json's, else config.json's, else none."""
        text_config = self.config.get("text_config")
        sources = [("generation_config", self.generation_config), ("config", self.config)]
        if isinstance(text_config, dict):
            sources.append(("config", text_config))
        for file, source in sources:
            value = source.get(name)
            if value is None or value == []:
                continue
            ids = value if isinstance(value, list) else [value]
            if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
                raise ConfigError(
                    f"{self.path / f'{file}.json'}: {name} is {value!r}, not a token id or a list of them"
                )
            return tuple(dict.fromkeys(ids))
        return ()

    def generation_defaults(self) -> dict[str, float | int]:
        """The sampling values that generation_config.json gives, as vLLM takes them; absent ones stay absent.

        `"do_sample": false` makes its values meaningless, so none is taken then. Values are not range-checked:
        `SamplingParams.verify` does that for a request.
        """
        if self.generation_config.get("do_sample") is False:
            return {}
        defaults: dict[str, float | int] = {}
        for name in SAMPLING_DEFAULTS:
            value = self._require(self.generation_config, "generation_config", name, (int, float), None)
            if value is not None:
                defaults[name] = int(value) if name == "top_k" else float(value)
        return defaults

    def chat_template(self) -> tuple[str, str] | None:
        """(source, the file it stands in); of several named ones "default"; None when there is none."""
        own = self.path / "chat_template.jinja"
        if own.is_file():
            return _read_text(own), str(own)
        config = self.path / "tokenizer_config.json"
        template = self.tokenizer_config.get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
        if template is None:
            return None
        if not isinstance(template, str):
            raise ConfigError(f"{config}: chat_template must be a string or a list of named ones")
        return template, str(config)

    def _require(self, source: dict[str, Any], file: str, key: str, kind: Any, default: Any) -> Any:
        value = source.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{self.path / f'{file}.json'}: {key} is {value!r}, which has the wrong type")
        return value


def _content(token: Any) -> str | None:
    """A token is written as its text, or as an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8") from error


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
