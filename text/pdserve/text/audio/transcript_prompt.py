"""`TranscriptPrompt`: the tokens with which a decoder begins a transcript, by a model's `generation_config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.common.json_file import read_json_object, read_model_config

Task = Literal["transcribe", "translate"]
_FILE = "generation_config.json"
_SHOWN = 12
"""Languages that a message names."""


@dataclass(frozen=True, slots=True)
class TranscriptPrompt:
    """Token ids."""

    start: int
    languages: Mapping[str, int]
    """Tokens of languages, by a code such as `en`; empty for a model of one language."""
    tasks: Mapping[str, int]
    """Empty for a model of one language, which can only transcribe."""
    no_timestamps: int | None
    previous: int | None
    """Begins a text that precedes the sound."""
    default_language: str | None
    """None: a client names the language."""

    @classmethod
    def from_folder(cls, folder: Path) -> TranscriptPrompt:
        """Raises: ConfigError."""
        path = folder / _FILE
        config = read_model_config(folder)
        values = (config | read_json_object(path)) if path.exists() else config
        start = _token_id(path, values, "decoder_start_token_id")
        if start is None:
            raise ConfigError(f"{path}: decoder_start_token_id is missing, with which the decoder begins")
        languages: dict[str, int] = {}
        tasks: dict[str, int] = {}
        if values.get("is_multilingual", True):
            languages = {_code(name): token for name, token in _token_ids(path, values, "lang_to_id").items()}
            tasks = _token_ids(path, values, "task_to_id")
        given = values.get("language")
        default = _code(given) if isinstance(given, str) else None
        return cls(
            start=start,
            languages=languages,
            tasks=tasks,
            no_timestamps=_token_id(path, values, "no_timestamps_token_id"),
            previous=_token_id(path, values, "prev_sot_token_id"),
            default_language=default if default in languages else None,
        )

    def language(self, given: str | None, field: str = "language") -> str | None:
        """The code of the language that is spoken. given: None for the model's default.

        None for a model of one language. Raises: InvalidRequest.
        """
        if not self.languages:
            if given is not None:
                raise InvalidRequest(f"{field} is {given[:40]!r}, and this model knows one language alone", field)
            return None
        known = ", ".join([*list(self.languages)[:_SHOWN], *(["..."] if len(self.languages) > _SHOWN else [])])
        if given is None and self.default_language is None:
            raise InvalidRequest(f"{field} is needed, it is not detected: one of {known}", field)
        code = self.default_language if given is None else _code(given)
        if code not in self.languages:
            raise InvalidRequest(f"{field} is {(given or '')[:40]!r}, one of {known} is needed", field)
        return code

    def token_ids(
        self,
        language: str | None,
        task: Task,
        text: str,
        encode: Callable[[str], list[int]],
        most: int,
        text_field: str = "prompt",
    ) -> list[int]:
        """language: a code, as of `language`. text: precedes the sound; "" for none. encode: its token ids. most: of them, the last
        ones are kept. text_field: the client's name of `text`. Raises: InvalidRequest."""
        ids: list[int] = []
        if text:
            if self.previous is None:
                raise InvalidRequest(
                    f"{text_field} is given, and {_FILE} of this model has no prev_sot_token_id", text_field
                )
            ids = [self.previous, *encode(" " + text.strip())[-most:]]
        ids.append(self.start)
        if language is not None:
            ids.append(self.languages[language])
        if self.tasks:
            if task not in self.tasks:
                raise InvalidRequest(f"task is {task!r}, this model knows {', '.join(self.tasks)}", "task")
            ids.append(self.tasks[task])
        elif task != "transcribe":
            raise InvalidRequest(f"task is {task!r}, and this model transcribes alone", "task")
        if self.no_timestamps is not None:
            ids.append(self.no_timestamps)
        return ids


def _code(name: str) -> str:
    return name.lower().removeprefix("<|").removesuffix("|>")


def _token_id(path: Path, values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigError(f"{path}: {name} must be a token id, not {value!r:.80}")
    return value


def _token_ids(path: Path, values: Mapping[str, Any], name: str) -> dict[str, int]:
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: {name} must be an object of token ids, not {found!r:.80}")
    return {key: token for key in found if (token := _token_id(path, found, key)) is not None}
