"""Texts for tokenizers: pieces of Python's library, scripts of many kinds, random characters, and much white space."""

from __future__ import annotations

import random
import sysconfig
import unicodedata
from pathlib import Path

_SCRAPS = [
    "Grüße, crème brûlée — “quotes” … ½ ²", "中文字符和日本語かなカナ 한국어", "Привет עולם مرحبا हिन्दी",
    "emoji 😀👍🏽 \u200d\ufeff", "e\u0301 decomposed", "1 22 333 4444 55555.66 7,777,777", "I'll SHOUT: DON'T! camelCase",
    "\t\n \r\n  ", "  ", "<|im_start|>user\nHi<|im_end|>", "ΑΒΓ αβγ", "ไทย ภาษา", "İstanbul ǅ ŉ", "🇩🇪", "𝔘𝔫𝔦",
    "\u3000全角", "' 's't'RE", "$x+=~|^`", "naïve Straße!?", "<start_of_turn>user",
]  # fmt: skip
_RANGES = (range(32, 127), range(0x80, 0x2FFF), range(0x3000, 0xA000), range(0x1F300, 0x1FA00))
_SPARSE = " \n\t'.,!09aZéß中ж-_"


def varied_texts(count: int, seed: int = 0) -> list[str]:
    """The same for the same arguments, with one version of Python."""
    draw = random.Random(seed)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [_KINDS[number % len(_KINDS)](draw, files) for number in range(count)]


def _of_a_file(draw: random.Random, files: list[Path]) -> str:
    text = draw.choice(files).read_text(errors="replace")
    first = draw.randrange(max(1, len(text) - 400))
    return text[first : first + draw.randrange(1, 400)]


def _of_scraps(draw: random.Random, _: list[Path]) -> str:
    return draw.choice(["", " "]).join(draw.choice(_SCRAPS) for _ in range(draw.randrange(1, 8)))


def _of_any_characters(draw: random.Random, _: list[Path]) -> str:
    drawn = [chr(draw.choice(draw.choice(_RANGES))) for _ in range(draw.randrange(1, 60))]
    return "".join(char for char in drawn if unicodedata.category(char) not in ("Cs", "Cn", "Co"))


def _of_few_characters(draw: random.Random, _: list[Path]) -> str:
    return "".join(draw.choice(_SPARSE) for _ in range(draw.randrange(1, 40)))


_KINDS = (_of_a_file, _of_scraps, _of_any_characters, _of_few_characters)
