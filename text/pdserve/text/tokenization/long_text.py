"""`LongText`: tokenizes a long text in parts, so that memory is proportional to a part and not to the text.

The library temporarily takes 150 to 350 bytes of memory per byte of a text: offsets, spellings, alignments. Byte-level BPE (GPT-2,
Llama 3, Qwen) first splits a text into words by a regular expression that looks ahead by one character and never back. A text can
therefore be cut before any word: the rest is tokenized as if it were a text of its own.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from pdserve.common.errors import InvalidRequest

PART_BYTES = 1 << 16
"""Largest text that is tokenized at once; a longer text is tokenized in parts."""
MAX_WORD_BYTES = 1 << 17
"""Largest run of text that the tokenizer does not split; its tokens depend on each other."""
_LOOK_AHEAD_BYTES = 64
"""More bytes than any known regular expression looks ahead, plus the beginning of one word."""
_LOOKS_BACK = ("(?<", r"\b", r"\B", r"\A", r"\G", r"\K")
_SAMPLE = "It's  12345 words,\n\n über-naïve 你好。世界 <b>'re</b>\t x_y  \r\n 🙂🙂  end \u0301a"


class LongText:
    """Tokenizes as `Tokenizer.encode` of the library does, without special tokens around the text. Safe from any thread."""

    def __init__(self, backend: Backend, *, normalizes: bool) -> None:
        """Call `of` instead, which checks the tokenizer."""
        self._backend = backend
        self._normalizes = normalizes
        added = backend.get_added_tokens_decoder()
        num_bytes = {token_id: len(token) for token, token_id in backend.get_vocab(with_added_tokens=False).items()}
        num_bytes |= {token_id: len(token.content.encode()) for token_id, token in added.items()}
        self._num_bytes = [num_bytes.get(token_id, 0) for token_id in range(max(num_bytes) + 1)]
        longest = max((len(token.content.encode()) for token in added.values()), default=0)
        self._margin_bytes = longest + _LOOK_AHEAD_BYTES
        # the library splits off these tokens before it normalizes the text between them
        contents = sorted((token.content for token in added.values() if not token.normalized), key=len, reverse=True)
        self._kept = re.compile(f"({'|'.join(map(re.escape, contents))})") if contents else None

    @classmethod
    def of(cls, backend: Backend, pre_tokenizer: Any, normalizer: Any) -> LongText | None:
        """The tokenizer's `LongText`; None if its words may depend on the text before them.

        pre_tokenizer, normalizer: objects of tokenizer.json.
        """
        model = backend.model
        if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
            return None
        if model.dropout or not _splits_ahead(pre_tokenizer):
            return None
        spelled = backend.get_vocab(with_added_tokens=False)
        if not all(char in spelled for char in pre_tokenizers.ByteLevel.alphabet()):
            return None
        if normalizer is not None and normalizer != {"type": "NFC"}:
            return None
        if any(
            token.lstrip or token.rstrip or token.single_word for token in backend.get_added_tokens_decoder().values()
        ):
            return None
        long_text = cls(backend, normalizes=normalizer is not None)
        return long_text if long_text._matches(_SAMPLE * 8) else None

    def encode(self, text: str, field: str, count: Callable[[int], None]) -> list[int]:
        """The text's token ids. Holds no GIL while the library works.

        field: the client's name of the text. count: gets the number of tokens so far after each part but the last; may raise.
        Raises: InvalidRequest for an unsplittable run that exceeds a limit between half of `MAX_WORD_BYTES` and `MAX_WORD_BYTES`.
        """
        return self._encode(self._normalized(text), field, count, PART_BYTES)

    def _normalized(self, text: str) -> str:
        """Normalize as the library does. Each part of the result is normalized, too."""
        if not self._normalizes or unicodedata.is_normalized("NFC", text):
            return text
        between = self._kept.split(text) if self._kept is not None else [text]
        between[::2] = (unicodedata.normalize("NFC", piece) for piece in between[::2])
        return "".join(between)

    def _encode(self, text: str, field: str, count: Callable[[int], None], part_bytes: int) -> list[int]:
        token_ids: list[int] = []
        at, num_chars = 0, part_bytes // 4
        while True:
            part = text[at : at + num_chars]
            ids, words = self._part(part)
            if at + len(part) >= len(text):
                return token_ids + ids
            data = part.encode()
            if sum(map(self._num_bytes.__getitem__, ids)) != len(data):
                # the library's normalizer may have another Unicode version
                return self._part(text)[0]
            num_ids, num_bytes = self._cut(ids, words, len(data))
            if num_bytes:
                token_ids += ids[:num_ids]
                at += len(data[:num_bytes].decode())
                num_chars = part_bytes // 4
                count(len(token_ids))
            elif 2 * len(data) > MAX_WORD_BYTES:
                raise InvalidRequest(
                    f"{field} has a run of more than {len(data)} bytes that the tokenizer does not split, such as one word "
                    "without a blank",
                    field,
                )
            else:
                num_chars *= 2

    def _part(self, part: str) -> tuple[list[int], list[int | None]]:
        """Token ids, and per token the number of its word."""
        encoding = self._backend.encode(part, add_special_tokens=False)
        return encoding.ids, encoding.word_ids

    def _cut(self, ids: list[int], words: list[int | None], num_bytes: int) -> tuple[int, int]:
        """(number of leading tokens of a part that no following text can change, their bytes); both 0 if there are none.

        num_bytes: bytes of the part.
        """
        dropped = 0
        for place in range(len(ids) - 1, 0, -1):
            dropped += self._num_bytes[ids[place]]
            if dropped >= self._margin_bytes and words[place] != words[place - 1]:
                return place, num_bytes - dropped
        return 0, 0

    def _matches(self, text: str) -> bool:
        """True if short parts of a text give the same tokens as the whole; most parts begin within a word."""
        whole = self._part(text)[0]
        text = self._normalized(text)
        least = self._margin_bytes
        return all(
            self._encode(text, "sample", lambda num_tokens: None, 4 * (least + more)) == whole
            for more in itertools.chain(range(1, 40), (100, 200))
        )


def _splits_ahead(pre_tokenizer: Any) -> bool:
    """True if words are found by a regular expression that only looks ahead, and no byte is lost."""
    if not isinstance(pre_tokenizer, dict):
        return False
    steps = pre_tokenizer.get("pretokenizers", []) if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    *before, last = steps or [{}]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") is not False:
        return False
    if last.get("use_regex", True):
        # GPT-2's regular expression, by itself or after a step that separates digits
        return all(step.get("type") == "Digits" and step.get("individual_digits") for step in before)
    return len(before) == 1 and _isolates_ahead(before[0])


def _isolates_ahead(step: Any) -> bool:
    pattern = step.get("pattern")
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    if step.get("type") != "Split" or step.get("behavior") != "Isolated" or step.get("invert") is not False:
        return False
    if not isinstance(expression, str) or any(part in expression for part in _LOOKS_BACK):
        return False
    # `^` as an anchor, not as the complement of a class
    return "^" not in expression.replace("[^", "")
