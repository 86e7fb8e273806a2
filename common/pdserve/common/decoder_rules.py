"""`DecoderRules`: the decoder of a tokenizer as a rule for each token, for tokenizers whose decoder works token by token."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_DIRECT_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's alphabet: printable bytes are their own characters, the others are U+0100 and up, in order."""
    rest = [byte for byte in range(256) if byte not in set(_DIRECT_BYTES)]
    return {chr(byte): byte for byte in _DIRECT_BYTES} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_LATIN_OF_CHAR = dict.fromkeys(range(256), 256) | {ord(char): byte for char, byte in _byte_alphabet().items()}
"""Code point -> that of the byte in Latin-1, and outside Latin-1 for characters that are not of the alphabet."""


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
                return token.translate(_LATIN_OF_CHAR).encode("latin-1")
            except UnicodeEncodeError:
                # an added token is plain text; the library makes the same distinction
                return token.encode()
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return token.encode()
