"""`TokenizerFolder`: the tokenizer's configuration files in a model folder, read and checked."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.common.json_file import (
    MAX_CONFIG_BYTES,
    MAX_JSON_BYTES,
    MAX_TOKENIZER_CONFIG_BYTES,
    read_json_object,
    read_text_file,
)
from pdserve.common.request.sampling_params import SamplingParams

log = logging.getLogger(__name__)

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MAX_TEMPLATE_BYTES = 1 << 20
_OTHER_TOKENIZERS = {
    "tokenizer.model": "SentencePiece",
    "tekken.json": "Mistral's own format",
    "vocab.json": "a vocabulary with merges.txt",
    "vocab.txt": "WordPiece",
}
"""File -> its kind. transformers can convert each to tokenizer.json."""


@dataclass(frozen=True)
class TokenizerFolder:
    """Parsed JSON files next to tokenizer.json; a missing file is an empty object."""

    path: Path
    tokenizer_config: dict[str, Any]
    special_tokens_map: dict[str, Any]
    generation_config: dict[str, Any]
    config: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> TokenizerFolder:
        """Raises: ConfigError naming the missing folder, or the file that is not a JSON object."""
        if not path.is_dir():
            raise ConfigError(f"{path} is not a folder")
        if not (path / "tokenizer.json").is_file():
            raise ConfigError(f"{path / 'tokenizer.json'} is missing; {_instead(path)}")
        tokenizer_config = _read_object(path / "tokenizer_config.json", MAX_TOKENIZER_CONFIG_BYTES)
        return cls(
            path,
            tokenizer_config,
            _read_object(path / "special_tokens_map.json", MAX_JSON_BYTES),
            _read_object(path / "generation_config.json", MAX_JSON_BYTES),
            _read_object(path / "config.json", MAX_CONFIG_BYTES),
        )

    def token(self, name: str) -> str | None:
        """The text of a named token, such as `bos_token`."""
        for source in (self.tokenizer_config, self.special_tokens_map):
            if text := _content(source.get(name)):
                return text
        return None

    def special_tokens(self) -> dict[str, str]:
        """Name -> text of all named tokens: variables of a chat template."""
        return {name: text for name in NAMED_TOKENS if (text := self.token(name)) is not None}

    def added_tokens(self) -> Iterator[AddedToken]:
        """Tokens that tokenizer_config.json and special_tokens_map.json declare, in the order of their ids.

        Normally tokenizer.json contains all of them, too; in older folders the loader adds them.
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

    def declared_ids(self, name: str) -> tuple[int, ...] | None:
        """`eos_token_id` or `bos_token_id` of generation_config.json, else of config.json; None if neither has it."""
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
                    f"{self.path / f'{file}.json'}: {name} is {value!r:.80}, not a token id or a list of them"
                )
            return self.known_ids(dict.fromkeys(ids), name)
        return None

    def known_ids(self, ids: Iterable[int], name: str) -> tuple[int, ...]:
        """The ids below `vocab_size` of config.json: the model never samples other ids, and a grammar refuses them.

        name: field name for the warning that lists ignored ids.
        """
        ids = tuple(ids)
        vocab_size = self.config.get("vocab_size")
        if type(vocab_size) is not int:
            return ids
        known = tuple(token_id for token_id in ids if token_id < vocab_size)
        if len(known) < len(ids):
            unknown = ", ".join(str(token_id)[:20] for token_id in ids if token_id >= vocab_size)
            log.warning(
                "%s: %s %s is outside the vocabulary of %d tokens: no text ends by it",
                self.path,
                name,
                unknown[:80],
                vocab_size,
            )
        return known

    def labels(self) -> tuple[str, ...]:
        """`id2label` of config.json in the order of the ids; empty if it is absent, or not a name for each of 0, 1, 2, ..."""
        named = self.config.get("id2label")
        if not isinstance(named, dict):
            return ()
        labels = tuple(named.get(str(place)) for place in range(len(named)))
        return tuple(label for label in labels if isinstance(label, str)) if None not in labels else ()

    def generation_defaults(self) -> dict[str, float | int]:
        """Sampling defaults of generation_config.json, as vLLM reads them; absent values remain absent.

        Empty with `"do_sample": false`, which disables them. Raises: ConfigError for a value that is out of range.
        """
        if self.generation_config.get("do_sample") is False:
            return {}
        defaults: dict[str, float | int] = {}
        for name in SAMPLING_DEFAULTS:
            value = self._require(self.generation_config, "generation_config", name, (int, float), None)
            if value is None:
                continue
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if not math.isfinite(number):
                raise ConfigError(f"{self.path / 'generation_config.json'}: {name} is {number}, not a finite number")
            defaults[name] = int(number) if name == "top_k" else number
        try:
            given: dict[str, Any] = dict(defaults)
            SamplingParams(**given).verify()
        except InvalidRequest as error:
            raise ConfigError(f"{self.path / 'generation_config.json'}: {error.message}") from error
        return defaults

    def chat_templates(self) -> dict[str, tuple[str, str]]:
        """Name -> (source, file) of the chat templates; "default" and "tool_use" are used. Empty if there are none.

        As in transformers, separate files replace the template of tokenizer_config.json, and one in
        additional_chat_templates/ replaces chat_template.jinja.
        """
        files = {"default": self.path / "chat_template.jinja"} | {
            path.stem: path for path in sorted((self.path / "additional_chat_templates").glob("*.jinja"))
        }
        own = {
            name: (read_text_file(path, MAX_TEMPLATE_BYTES), str(path))
            for name, path in files.items()
            if path.is_file()
        }
        if own:
            return own
        config = self.path / "tokenizer_config.json"
        template = self.tokenizer_config.get("chat_template")
        if template is None:
            return {}
        named = {"default": template}
        if isinstance(template, list):
            entries = [entry for entry in template if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
            named = {entry["name"]: entry.get("template") for entry in entries}
        for name, source in named.items():
            if not isinstance(source, str):
                raise ConfigError(
                    f"{config}: chat_template {name[:80]!r} must be a string, or the list one of named ones"
                )
        return {name: (source, str(config)) for name, source in named.items()}

    def _require(self, source: dict[str, Any], file: str, key: str, kind: Any, default: Any) -> Any:
        value = source.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{self.path / f'{file}.json'}: {key} is {value!r:.80}, which has the wrong type")
        return value


def _content(token: Any) -> str | None:
    """The text of a token that is a string, or an object with a `content`; None for any other value."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text and _is_unicode(text) else None


def _is_unicode(text: str) -> bool:
    """False for text with a lone surrogate, which JSON may contain and no tokenizer accepts."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _instead(folder: Path) -> str:
    """Advice for a folder without tokenizer.json, by the files that it has."""
    for file, kind in _OTHER_TOKENIZERS.items():
        if (folder / file).is_file():
            return (
                f"there is {file} ({kind}), which is not read: make tokenizer.json of it with transformers, "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
    return "other tokenizer formats are not read"


def _read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The object, empty if the file does not exist. Raises: ConfigError."""
    return read_json_object(path, max_bytes) if path.exists() else {}
