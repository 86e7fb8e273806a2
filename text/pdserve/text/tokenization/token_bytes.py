"""The UTF-8 bytes of each token id, for tokenizers whose decoder works token by token, and the most bytes of any."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_DIRECT_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's alphabet: printable bytes are their own characters, the others are U+0100 and up, in order."""
    rest = [byte for byte in range(256) if byte not in set(_DIRECT_BYTES)]
    return {chr(byte): byte for byte in _DIRECT_BYTES} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF_CHAR = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """A decoder of tokenizer.json as rules per token."""

    byte_level: bool = False
    """Tokens are spelled in the byte alphabet; the fields below are then unused."""
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    """`<0x41>` represents a byte."""
    strip_char: str = ""
    strip_count: int = 0
    """Number of `strip_char` removed from the front of the whole text."""
    first_token_drops: str = ""
    """Character that is dropped from the first token and a space in other tokens (Metaspace)."""

    @classmethod
    def of(cls, decoder: Any) -> DecoderRules | None:
        """Rules of the `decoder` object of a tokenizer.json; None for a decoder that does not work token by token.

        Supported: ByteLevel (GPT-2, Llama 3, Qwen); Replace, ByteFallback, Fuse, Strip in this order (Llama 2, Mistral, Gemma);
        Metaspace (Unigram models).
        """
        if not isinstance(decoder, dict):
            return None
        steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
        kinds = [step.get("type") for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(byte_level=True)
        if kinds == ["Metaspace"]:
            mark = steps[0]["replacement"]
            scheme = steps[0].get("prepend_scheme", "always")
            return cls(replacements=((mark, " "),), first_token_drops="" if scheme == "never" else mark)
        if re.fullmatch(r"(Replace )+(ByteFallback )?(Fuse (Strip )?)?", "".join(f"{k} " for k in kinds)):
            return cls._of_sentencepiece(steps)
        return None

    @classmethod
    def _of_sentencepiece(cls, steps: list[dict[str, Any]]) -> DecoderRules | None:
        replacements = [(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"]
        none: dict[str, Any] = {"content": "", "start": 0, "stop": 0}
        strip = steps[-1] if steps[-1]["type"] == "Strip" else none
        if strip["stop"] or any(pattern is None for pattern, _ in replacements):
            return None
        return cls(
            replacements=tuple(replacements),
            byte_fallback=any(step["type"] == "ByteFallback" for step in steps),
            strip_char=strip["content"],
            strip_count=strip["start"],
        )

    def spell(self, token: str) -> bytes:
        """The bytes of a token that is not the first of its text."""
        if self.byte_level:
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in token])
            except KeyError:
                # an added token is plain text; the library makes the same distinction
                return token.encode()
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return token.encode()


class PieceTable(dict[int, bytes]):
    """Token id -> bytes, computed on first use; empty for hidden or unknown ids."""

    def __init__(self, token_of: Callable[[int], str | None], rules: DecoderRules, hidden: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(hidden, b""))
        self._token_of = token_of
        self._rules = rules

    def __missing__(self, token_id: int) -> bytes:
        try:
            token = self._token_of(token_id)
        except OverflowError:
            token = None
        if token is None:
            # not stored: invalid ids from a worker must not fill the table
            return b""
        piece = self[token_id] = self._rules.spell(token)
        return piece


class TokenBytes:
    """Bytes of one tokenizer's tokens, with and without special tokens. Shared by all streams and threads."""

    def __init__(self, backend: Backend, rules: DecoderRules, special_token_ids: frozenset[int]) -> None:
        self.rules = rules
        self._token_of = backend.id_to_token
        self._all = PieceTable(backend.id_to_token, rules, frozenset())
        self._visible = PieceTable(backend.id_to_token, rules, special_token_ids)

    def table(self, skip_special_tokens: bool) -> PieceTable:
        return self._visible if skip_special_tokens else self._all

    def first_piece(self, token_id: int) -> bytes:
        """The bytes of a known token when it is the first of its text."""
        token = self._token_of(token_id) or ""
        if self.rules.first_token_drops:
            token = token.replace(self.rules.first_token_drops, "")
        return self.rules.spell(token)


_KEEP_EVERY_BYTE = ("ByteLevel", "Digits", "Split")


def longest_token_bytes(backend: Backend, pre_tokenizer: Any) -> int | None:
    """Largest number of UTF-8 bytes that become one token; None if the tokenizer may drop bytes or has tokens without a limit.

    Known for byte-level BPE (GPT-2, Llama 3, Qwen): each byte of a text is one character for the model, and belongs to exactly one
    token; a post-processor may add tokens. pre_tokenizer: the object of tokenizer.json.
    """
    model = backend.model
    if backend.normalizer is not None or not isinstance(model, models.BPE) or not _is_byte_level(pre_tokenizer):
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    spelled = backend.get_vocab(with_added_tokens=False)
    if not all(char in spelled for char in pre_tokenizers.ByteLevel.alphabet()):
        return None  # the model drops characters that it cannot spell, or makes one unknown token of many
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # such a token includes any number of adjacent spaces
    return max(*map(len, spelled), *(len(token.content.encode()) for token in added), 1)


def _is_byte_level(pre_tokenizer: Any) -> bool:
    """True if it spells every byte and drops none."""
    if not isinstance(pre_tokenizer, dict):
        return False
    steps = pre_tokenizer.get("pretokenizers", []) if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    kinds = [step.get("type") for step in steps]
    return (
        "ByteLevel" in kinds
        and all(kind in _KEEP_EVERY_BYTE for kind in kinds)
        and not any(step.get("behavior") == "Removed" for step in steps)
    )
