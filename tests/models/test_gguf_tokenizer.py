"""Tokenizers from the metadata of GGUF files: the ids of the tokenizer that the metadata were written from."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import AddedToken, SentencePieceBPETokenizer, Tokenizer

from pdserve.common.errors import UnsupportedModel
from pdserve.models.gguf.gguf_tokenizer import GgufTokenizer
from pdserve.models.json_object import JsonObject
from tests.support.models.checkpoints import CHAT_TEMPLATE, SPECIAL_TOKENS, tiny_tokenizer
from tests.support.models.gguf_checkpoints import byte_pair_metadata

TEXTS = [
    "",
    " ",
    "The miller's daughter walked to the river",
    "  two spaces,   three; a tab\tand lines\n\n  of all kinds\r\n",
    "1 22 333 4444 55555.66 7,777,777",
    "I'll SHOUT: DON'T! camelCase, snake_case && <tags/> $x+=~|^`",
    "Grüße, crème brûlée — “quotes” … ½ ²",
    "中文字符和日本語かなカナ 한국어 Привет עולם مرحبا हिन्दी",
    "emoji 😀👍🏽 and \u200d\ufeff marks",
    "<|im_start|>user\nHello<|im_end|>",
    "e\u0301 decomposed, \u0000 zero",
]
_TRAINING = [
    " ".join(TEXTS),
    "She counted the boats: one, two, three, ten, twelve. " * 3,
    "and the river the river",
] * 4


def metadata(keys: dict[str, Any]) -> JsonObject:
    return JsonObject(
        {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in keys.items()}, "model.gguf"
    )


def made(keys: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(GgufTokenizer(metadata(keys)).tokenizer_json())


@pytest.mark.parametrize("text", TEXTS)
def test_byte_pairs(text: str) -> None:
    source = Tokenizer.from_str(tiny_tokenizer())
    found = made(byte_pair_metadata(tiny_tokenizer()))
    assert found.encode(text).ids == source.encode(text).ids
    assert found.decode(found.encode(text).ids) == source.decode(source.encode(text).ids)


SENTENCE = "I'LL pay 1234 for\n\n  it's naïve Straße!? ok..."
PIECES = {
    "gpt-2": "I|'|LL| pay| 1234| for|\n\n | it|'s| naïve| Straße|!?| ok|...",
    "smollm": "I|'|LL| pay| |1|2|3|4| for|\n\n | it|'s| naïve| Straße|!?| ok|...",
    "qwen2": "I|'LL| pay| |1|2|3|4| for|\n\n| | it|'s| naïve| Straße|!?| ok|...",
    "llama-bpe": "I|'LL| pay| |123|4| for|\n\n| | it|'s| naïve| Straße|!?| ok|...",
    "gpt-4o": "I'LL| pay| |123|4| for|\n\n| | it's| naïve| Straße|!?| ok|...",
    "tekken": "I|'LL| pay| |1|2|3|4| for|\n\n| | it|'s| naïve| Straße|!?| ok|...",
    "default": "I|'|LL| pay| |123|4| for|\n\n | it|'|s| naïve| Straße|!?| ok|...",
    "falcon": "I|'|LL| pay| |123|4| for|\n\n | it|'|s| naïve| Straße|!?| ok|...",
    "deepseek-coder": "I|'|LL| pay| |1|2|3|4| for|\n|\n| | it|'|s| naïve| Straße|!?| ok|...",
    "deepseek-v3": "I|'LL| pay| |123|4| for|\n\n| | it|'s| naïve| Straße|!?| ok|...",
}
"""llama.cpp's name -> pieces of the sentence, as the tokenizers of the models that have these names divide it."""


@pytest.mark.parametrize("pre", PIECES)
def test_a_named_pre_tokenizer_divides_as_its_models_do(pre: str) -> None:
    tokenizer = made(byte_pair_metadata(tiny_tokenizer(), pre))
    found = tokenizer.pre_tokenizer.pre_tokenize_str(SENTENCE)
    data = SENTENCE.encode()
    assert [data.decode()[slice(*place)] for _, place in found] == PIECES[pre].split("|")


def test_digits_are_divided_where_the_name_says_so() -> None:
    """transformers ignores the name, and joins what such a model has never seen joined."""
    tokens = [*"Ġ0123456789ab", "12", "ab"]
    keys = {"model": "gpt2", "tokens": tokens, "merges": ["1 2", "a b"]}
    assert made(keys | {"pre": "gpt-2"}).encode("ab12").tokens == ["ab", "12"]
    assert made(keys | {"pre": "smollm"}).encode("ab12").tokens == ["ab", "1", "2"]


