"""A text that cannot fit is refused before it is tokenized; one that would fit never is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pdserve.common.errors import PromptTooLong
from pdserve.models.model_folder import model_folder
from pdserve.text.prompt import ChatInput, LengthRule, Prompt, TextInput, encode_prompt
from pdserve.text.tokenization.tokenizer import Tokenizer

LONG_TOKEN = "你好世界 " * 5
WORDS = Regex(r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+|\p{L}+")
BOUNDED = ("checkpoint", "demo", "byte_level", "regex")


def load(folder: Path, backend: Backend) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def split(behavior: str) -> pre_tokenizers.PreTokenizer:
    """Byte level behind a regular expression, as Llama 3 and Qwen have it."""
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, behavior), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


@pytest.fixture(scope="module")
def bounded(
    tiny_checkpoints: Callable[..., Path], folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tokenizer]:
    backend = Backend.from_file(str(folders["byte_level"] / "tokenizer.json"))
    backend.pre_tokenizer = split("isolated")
    backend.add_tokens([LONG_TOKEN])
    return {
        "checkpoint": Tokenizer.from_folder(tiny_checkpoints("llama")),
        "demo": Tokenizer.from_folder(model_folder("demo")),
        "byte_level": Tokenizer.from_folder(folders["byte_level"]),
        "regex": load(tmp_path_factory.mktemp("regex"), backend),
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("name", BOUNDED)
@given(data=st.data())
def test_what_fits_is_never_refused(bounded: dict[str, Tokenizer], name: str, data: st.DataObject) -> None:
    tokenizer = bounded[name]
    ids = st.integers(0, tokenizer.vocab_size - 1)
    pieces = st.one_of(
        st.text(max_size=4),
        st.sampled_from([" ", "\n", "  ", LONG_TOKEN]),
        # the longest ones too, and special ones written out
        st.builds(lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False), ids),
    )
    repeated = st.builds(lambda piece, times: piece * times, pieces, st.integers(1, 20))
    text = "".join(data.draw(st.lists(repeated, min_size=1, max_size=8)))
    token_ids = tokenizer.encode(text, add_special_tokens=True)
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False)) <= len(token_ids)
    if text:
        for rule in (LengthRule(len(token_ids) + 1), LengthRule(len(token_ids) + 8, num_before=7)):
            assert encode_prompt(tokenizer, TextInput(text), "prompt", rule).token_ids == token_ids
        to_the_last = LengthRule(len(token_ids), has_output=False)
        assert encode_prompt(tokenizer, TextInput(text), "prompt", to_the_last).token_ids == token_ids


@pytest.mark.parametrize("name", BOUNDED)
def test_the_bound_is_the_longest_token(bounded: dict[str, Tokenizer], name: str) -> None:
    tokenizer = bounded[name]
    pieces = [tokenizer.token_piece(token_id) for token_id in range(tokenizer.vocab_size)]
    longest = max(map(len, pieces))
    assert tokenizer.least_tokens("x" * longest) == 1
    assert tokenizer.least_tokens("x" * (longest + 1)) == 2
    assert tokenizer.least_tokens("") == 0
    if name == "regex":
        assert longest == len(LONG_TOKEN.encode())
        assert len(tokenizer.encode(LONG_TOKEN * 9, add_special_tokens=False)) == 9
        assert tokenizer.least_tokens(LONG_TOKEN * 9) == 9


def test_a_text_that_cannot_fit_is_refused_by_name_value_and_limit(bounded: dict[str, Tokenizer]) -> None:
    tokenizer = bounded["demo"]
    longest = max(len(tokenizer.token_piece(token_id)) for token_id in range(tokenizer.vocab_size))
    text = "x" * (longest * 100)
    prompts: list[Prompt] = [TextInput(text), TextInput(text, add_special_tokens=False)]
    for prompt in prompts:
        with pytest.raises(PromptTooLong, match="text has at least 100 tokens; the model's length is 100") as caught:
            encode_prompt(tokenizer, prompt, "text", LengthRule(100))
        assert caught.value.field == "text"
        encode_prompt(tokenizer, prompt, "text", LengthRule(len(text) + 9))
    with pytest.raises(PromptTooLong, match="session has at least 101 tokens"):
        encode_prompt(tokenizer, prompts[1], "session", LengthRule(101, num_before=1))
    with pytest.raises(PromptTooLong, match=r"input has at least 100 tokens; the model's length is 99 tokens$"):
        encode_prompt(tokenizer, prompts[0], "input", LengthRule(99, has_output=False))
    chat = ChatInput([{"role": "user", "content": text}])
    with pytest.raises(PromptTooLong, match=r"messages has at least 10[0-9] tokens"):
        encode_prompt(tokenizer, chat, "messages", LengthRule(100))


def takes_spaces_along(backend: Backend) -> None:
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])


def strips(backend: Backend) -> None:
    backend.normalizer = normalizers.Strip()


def drops_what_it_splits_at(backend: Backend) -> None:
    backend.pre_tokenizer = split("removed")


def knows_few_bytes(backend: Backend) -> None:
    backend.model = models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])


def knows_few_bytes_by_one_name(backend: Backend) -> None:
    backend.model = models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True)


def is_no_byte_level(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (takes_spaces_along, " " * 999 + "<mask>"),
        (strips, " " * 999 + "a"),
        (drops_what_it_splits_at, "a" * 999 + "."),
        (knows_few_bytes, "c" * 999 + "a"),
        (knows_few_bytes_by_one_name, "c" * 999 + "a"),
        (is_no_byte_level, " " * 999 + "a"),
    ],
)
def test_nothing_is_claimed_where_a_text_may_vanish(
    tmp_path: Path, byte_level_backend: Backend, change: Callable[[Backend], None], text: str
) -> None:
    assert load(tmp_path, byte_level_backend).least_tokens(text) > 20
    change(byte_level_backend)
    tokenizer = load(tmp_path, byte_level_backend)
    assert len(tokenizer.encode(text, add_special_tokens=False)) <= 3
    assert tokenizer.least_tokens(text) == 0


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace_always", "metaspace_never", "word_piece", "no_decoder"])
def test_nothing_is_claimed_for_other_kinds(tokenizers: dict[str, Tokenizer], name: str) -> None:
    assert tokenizers[name].least_tokens("hello world " * 999) == 0
