"""`bad_words` in texts and as token sequences, and special tokens with and without spaces between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.engine.sampling.token_texts import BadTexts, TokenTexts
from pdserve.models.model_folder import model_folder
from pdserve.text.bad_words import bad_words_token_ids
from pdserve.text.tokenization.tokenizer import Tokenizer

FAMILIES = ("byte_level", "byte_fallback", "metaspace_always", "metaspace_never", "word_piece", "no_decoder", "bundled")
PROMPT = [5]


def test_a_word_is_spelled_with_and_without_a_space(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        for word in ("cat", "  cat", "naïve", "🙂", "x +", "hello", "w1"):
            bare = word.lstrip()
            spelled = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, " " + bare)]
            assert bad_words_token_ids(tokenizer, (word,)) == tuple(dict.fromkeys(spelled))
    tokenizer = tokenizers["byte_level"]
    together = bad_words_token_ids(tokenizer, ("cat", "sat"))
    assert together == (*bad_words_token_ids(tokenizer, ("cat",)), *bad_words_token_ids(tokenizer, ("sat",)))
    assert len(bad_words_token_ids(tokenizer, ("cat", " cat"))) == 2


@pytest.fixture(scope="module")
def vocabularies(tokenizers: dict[str, Tokenizer], folders: dict[str, Path]) -> dict[str, tuple[Tokenizer, TokenTexts]]:
    """Tokenizer and texts of tokens by family."""
    bundled = model_folder("demo")
    known = [*((name, tokenizers[name], folders[name]) for name in tokenizers)]
    known.append(("bundled", Tokenizer.from_folder(bundled), bundled))
    read = (
        (name, tokenizer, TokenTexts.from_folder(folder, tokenizer.vocab_size)) for name, tokenizer, folder in known
    )
    return {name: (tokenizer, texts) for name, tokenizer, texts in read if texts is not None}


def whole_text(tokenizer: Tokenizer, ids: Sequence[int], **options: bool) -> str:
    detokenizer = tokenizer.detokenizer(PROMPT, **options)
    return detokenizer.add(ids) + detokenizer.flush()


def drawn_word(tokenizer: Tokenizer, random: Random) -> str:
    """A piece of a text of the tokenizer, of a character or more and of a token or more; without incomplete characters."""
    while True:
        text = whole_text(tokenizer, [random.randrange(tokenizer.vocab_size) for _ in range(random.randint(1, 4))])
        first = random.randrange(len(text) or 1)
        word = text[first : first + random.choice((1, 2, 3, 9))]
        if word and "\ufffd" not in word:
            return word


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_exactly_the_tokens_that_would_complete_a_word_are_forbidden(
    vocabularies: dict[str, tuple[Tokenizer, TokenTexts]], family: str
) -> None:
    tokenizer, texts = vocabularies[family]
    random, num_within = Random(family), 0
    tokens = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_token_ids]
    for _ in range(30):
        words = SamplingParams(bad_words=tuple(drawn_word(tokenizer, random) for _ in range(random.randint(1, 3))))
        bad = BadTexts(texts, words.bare_bad_words)
        output: list[int] = []
        for _ in range(8):
            forbidden = set(bad.forbidden_after(np.array(output, dtype=np.int64)).tolist())
            tried = tokens if len(tokens) < 500 else random.sample(tokens, 100) + sorted(forbidden)[:100]
            for token in tried:
                text = whole_text(tokenizer, [*output, token])
                assert any(word in text for word in words.bare_bad_words) == (token in forbidden), (output, token)
            allowed = [token for token in range(tokenizer.vocab_size) if token not in forbidden]
            if not allowed:
                break
            # often a token that a word may go on with
            begun = [token for token in allowed if _begins(whole_text(tokenizer, [*output, token]), words)]
            num_within += bool(begun)
            output.append(random.choice(begun if begun and random.random() < 0.7 else allowed))
            shown = whole_text(tokenizer, output, skip_special_tokens=True)
            assert not any(word in shown for word in words.bare_bad_words)
    assert num_within > 5


def _begins(text: str, params: SamplingParams) -> bool:
    return any(text.endswith(word[:size]) for word in params.bare_bad_words for size in range(1, len(word)))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_have_the_texts_that_the_detokenizer_gives(
    vocabularies: dict[str, tuple[Tokenizer, TokenTexts]], family: str
) -> None:
    tokenizer, texts = vocabularies[family]
    for token in range(tokenizer.vocab_size):
        piece = texts.tail(np.array([token]), 1000)
        if token in tokenizer.special_token_ids:
            assert piece == b""
        elif "\ufffd" not in (text := whole_text(tokenizer, [token], skip_special_tokens=False)):
            assert piece.decode() == text


def test_a_word_is_found_at_the_start_after_a_line_after_punctuation_and_over_tokens(
    vocabularies: dict[str, tuple[Tokenizer, TokenTexts]],
) -> None:
    tokenizer, texts = vocabularies["bundled"]
    bad = BadTexts(texts, ("Paris",))
    for before in ("", " ", "\n", "(", "in ", '"', "Pa", "ParParis"[:-1], "🙂"):
        for cut in range(1, 5):
            # spelled over tokens in every way that two texts give
            begun = tokenizer.encode(before + "Paris"[:cut], add_special_tokens=False)
            rest = tokenizer.encode("Paris"[cut:], add_special_tokens=False)
            if (whole_text(tokenizer, begun + rest)).count("Paris") != 1:
                continue
            after = [set(bad.forbidden_after(np.array(begun + rest[:num])).tolist()) for num in range(len(rest))]
            assert any(token in forbidden for token, forbidden in zip(rest, after, strict=True)), (before, cut)


def test_tokens_that_end_the_output_have_no_text(vocabularies: dict[str, tuple[Tokenizer, TokenTexts]]) -> None:
    tokenizer, texts = vocabularies["no_decoder"]
    [token] = tokenizer.encode("w1", add_special_tokens=False)
    none = np.zeros(0, np.int64)
    assert token in BadTexts(texts, ("w1",)).forbidden_after(none)
    assert token not in BadTexts(texts, ("w1",), ends=(token,)).forbidden_after(none)


NO_TOKENIZERS = ("[]", "{", '{"model": {"vocab": 5}}', '{"decoder": {"type": "Metaspace"}}')


@pytest.mark.parametrize("broken", NO_TOKENIZERS)
def test_a_tokenizer_that_is_none_is_refused_by_its_file(tmp_path: Path, broken: str) -> None:
    assert TokenTexts.from_folder(tmp_path, 5) is None
    (tmp_path / "tokenizer.json").write_text(broken)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        TokenTexts.from_folder(tmp_path, 5)


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
