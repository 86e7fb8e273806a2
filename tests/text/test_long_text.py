"""A long text is tokenized in parts: to the same tokens, in memory that does not grow with it, and only as far as it is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from pdserve.common.errors import InvalidRequest, PromptTooLong
from pdserve.models.model_folder import model_folder
from pdserve.text.prompt import ChatInput, LengthRule, TextInput, encode_prompt
from pdserve.text.tokenization.long_text import MAX_WORD_BYTES, LongText
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.run.process_memory import MemoryWatch

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LONG_SPECIAL = "<|a special token that is longer than most words, with blanks|>"
SPECIAL = AddedToken("<|im_x>", special=True, normalized=False)
NORMAL = AddedToken("<é>", normalized=True)
MAX_GROWN_BYTES = 64 << 20
TEXT_BYTES = 2 << 20
"""`max_request_bytes` of a model of 131072 tokens."""
PIECES = [
    *("a", "b", " ", "  ", "\n", "\r\n", "\t", "'s", "'ll", "12", "345", "!", "?!", "ABC", "the ", " \n"),
    *("é", "e\u0301", "\u0338", "\u0301", "你好", "。", "🙂", "\u200d", "İ", "\u00a0", "\u3000", "٣"),
    *("<|im_x>", "<|im_", "<é>", "<e\u0301>", LONG_SPECIAL, LONG_SPECIAL[:40], LONG_SPECIAL[40:]),
    *(char * 90 for char in "x 9\n!"),
]


def split(expression: str, behavior: str = "isolated") -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), behavior),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def backend(
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
    normalizer: normalizers.Normalizer | None = None,
    added: tuple[str | AddedToken, ...] = (),
) -> Backend:
    """The bundled model's vocabulary, split like this."""
    made = Backend.from_file(str(model_folder("demo") / "tokenizer.json"))
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_tokens(list(added))
    return made


def long_text(made: Backend) -> LongText | None:
    parts = json.loads(made.to_str())
    return LongText.of(made, parts["pre_tokenizer"], parts["normalizer"])


KNOWN = {
    "demo": backend(),
    "gpt 2": backend(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama 3": backend(split(LLAMA_3), added=(LONG_SPECIAL, "  ", " \n")),
    "qwen": backend(split(LLAMA_3.replace("{1,3}", "")), normalizers.NFC(), (SPECIAL, NORMAL)),
    "single digits": backend(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ),
}
IN_PARTS = {name: long_text(made) for name, made in KNOWN.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=40)
@given(data=st.data())
def test_parts_give_what_the_whole_gives(name: str, data: st.DataObject) -> None:
    in_parts = IN_PARTS[name]
    assert in_parts is not None
    pieces = st.builds(lambda piece, times: piece * times, st.sampled_from(PIECES), st.integers(1, 4))
    text = "".join(data.draw(st.lists(pieces, min_size=20, max_size=120)))
    whole = KNOWN[name].encode(text, add_special_tokens=False).ids
    counts: list[int] = []
    least = 4 * (in_parts._margin_bytes + 1)
    part_bytes = data.draw(st.integers(least, 2 * least))
    assert in_parts._encode(in_parts._normalized(text), "prompt", counts.append, part_bytes) == whole
    assert counts == sorted(counts)
    assert not counts or counts[-1] <= len(whole)


@pytest.mark.parametrize(
    "made",
    [
        backend(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        backend(split(rf"(?<=a)b|{LLAMA_3}")),
        backend(split(rf"^a|{LLAMA_3}")),
        backend(split(LLAMA_3, "merged_with_next")),
        backend(split(LLAMA_3), normalizers.NFKC()),
        backend(split(LLAMA_3), added=(AddedToken("<x>", lstrip=True),)),
        backend(split(LLAMA_3), added=(AddedToken("word", single_word=True),)),
        backend(pre_tokenizers.Metaspace()),
    ],
    ids=["prefix", "look behind", "anchor", "merged", "nfkc", "strips", "single word", "metaspace"],
)
def test_a_tokenizer_whose_words_depend_on_what_is_before_them_gets_the_whole(made: Backend) -> None:
    assert long_text(made) is None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With a token of 128 blanks, as many have: no text within a body's limit is long enough to be refused unseen."""
    made = backend(split(LLAMA_3), added=(" " * 128,))
    made.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    folder = tmp_path_factory.mktemp("long") / "model"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return Tokenizer.from_folder(folder)


WORST = {
    "words": "zq xv " * (TEXT_BYTES // 6),
    "signs": "! " * (TEXT_BYTES // 2),
    "characters of three bytes": "龘。" * (TEXT_BYTES // 6),
    "characters of four bytes": "🜁a" * (TEXT_BYTES // 5),
    "one word": "a" * TEXT_BYTES,
}


@pytest.mark.few(2)
@pytest.mark.diagonal
@pytest.mark.parametrize("text", WORST.values(), ids=WORST)
@pytest.mark.parametrize("kind", ["text", "chat"])
def test_what_is_too_long_ends_as_soon_as_that_is_known(tokenizer: Tokenizer, kind: str, text: str) -> None:
    prompt = TextInput(text) if kind == "text" else ChatInput([{"role": "user", "content": text}])
    with MemoryWatch() as watch, pytest.raises(InvalidRequest) as caught:
        encode_prompt(tokenizer, prompt, "prompt", LengthRule(131_072))
    assert caught.value.field == "prompt"
    if isinstance(caught.value, PromptTooLong):
        assert "at least 1" in caught.value.message
    else:
        found = re.search(r"a run of more than (\d+) bytes that the tokenizer does not split", caught.value.message)
        assert found is not None, caught.value.message
        assert MAX_WORD_BYTES // 2 < int(found[1]) <= MAX_WORD_BYTES
    assert watch.grown_bytes < MAX_GROWN_BYTES


def test_what_fits_is_tokenized_as_it_always_was(tokenizer: Tokenizer) -> None:
    text = "".join(f"Sentence {number} of a long text, und noch ein Wort: 你好。\n" for number in range(4000))
    whole = tokenizer.encode(text, add_special_tokens=True)
    assert encode_prompt(tokenizer, TextInput(text), "prompt", LengthRule(len(whole) + 1)).token_ids == whole
    assert (whole[0], whole[-1]) == (1, 2)
    with pytest.raises(PromptTooLong):
        encode_prompt(tokenizer, TextInput(text), "prompt", LengthRule(len(whole) // 2))


def test_few_tokens_of_many_bytes_fit_in_bounded_memory(tokenizer: Tokenizer) -> None:
    with MemoryWatch() as watch:
        encoded = encode_prompt(tokenizer, TextInput(" " * TEXT_BYTES), "prompt", LengthRule(131_072))
    assert len(encoded.token_ids) == 2 + TEXT_BYTES // 128
    assert watch.grown_bytes < MAX_GROWN_BYTES


def test_a_folder_is_asked_for_both_objects(tmp_path: Path) -> None:
    """A normalizer that is not looked at would let parts be tokenized that are not those of the whole."""
    made = backend(split(LLAMA_3), normalizers.Lowercase())
    made.save(str(tmp_path / "tokenizer.json"))
    text = "ABC def " * 20_000
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode(text, add_special_tokens=False, count=lambda num_tokens: None) == made.encode(text).ids
