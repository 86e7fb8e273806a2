"""The UTF-8 bytes of each token id, for tokenizers whose decoder works token by token, and the most bytes of any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from pdserve.common.decoder_rules import DecoderRules


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
