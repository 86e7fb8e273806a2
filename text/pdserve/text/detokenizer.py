"""`IncrementalDetokenizer` and its two implementations: text from token ids as they arrive.

`tokenizers.decoders.DecodeStream` would be the obvious choice. It raises when a byte-fallback run turns out malformed
after part of it was shown, and it never releases text that really ends in U+FFFD; a model can cause both.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from tokenizers import Tokenizer as Backend

from pdserve.text.token_bytes import TokenBytes

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_UTF8_MAX_BYTES = 4
_CONTEXT_TOKENS = 8
"""Prompt tokens a `WindowDetokenizer` starts from; more than any decoder looks back."""
_MAX_PENDING_TOKENS = 8
"""A character is at most four tokens; longer pending text is not incomplete but wrong, and is shown."""


class IncrementalDetokenizer(ABC):
    """The text of one sequence, as continuation of its prompt.

    Called by one stream, in order. The deltas of `add` and the final `flush` joined are the text of prompt and output
    together, less the prompt's: a first token that begins with a space keeps it when there is a prompt.
    """

    __slots__ = ()

    @abstractmethod
    def add(self, token_ids: Sequence[int]) -> str:
        """Append tokens; return the text that is now complete, never part of a character."""

    @abstractmethod
    def flush(self) -> str:
        """The sequence has ended: what was incomplete, as U+FFFD. Called at most once, last."""


class NoDetokenizer(IncrementalDetokenizer):
    """For a sequence whose client wants only token ids."""

    __slots__ = ()

    def add(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Decoding error handler: one U+FFFD a byte, which is how byte fallback shows what is not UTF-8."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("pdserve.replace_each_byte", _replace_each_byte)
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class ByteDetokenizer(IncrementalDetokenizer):
    """Looks up each token's bytes and decodes them as a stream: constant time per token, exact at any cut.

    Equal to decoding all ids at once, with one exception: where a run of byte-fallback tokens is not UTF-8, the library
    turns the whole run into U+FFFD; here characters that were complete, and perhaps sent already, remain.
    """

    __slots__ = ("_decoder", "_pieces", "_started", "_strip_left", "_token_bytes")

    def __init__(
        self, token_bytes: TokenBytes, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        rules = token_bytes.rules
        self._token_bytes = token_bytes
        self._pieces = token_bytes.table(skip_special_tokens)
        self._decoder = _Utf8Decoder("replace" if rules.byte_level else "pdserve.replace_each_byte")
        self._strip_left = rules.strip_count
        self._started = not (rules.strip_count or rules.first_token_drops)
        """True if the text's beginning, where leading spaces fall off, is behind us."""
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
        """Pass the text's beginning, and take over a character that the prompt's last tokens left incomplete."""
        for token_id in prompt_token_ids:
            if self._started:
                break
            self._add_first(token_id)
        self._decoder.reset()
        pieces = self._pieces
        shown = (piece for token_id in reversed(prompt_token_ids) if (piece := pieces[token_id]))
        self._decoder.decode(b"".join(reversed(list(islice(shown, _UTF8_MAX_BYTES - 1)))))


class WindowDetokenizer(IncrementalDetokenizer):
    """For any other decoder (WordPiece, none, ...): decodes the last few tokens twice and shows the difference.

    The window is what was shown last, so that the decoder sees the new tokens in their place, and what is new since.
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

        bare: token id -> its text, for those between which the decoder inserts nothing.
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