def pieces_by_score(text: str, scores: dict[str, float], *, adds_space: bool) -> list[str]:
    """What SentencePiece does: of all neighbours that make a token, those with the best are joined, the first of several."""
    pieces = list((f" {text}" if adds_space and text else text).replace(" ", "\u2581"))
    while True:
        joined = [(scores[a + b], -place) for place, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not joined:
            return pieces
        place = -max(joined)[1]
        pieces[place : place + 2] = ["".join(pieces[place : place + 2])]


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentence_pieces(adds_space: bool) -> None:
    source = SentencePieceBPETokenizer(add_prefix_space=adds_space)
    source.train_from_iterator(_TRAINING, 400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    parsed = json.loads(source.to_str())
    vocab, merges = parsed["model"]["vocab"], [tuple(merge) for merge in parsed["model"]["merges"]]
    tokens = sorted(vocab, key=lambda token: vocab[token])
    rank = {first + second: place for place, (first, second) in enumerate(merges)}
    tokens += [f"<0x{byte:02X}>" for byte in range(256)] + ["  ", "<tag>"]
    types = [2, 3, 3, *[1] * (len(vocab) - 3), *[6] * 256, 4, 4]
    scores = [
        float(-rank.get(token, len(merges))) if kind == 1 else 0.0 for token, kind in zip(tokens, types, strict=True)
    ]
    keys = {
        "model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "add_space_prefix": adds_space,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    found = made(keys)
    best = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == 1}
    for text in TEXTS:
        if "  " in text or "<" in text or not set(text.replace(" ", "\u2581")) <= set(best):
            continue
        expected = [tokens.index(piece) for piece in pieces_by_score(text, best, adds_space=adds_space)]
        assert found.encode(text).ids == [1, *expected], text
    # bytes of what is in no token, tokens that users defined, and no control token from text that spells its pieces
    assert found.encode("\u4e0e", add_special_tokens=False).tokens[-3:] == ["<0xE4>", "<0xB8>", "<0x8E>"]
    assert "  " in found.encode("a  b").tokens
    assert "<tag>" in found.encode("a<tag>b").tokens
    for text in TEXTS[2:]:
        # as in llama.cpp, text after a token that a user defined begins as a text does
        if "  " not in text or not adds_space:
            assert found.decode(found.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text
    without = made(keys | {"add_bos_token": False, "add_eos_token": True})
    assert without.encode("the").ids[-1] == 2
    assert without.encode("the").ids[0] != 1


@pytest.mark.parametrize(
    ("pieces", "scores", "message"),
    [
        (
            ["a", "b", "c", "ab", "bc"],
            [-4, -5, -6, -1, -1],
            "tokenizer.ggml.scores has -1 for 'ab' and 'bc'; read are scores",
        ),
        (
            ["a", "b", "ab", "abc"],
            [-4, -5, -1, -2],
            "tokenizer.ggml.tokens has 'abc' and not 'c'; a SentencePiece vocabulary",
        ),
    ],
)
def test_pieces_that_llama_cpp_joins_by_other_rules_are_refused(
    pieces: list[str], scores: list[int], message: str
) -> None:
    keys = {
        "model": "llama", "tokens": ["<unk>", "<s>", *pieces], "token_type": [2, 3] + [1] * len(pieces),
        "scores": [0.0, 0.0, *map(float, scores)], "bos_token_id": 1,
    }  # fmt: skip
    with pytest.raises(UnsupportedModel, match=message):
        made(keys)
    # a user's tokens are found in a text before all others
    assert made(keys | {"token_type": [2, 3] + [4] * len(pieces)}).encode("ab", add_special_tokens=False).tokens


def test_named_tokens_templates_and_ends() -> None:
    keys = byte_pair_metadata(tiny_tokenizer()) | {
        "bos_token_id": 0, "eos_token_id": 0, "unknown_token_id": 2**32 - 1, "tokenizer.chat_template": CHAT_TEMPLATE,
        "general.sampling.temp": 0.6, "general.sampling.top_k": 20,
    }  # fmt: skip
    tokenizer = GgufTokenizer(metadata(keys))
    assert tokenizer.tokenizer_config() == {
        "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    # the file names one end, and the model writes the other
    assert tokenizer.generation_config() == {
        "bos_token_id": 0, "eos_token_id": [0, SPECIAL_TOKENS.index("<|im_end|>")], "temperature": 0.6, "top_k": 20,
    }  # fmt: skip
    several = keys | {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    assert GgufTokenizer(metadata(several)).tokenizer_config()["chat_template"] == [
        {"name": "default", "template": CHAT_TEMPLATE},
        {"name": "tool_use", "template": "tools"},
    ]


def test_special_tokens_of_phi_take_the_spaces_that_follow() -> None:
    source = Tokenizer.from_str(tiny_tokenizer())
    source.add_special_tokens([AddedToken("<|user|>")])
    keys = byte_pair_metadata(source.to_str())
    ids = [source.token_to_id(token) for token in ("<|user|>", "Ċ", "a")]
    for name, expected in (("Phi-3 mini", ids[::2]), ("other", ids)):
        assert made(keys | {"general.name": name}).encode("<|user|>\na").ids == expected
