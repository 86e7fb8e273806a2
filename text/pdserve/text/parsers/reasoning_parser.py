"""`ReasoningParser`: separates a model's reasoning from the answer that follows it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pdserve.text.parsers.deltas import ReasoningDelta, TextDelta, tag_begun


class ReasoningTags(NamedTuple):
    """Texts around reasoning."""

    begin: str
    end: str


_THINK = ReasoningTags("<think>", "</think>")
REASONING_TAGS: Mapping[str, ReasoningTags] = {
    "deepseek_r1": _THINK,
    "qwen3": _THINK,
    "glm45": _THINK,
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>"),
}
"""Tags by vLLM's names of families."""


class _State(enum.Enum):
    START = enum.auto()
    """Nothing but white space so far; the tag may follow."""
    REASONING = enum.auto()
    BETWEEN = enum.auto()
    """Reasoning has ended; white space before the answer is dropped."""
    ANSWER = enum.auto()


class ReasoningParser:
    """Parses the text of one answer; the joined deltas do not depend on how the text is cut into pieces.

    Reasoning is only at the beginning of an answer: tags further on are text. White space around it is dropped. Reasoning whose
    tag is never closed lasts to the end.
    """

    def __init__(self, tags: ReasoningTags, *, is_open: bool) -> None:
        """is_open: the prompt ends with the opening tag, so that the answer begins with reasoning."""
        self._tags = tags
        self._state = _State.START
        self._is_open = is_open
        self._space: list[str] = []
        """White space that is given out with what follows it."""
        self._begun = ""
        """Text at the end that may be the beginning of a tag."""
        self._has_told = False
        """Some reasoning has been given out, so that white space before more of it counts."""
        self.has_reasoning = is_open

    def feed(self, text: str) -> list[ReasoningDelta | TextDelta]:
        """New output from the next piece of text."""
        deltas: list[ReasoningDelta | TextDelta] = []
        while text:
            match self._state:
                case _State.START:
                    text = self._at_start(text)
                case _State.REASONING:
                    text = self._in_reasoning(text, deltas)
                case _State.BETWEEN:
                    text = text.lstrip()
                    if text:
                        self._state = _State.ANSWER
                case _State.ANSWER:
                    deltas.append(TextDelta("".join([*self._space, text])))
                    self._space, text = [], ""
        return deltas

    def flush(self) -> list[ReasoningDelta | TextDelta]:
        """End the text: held-back text is given out, but for white space at the end of reasoning."""
        begun, self._begun = self._begun, ""
        if self._state is _State.REASONING or (self._state is _State.START and self._is_open):
            deltas: list[ReasoningDelta | TextDelta] = []
            self._emit(begun, deltas)
            return deltas
        held, self._space = "".join(self._space) + begun, []
        return [TextDelta(held)] if held else []

    def _at_start(self, text: str) -> str:
        """Look for the opening tag; returns the text of the next state, empty while the tag may still follow."""
        text, self._begun = self._begun + text, ""
        rest = text.lstrip()
        if len(rest) < len(text):
            self._space.append(text[: len(text) - len(rest)])
        if rest.startswith(self._tags.begin):
            self._state, self.has_reasoning, self._space = _State.REASONING, True, []
            return rest[len(self._tags.begin) :]
        if self._tags.begin.startswith(rest):
            self._begun = rest
            return ""
        # with an open tag, white space is that of the reasoning
        self._state = _State.REASONING if self._is_open else _State.ANSWER
        return rest

    def _in_reasoning(self, text: str, deltas: list[ReasoningDelta | TextDelta]) -> str:
        text, self._begun = self._begun + text, ""
        before, tag, after = text.partition(self._tags.end)
        if tag:
            self._emit(before, deltas)
            self._state, self._space = _State.BETWEEN, []
            return after
        end = len(text) - tag_begun(text, (self._tags.end,))
        self._begun = text[end:]
        self._emit(text[:end], deltas)
        return ""

    def _emit(self, text: str, deltas: list[ReasoningDelta | TextDelta]) -> None:
        """Give out reasoning but for white space at its end, which is held back, and at its beginning."""
        body = text.rstrip()
        if body:
            given = "".join(self._space) + body
            deltas.append(ReasoningDelta(given if self._has_told else given.lstrip()))
            self._space, self._has_told = [], True
        if len(body) < len(text):
            self._space.append(text[len(body) :])


class ReasoningTokenCounter:
    """Counts the tokens of an answer up to the closing tag, which is counted, too."""

    def __init__(self, tags: ReasoningTags) -> None:
        self._end = tags.end.encode()
        self._tail = b""
        """The last bytes of the tokens so far, one fewer than the tag has."""
        self._has_ended = False
        self.num_tokens = 0

    def add(self, pieces: Iterable[bytes]) -> None:
        """pieces: the bytes of the next tokens."""
        for piece in pieces:
            if self._has_ended:
                return
            self.num_tokens += 1
            text = self._tail + piece
            self._has_ended = self._end in text
            self._tail = text[-len(self._end) + 1 :]

    @property
    def has_ended(self) -> bool:
        """True if the closing tag has been read."""
        return self._has_ended
