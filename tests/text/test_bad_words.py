"""`bad_words` as token sequences, and special tokens with and without spaces between them."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend

from pdserve.common.errors import InvalidRequest
from pdserve.text.bad_words import bad_words_token_ids
from pdserve.text.tokenization.tokenizer import Tokenizer


def test_a_word_is_refused_at_the_beginning_and_after_a_space(byte_level_tokenizer: Tokenizer) -> None:
    tokenizer = byte_level_tokenizer
    for word in ("cat", "  cat", "naïve", "🙂", "x +", "\n"):
        sequences = bad_words_token_ids(tokenizer, (word,))
        assert sequences[0] == tuple(tokenizer.encode(word.lstrip() or word, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + (word.lstrip() or word), add_special_tokens=False))
        # a spelling that begins with a token of its own for the space is found by its other tokens
        assert sequences[1:] == ((spaced,) if len(spaced) == len(sequences[0]) and spaced != sequences[0] else ())
    together = bad_words_token_ids(tokenizer, ("cat", "sat"))
    assert together == (*bad_words_token_ids(tokenizer, ("cat",)), *bad_words_token_ids(tokenizer, ("sat",)))
    assert any(len(bad_words_token_ids(tokenizer, (word,))) == 2 for word in ("cat", "sat", "the"))


def test_text_that_has_no_tokens_is_refused(byte_level_tokenizer: Tokenizer, tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match=r"bad_words\[1\] is not valid Unicode") as caught:
        bad_words_token_ids(byte_level_tokenizer, ("a", "\ud800"))
    assert caught.value.field == "bad_words"
    with pytest.raises(InvalidRequest, match=r"bad_words\[0\] is no token of this model"):
        bad_words_token_ids(tokenizers["byte_fallback"], ("",))


def text_of(tokenizer: Tokenizer, ids: list[int], **options: bool) -> str:
    detokenizer = tokenizer.detokenizer([3], **options)
    return "".join([detokenizer.add([token_id]) for token_id in ids]) + detokenizer.flush()


def test_spaces_between_special_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["word_piece"]
    ids = [1, 2, 3, 5, 2, 2, 1, 4]
    every = text_of(tokenizer, ids, skip_special_tokens=False)
    assert every == " [CLS] [SEP] hello##ly [SEP] [SEP] [CLS] world".replace("##", "")
    none = text_of(tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert none == " [CLS][SEP] helloly [SEP][SEP][CLS] world"
    assert text_of(tokenizer, ids, spaces_between_special_tokens=False) == text_of(tokenizer, ids) == " helloly world"


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback", "metaspace_always", "metaspace_never"])
def test_tokenizers_without_spaces_between_tokens_are_as_they_were(
    tokenizers: dict[str, Tokenizer], family: str
) -> None:
    ids = [1, 2, 2, 8, 1, 0]
    backend: Backend = tokenizers[family]._backend
    for spaces in (True, False):
        options = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
        whole = backend.decode([3, *ids], skip_special_tokens=False)
        assert backend.decode([3], skip_special_tokens=False) + text_of(tokenizers[family], ids, **options) == whole
