"""Largest number of bytes that one token can represent, which gives a lower bound of the tokens of a text."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

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
