"""`LiteralSpecials`: special tokens that a client writes into a message, kept as the plain text that they are.

A tokenizer recognises `<|im_end|>` wherever it stands, so whoever may write a part of a message may end it and begin another in
another role. Here each special token in a client's text is replaced by a number before the chat template is rendered, and
encoded as plain text where the number stands afterwards. So templates may trim, compare and cut messages as they do, and
their own special tokens stay what they are. A piece of a special token at the end of a text is replaced, too: the next text might
complete it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer as Backend

_NONCE_DIGITS = 30
"""Enough digits that no client guesses them. Digits pass through filters for JSON, case and white space."""
_PLACE_DIGITS = 6


class LiteralSpecials:
    """The special tokens of one tokenizer. Every method may be called from any thread."""

    def __init__(self, backend: Backend) -> None:
        """backend: is not changed."""
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special} - {""}
        self._wholes = re.compile(_pattern(special)) if special else None
        # letters and digits alone complete nothing that is not also an ordinary word, such as a role
        self._beginnings = {one[:end] for one in special for end in range(1, len(one)) if not one[:end].isalnum()}
        self._plain = Backend.from_str(backend.to_str())
        self._plain.encode_special_tokens = True

    def in_one_prompt(self) -> LiteralsOfPrompt:
        """For one rendering of a chat template."""
        return LiteralsOfPrompt(self)

    def hide(self, text: str, mark: Callable[[str], str]) -> str:
        """The text with `mark(special)` in place of each special token, and of a beginning of one at its end."""
        if self._wholes is None:
            return text
        text = self._wholes.sub(lambda match: mark(match[0]), text)
        longest = max(map(len, self._beginnings), default=0)
        for num_chars in range(min(longest, len(text)), 0, -1):
            if text[-num_chars:] in self._beginnings:
                return text[:-num_chars] + mark(text[-num_chars:])
        return text

    def encode(self, text: str) -> list[int]:
        """Token ids of a text in which nothing is a special token."""
        return self._plain.encode(text, add_special_tokens=False).ids


class LiteralsOfPrompt:
    """The special tokens in the client's texts of one prompt."""

    def __init__(self, literals: LiteralSpecials) -> None:
        self._literals = literals
        self._nonce = "".join(secrets.choice("123456789") for _ in range(_NONCE_DIGITS))
        self._hidden: list[str] = []
        self._marks = re.compile(f"{self._nonce}([0-9]{{{_PLACE_DIGITS}}})")

    def hide(self, text: str) -> str:
        """The client's text with a number in place of each special token."""
        return self._literals.hide(text, self._mark)

    def _mark(self, found: str) -> str:
        if found not in self._hidden:
            self._hidden.append(found)
        return f"{self._nonce}{self._hidden.index(found):0{_PLACE_DIGITS}d}"

    def shown(self, rendered: str) -> str:
        """The rendered text with the special tokens back in their places."""
        return "".join(text for text, _ in self._parts(rendered))

    def encode(self, rendered: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Token ids of the rendered text. encode: recognises special tokens, for what the template wrote."""
        ids: list[int] = []
        for text, is_literal in self._parts(rendered):
            if text:
                ids += self._literals.encode(text) if is_literal else encode(text)
        return ids

    def _parts(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Pieces of the text in their order, and whether each is a client's special token."""
        for place, piece in enumerate(self._marks.split(rendered)):
            yield (self._hidden[int(piece)], True) if place % 2 else (piece, False)


def _pattern(texts: set[str]) -> str:
    """A regular expression for any of the texts, the longest first, that looks at each character of a text once."""
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
