"""`IncrementalDetokenizer` and its two implementations: text from token ids as they arrive.

`tokenizers.decoders.DecodeStream` is not used: it raises if a byte-fallback run turns out to be malformed after part of it was
returned, and it never returns text that ends in a real U+FFFD. A model can cause both.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import ClassVar

from tokenizers import Tokenizer as Backend

from pdserve.text.tokenization.token_bytes import TokenBytes

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_UTF8_MAX_BYTES = 4
_CONTEXT_TOKENS = 8
"""Prompt tokens with which a `WindowDetokenizer` starts; more than any decoder looks back."""
_MAX_PENDING_TOKENS = 8
"""Limit of tokens of an incomplete character. A character has at most 4 tokens; longer pending text is invalid and returned."""


class IncrementalDetokenizer(ABC):
    """Decodes one sequence as continuation of its prompt.

    Not thread-safe. The results of `add` and `flush`, joined, are the text of prompt and output together without the prompt's text:
    a first token that begins with a space keeps the space if there is a prompt.
    """

    __slots__ = ()
    completes_characters: ClassVar[bool] = False
    """True if the output completes a character of which the prompt has the first tokens."""

    @abstractmethod
    def add(self, token_ids: Sequence[int]) -> str:
        """Append tokens; return the text that is complete now, never part of a character."""

    @abstractmethod
    def flush(self) -> str:
        """End the sequence; return an incomplete character as U+FFFD. Called at most once, last."""


class NoDetokenizer(IncrementalDetokenizer):
    """Returns no text, for a client that requested only token ids."""

    __slots__ = ()

    def add(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Decoding error handler: one U+FFFD per byte, as byte fallback does for invalid UTF-8."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("pdserve.replace_each_byte", _replace_each_byte)
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class ByteDetokenizer(IncrementalDetokenizer):
    """Looks up each token's bytes and decodes them as a stream: constant time per token.

    The result equals that of decoding all ids at once, with one exception: if a run of byte-fallback tokens is not UTF-8, the
    library replaces the whole run by U+FFFD; here complete characters of the run remain, since they may have been sent.
    """

    __slots__ = ("_decoder", "_pieces", "_started", "_strip_left", "_token_bytes")
    completes_characters = True

    def __init__(
        self, token_bytes: TokenBytes, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        rules = token_bytes.rules
        self._token_bytes = token_bytes
        self._pieces = token_bytes.table(skip_special_tokens)
        self._decoder = _Utf8Decoder("replace" if rules.byte_level else "pdserve.replace_each_byte")
        self._strip_left = rules.strip_count
        self._started = not (rules.strip_count or rules.first_token_drops)
        """True after the text's beginning, where leading spaces are dropped."""
        self._read_prompt(prompt_token_ids)

    def add(self, token_ids: Sequence[int]) -> str:
        if not self._started:
            return self._add_at_start(token_ids)
        return self._decoder.decode(b"".join(map(self._pieces.__getitem__, token_ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _add_at_start(self, token_ids: Sequence[int]) -> str:
        for place, token_id in enumerate(token_ids):
            text = self._add_first(token_id)
            if self._started:
                return text + self.add(token_ids[place + 1 :])
        return ""

    def _add_first(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if not piece:
            return ""
        rules = self._token_bytes.rules
        if rules.first_token_drops:
            self._started = True
            return self._decoder.decode(self._token_bytes.first_piece(token_id))
        text = self._decoder.decode(piece)
        while text and self._strip_left and text[0] == rules.strip_char:
            text = text[1:]
            self._strip_left -= 1
        self._started = bool(text) or not self._strip_left
        return text

    def _read_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Set the state after the prompt: past the text's beginning, with a character that its last tokens left incomplete."""
        for token_id in prompt_token_ids:
            if self._started:
                break
            self._add_first(token_id)
        self._decoder.reset()
        pieces = self._pieces
        shown = (piece for token_id in reversed(prompt_token_ids) if (piece := pieces[token_id]))
        self._decoder.decode(b"".join(reversed(list(islice(shown, _UTF8_MAX_BYTES - 1)))))


class WindowDetokenizer(IncrementalDetokenizer):
    """For any other decoder (WordPiece, none, ...): decodes the last few tokens with and without the new ones.

    The window holds the tokens returned last and the new tokens, so that the decoder has the context of the new tokens.
    """

    __slots__ = ("_backend", "_bare", "_hidden", "_num_shown", "_shown", "_window")

    def __init__(
        self,
        backend: Backend,
        hidden: frozenset[int],
        prompt_token_ids: Sequence[int] = (),
        bare: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """hidden: ids without text: the special tokens when they are skipped.

        bare: token id -> its text, for tokens between which the decoder inserts nothing.
        """
        self._bare = bare
        self._backend = backend
        self._hidden = hidden
        visible = (token_id for token_id in reversed(prompt_token_ids) if self._is_visible(token_id))
        self._window = list(islice(visible, _CONTEXT_TOKENS))[::-1]
        self._start_window()

    def add(self, token_ids: Sequence[int]) -> str:
        return "".join([self._add(token_id) for token_id in token_ids if self._is_visible(token_id)])

    def flush(self) -> str:
        return self._decode()[len(self._shown) :]

    def _is_visible(self, token_id: int) -> bool:
        if token_id in self._hidden or not 0 <= token_id < 2**32:
            return False
        return self._backend.id_to_token(token_id) is not None

    def _decode(self) -> str:
        # Hidden ids never enter the window.
        return self._backend.decode(self._window, skip_special_tokens=False)

    def _start_window(self) -> None:
        self._num_shown = len(self._window)
        self._shown = self._decode()

    def _add(self, token_id: int) -> str:
        if token_id in self._bare and self._window and self._window[-1] in self._bare:
            return self._add_bare(token_id)
        self._window.append(token_id)
        text = self._decode()
        delta = text[len(self._shown) :]
        if (not delta or delta.endswith(REPLACEMENT)) and len(self._window) - self._num_shown < _MAX_PENDING_TOKENS:
            return ""
        del self._window[: self._num_shown]
        self._start_window()
        return delta

    def _add_bare(self, token_id: int) -> str:
        pending = self.flush()
        self._window.append(token_id)
        del self._window[: self._num_shown]
        self._start_window()
        return pending + self._bare[token_id]
