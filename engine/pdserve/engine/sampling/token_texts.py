"""`TokenTexts`: the text that each token of a model folder adds to an output, searchable by what it contains and begins with."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pdserve.common.decoder_rules import DecoderRules
from pdserve.common.errors import ConfigError
from pdserve.common.json_file import (
    MAX_TOKENIZER_BYTES,
    MAX_TOKENIZER_CONFIG_BYTES,
    read_json_object,
    read_regular_file,
)
from pdserve.engine.arrays import IntArray

_CLEANED = (
    *((f" {mark}", mark) for mark in ".?!,"), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"),
    (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
"""Replacements of WordPiece's `cleanup`."""
_KEY_BYTES = 8


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _TokenizerJson(msgspec.Struct):
    """The parts of tokenizer.json that the texts are made of."""

    model: _Model = msgspec.field(default_factory=_Model)
    added_tokens: list[_AddedToken] = []
    decoder: Any = None


class TokenTexts:
    """Immutable. Special tokens and unknown ids have no text."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """pieces: UTF-8 by token id; a piece may end within a character."""
        self._bytes = b"".join(pieces)
        self._array = np.frombuffer(self._bytes, np.uint8)
        self._ends: IntArray = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        self._begins: IntArray = np.concatenate([np.zeros(1, np.int64), self._ends[:-1]]) if pieces else self._ends
        self._longest = max(map(len, pieces), default=0)
        order = sorted(range(len(pieces)), key=pieces.__getitem__)
        self._order = np.array(order, dtype=np.int64)
        """Token ids in the order of their pieces."""
        self._keys = np.array([_key(pieces[token_id], b"\0") for token_id in order], dtype=np.uint64)

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int) -> TokenTexts | None:
        """None for a folder without a tokenizer. vocab_size: length of the model's logits.

        Raises: ConfigError for a tokenizer.json that cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        data = read_regular_file(path, MAX_TOKENIZER_BYTES)
        try:
            return cls(_pieces(msgspec.json.decode(data, type=_TokenizerJson), folder, vocab_size))
        except (msgspec.MsgspecError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            # the decoder's object is whatever the file has
            raise ConfigError(f"{path} is not a tokenizer: {error!s:.300}") from error

    def tail(self, token_ids: IntArray, num_bytes: int) -> bytes:
        """The last bytes of the tokens' text, at most `num_bytes`."""
        pieces: list[bytes] = []
        missing = num_bytes
        for token_id in token_ids[::-1].tolist():
            if missing <= 0:
                break
            if 0 <= token_id < len(self._ends):
                piece = self._bytes[self._begins[token_id] : self._ends[token_id]]
                pieces.append(piece)
                missing -= len(piece)
        return b"".join(reversed(pieces))[-num_bytes:] if num_bytes else b""

    def containing(self, text: bytes) -> IntArray:
        """The tokens whose text contains this one, which is not empty. A token may be named twice."""
        array, size = self._array, len(text)
        num = max(len(array) - size + 1, 0)
        is_place = array[:num] == text[0]
        if size > 1:
            is_place &= array[1 : num + 1] == text[1]
        places = np.flatnonzero(is_place)
        for offset, byte in enumerate(text[2:], 2):
            if not len(places):
                break
            places = places[array[places + offset] == byte]
        tokens = np.searchsorted(self._ends, places, side="right")
        within: IntArray = tokens[places + size <= self._ends[tokens]]
        return within

    def beginning_with(self, texts: Sequence[bytes]) -> list[slice]:
        """Places in `order` of the tokens whose text begins with each of these, which are not empty."""
        firsts = np.searchsorted(self._keys, np.array([_key(text, b"\0") for text in texts], np.uint64), side="left")
        pasts = np.searchsorted(self._keys, np.array([_key(text, b"\xff") for text in texts], np.uint64), side="right")
        return [self._within(*each) for each in zip(texts, firsts.tolist(), pasts.tolist(), strict=True)]

    def _within(self, text: bytes, first: int, past: int) -> slice:
        """The part of this part of `order` whose tokens begin with the text."""
        first = bisect.bisect_left(self._order, text, first, past, key=self._piece)
        past = bisect.bisect_left(
            self._order, True, first, past, key=lambda token_id: not self._piece(token_id).startswith(text)
        )
        return slice(first, past)

    @property
    def longest(self) -> int:
        """Bytes of the longest text of a token."""
        return self._longest

    @property
    def order(self) -> IntArray:
        """Token ids in the order of their texts."""
        return self._order

    def _piece(self, token_id: int) -> bytes:
        return self._bytes[self._begins[token_id] : self._ends[token_id]]


def _key(text: bytes, padding: bytes) -> int:
    """The first bytes of a text as a number, in the order of texts."""
    return int.from_bytes(text[:_KEY_BYTES].ljust(_KEY_BYTES, padding), "big")


class BadTexts:
    """Texts that an output must not contain, as tokens that would complete one of them."""

    def __init__(self, texts: TokenTexts, words: Sequence[str], ends: Sequence[int] = ()) -> None:
        """ends: tokens that end the output and so add no text to it."""
        wanted = dict.fromkeys(word.encode(errors="replace") for word in words)
        self._texts = texts
        self._ends = np.array(ends, dtype=np.int64)
        containing = np.concatenate([texts.containing(word) for word in wanted])
        self._always = self._without_ends(np.unique(containing))
        self._longest = max(map(len, wanted)) - 1
        """Bytes of the output that matter."""
        self._begun: dict[int, list[tuple[bytes, slice]]] = {}
        """Hash of a text's beginning -> the beginning, and the tokens that can complete the text, for each such text."""
        begun = [(word, size) for word in wanted for size in range(max(1, len(word) - texts.longest), len(word))]
        completing = texts.beginning_with([word[size:] for word, size in begun])
        for (word, size), tokens in zip(begun, completing, strict=True):
            if tokens.start < tokens.stop:
                self._begun.setdefault(hash(word[:size]), []).append((word[:size], tokens))

    def forbidden_after(self, output: IntArray) -> IntArray:
        """Token ids that would complete a text; some may be named twice."""
        tail = self._texts.tail(output, self._longest)
        found: set[tuple[int, int]] = set()
        for size in range(1, len(tail) + 1):
            end = tail[-size:]
            found.update((part.start, part.stop) for begun, part in self._begun.get(hash(end), ()) if begun == end)
        if not found:
            return self._always
        order = self._texts.order
        completing = np.concatenate([order[first:past] for first, past in found])
        return np.concatenate([self._always, self._without_ends(completing)])

    def _without_ends(self, token_ids: IntArray) -> IntArray:
        kept: IntArray = token_ids[~np.isin(token_ids, self._ends)] if len(self._ends) else token_ids
        return kept


def _pieces(read: _TokenizerJson, folder: Path, vocab_size: int) -> list[bytes]:
    vocab = read.model.vocab
    spelled = vocab if isinstance(vocab, dict) else {token: place for place, (token, _) in enumerate(vocab)}
    added = {token.id: (token.content, token.special) for token in read.added_tokens}
    for token_id, (content, special) in _declared_tokens(folder).items():
        added[token_id] = content, special or (token_id in added and added[token_id][1])
    by_id = {token_id: token for token, token_id in spelled.items()}
    by_id |= {token_id: "" if special else content for token_id, (content, special) in added.items()}
    piece_of = _piece_of(read.decoder)
    pieces = [b""] * vocab_size
    for token_id, token in by_id.items():
        if token and 0 <= token_id < vocab_size:
            pieces[token_id] = piece_of(token)
    return pieces


def _declared_tokens(folder: Path) -> dict[int, tuple[str, bool]]:
    """Tokens that tokenizer_config.json declares: id -> text, and whether it is special."""
    path = folder / "tokenizer_config.json"
    declared = (
        read_json_object(path, MAX_TOKENIZER_CONFIG_BYTES).get("added_tokens_decoder") if path.is_file() else None
    )
    found: dict[int, tuple[str, bool]] = {}
    for token_id, token in declared.items() if isinstance(declared, dict) else ():
        if token_id.isdecimal() and isinstance(token, dict) and isinstance(content := token.get("content"), str):
            found[int(token_id)] = content, bool(token.get("special"))
    return found


def _piece_of(decoder: Any) -> Callable[[str], bytes]:
    """The text of a token after others. decoder: the object of tokenizer.json."""
    if (rules := DecoderRules.of(decoder)) is not None:
        return rules.spell
    if decoder is None:
        return lambda token: f" {token}".encode(errors="replace")
    if isinstance(decoder, dict) and decoder.get("type") == "WordPiece":
        prefix, replaced = decoder.get("prefix", "##"), _CLEANED if decoder.get("cleanup", True) else ()
        return lambda token: _word_piece(token, prefix, replaced)
    return lambda token: token.encode(errors="replace")


def _word_piece(token: str, prefix: str, replaced: Sequence[tuple[str, str]]) -> bytes:
    text = token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"
    for before, after in replaced:
        text = text.replace(before, after)
    return text.encode(errors="replace")
