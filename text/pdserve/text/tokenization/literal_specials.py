"""`LiteralSpecials`: encodes special tokens in a client's messages as plain text.

A tokenizer recognises `<|im_end|>` anywhere in a text, so a client could write it in a message to end that message and begin one
in another role. Each special token in a client's text is therefore replaced by a number before the chat template is rendered, and
the number is encoded afterwards as the special token's plain text. Templates may still trim, compare and cut messages, and special
tokens of the template remain special. A prefix of a special token at the end of a text is replaced, too, because the next text
might complete it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer as Backend

_NONCE_DIGITS = 30
"""Digits of the random number, too many for a client to guess. Filters for JSON, case and white space leave digits unchanged."""
_PLACE_DIGITS = 6


class LiteralSpecials:
    """The special tokens of one tokenizer. Every method may be called from any thread."""

    def __init__(self, backend: Backend) -> None:
        """backend: the tokenizer, which is not changed."""
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special} - {""}
        self._wholes = re.compile(_pattern(special)) if special else None
        # a prefix of only letters and digits may be an ordinary word, such as a role
        self._beginnings = {one[:end] for one in special for end in range(1, len(one)) if not one[:end].isalnum()}
        self._plain = Backend.from_str(backend.to_str())
        self._plain.encode_special_tokens = True

    def in_one_prompt(self) -> LiteralsOfPrompt:
        """The state for one rendering of a chat template."""
        return LiteralsOfPrompt(self)

    def hide(self, text: str, mark: Callable[[str], str]) -> str:
        """The text with each special token, and a prefix of one at the text's end, replaced by `mark` of it."""
        if self._wholes is None:
            return text
        text = self._wholes.sub(lambda match: mark(match[0]), text)
        longest = max(map(len, self._beginnings), default=0)
        for num_chars in range(min(longest, len(text)), 0, -1):
            if text[-num_chars:] in self._beginnings:
                return text[:-num_chars] + mark(text[-num_chars:])
        return text

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without recognising special tokens."""
        return self._plain.encode(text, add_special_tokens=False).ids


class LiteralsOfPrompt:
    """Special tokens in the client's texts of one prompt, and the numbers in their places."""

    def __init__(self, literals: LiteralSpecials) -> None:
        self._literals = literals
        self._nonce = "".join(secrets.choice("123456789") for _ in range(_NONCE_DIGITS))
        self._hidden: list[str] = []
        self._marks = re.compile(f"{self._nonce}([0-9]{{{_PLACE_DIGITS}}})")

    def hide(self, text: str) -> str:
        """The client's text with each special token replaced by a number."""
        return self._literals.hide(text, self._mark)

    def _mark(self, found: str) -> str:
        if found not in self._hidden:
            self._hidden.append(found)
        return f"{self._nonce}{self._hidden.index(found):0{_PLACE_DIGITS}d}"

    def shown(self, rendered: str) -> str:
        """The rendered text with the special tokens back in their places."""
        return "".join(text for text, _ in self._parts(rendered))

    def encode(self, rendered: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Token ids of the rendered text. encode: encodes the template's text and recognises special tokens."""
        ids: list[int] = []
        for text, is_literal in self._parts(rendered):
            if text:
                ids += self._literals.encode(text) if is_literal else encode(text)
        return ids

    def _parts(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Pieces of the text in order, each with True if it is a client's special token."""
        for place, piece in enumerate(self._marks.split(rendered)):
            yield (self._hidden[int(piece)], True) if place % 2 else (piece, False)


def _pattern(texts: set[str]) -> str:
    """A regular expression for any of the texts, the longest first, that reads each character of a text once."""
    by_first: dict[str, set[str]] = {}
    for text in texts - {""}:
        by_first.setdefault(text[0], set()).add(text[1:])
    branches = "|".join(re.escape(first) + _pattern(rest) for first, rest in sorted(by_first.items()))
    return f"(?:{branches})?" if branches and "" in texts else f"(?:{branches})" if branches else ""


def hidden_in(value: Any, hide: Callable[[str], str]) -> Any:
    """A JSON value with every string in it, keys included, passed through `hide`."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, dict):
        return {hide(key): hidden_in(item, hide) for key, item in value.items()}
    if isinstance(value, list):
        return [hidden_in(item, hide) for item in value]
    return value
