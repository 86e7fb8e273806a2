"""Offsets of a prompt's tokens in its text, by each kind of tokenizer, as those of output tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers, processors

from pdserve.text.outputs.prompt_text import PromptText
from pdserve.text.prompt import TextInput
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.text.conftest import BUILDERS, byte_fallback, byte_level, save, word_piece

FAMILIES = sorted(BUILDERS)
SENTENCEPIECE = ["byte_fallback", "metaspace_always", "metaspace_never"]


def trimmed() -> Backend:
    """GPT-2's kind: offsets of the library leave out a token's spaces."""
    backend = byte_level()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return backend


def composed() -> Backend:
    """Qwen's kind: two characters of the text become one."""
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    return backend


def composed_and_trimmed() -> Backend:
    backend = trimmed()
    backend.normalizer = normalizers.NFC()
    return backend


def prepending() -> Backend:
    """Llama 2's kind, with its normalizer."""
    backend = byte_fallback()
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def lower_case() -> Backend:
    """BERT's kind: the text's case, accents and spaces are in no token."""
    backend = word_piece()
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return backend


CHANGING: dict[str, Callable[[], Backend]] = {
    "trimmed": trimmed,
    "composed": composed,
    "composed_and_trimmed": composed_and_trimmed,
    "prepending": prepending,
    "lower_case": lower_case,
}
TEXT = st.text(st.sampled_from("ab tx.,é😀你e\u0301\u0308Ａ \n"), max_size=24) | st.text(max_size=12)


@pytest.fixture(scope="module")
def every(tokenizers: dict[str, Tokenizer], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("changing")
    return tokenizers | {name: Tokenizer.from_folder(save(root / name, build())) for name, build in CHANGING.items()}


def of_client(tokenizer: Tokenizer, text: str, *, adds: bool = True) -> tuple[list[int], PromptText]:
    token_ids = tokenizer.encode(text, add_special_tokens=adds)
    return token_ids, PromptText.of_client(tokenizer, TextInput(text, adds), token_ids)


@pytest.mark.few(3)
@pytest.mark.parametrize("family", [*FAMILIES, *CHANGING])
@given(text=TEXT, adds=st.booleans())
@example(text="😀😀😀😀😀😀 x", adds=True)
def test_offsets_divide_the_text_in_order(every: dict[str, Tokenizer], family: str, text: str, adds: bool) -> None:
    token_ids, prompt = of_client(every[family], text, adds=adds)
    assert prompt.text == text
    assert len(prompt.offsets) == len(token_ids)
    assert prompt.offsets == sorted(prompt.offsets)
    assert all(0 <= offset <= len(text) for offset in prompt.offsets)
    assert prompt.offsets[:1] in ([], [0])


@pytest.mark.parametrize("family", ["byte_level", "trimmed", "composed"])
@given(text=TEXT, adds=st.booleans())
@example(text="😀😀😀😀😀😀 x", adds=True)
@example(text=" \n é\u0301😀 <s> x<tool é>▁plain", adds=True)
def test_each_token_begins_where_the_bytes_before_it_end(
    every: dict[str, Tokenizer], family: str, text: str, adds: bool
) -> None:
    tokenizer = every[family]
    token_ids, prompt = of_client(tokenizer, text, adds=adds)
    if tokenizer.decode(token_ids[tokenizer.added_around(token_ids)[0] if adds else 0 :]) != text:
        return  # the normalizer changed it
    places = [len(text[:offset].encode()) for offset in prompt.offsets]
    num_bytes = 0
    for token_id, place, added in zip(token_ids, places, range(len(token_ids)), strict=True):
        if adds and added < tokenizer.added_around(token_ids)[0]:
            assert place == 0
            continue
        # within a character the place is that of the character
        assert num_bytes - 4 < place <= num_bytes
        assert len(text.encode()[:num_bytes].decode(errors="ignore")) == len(text.encode()[:place].decode())
        num_bytes += len(tokenizer.token_piece(token_id))


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), hides=st.booleans())
def test_tokens_of_a_prompt_have_the_offsets_of_an_output(
    every: dict[str, Tokenizer], family: str, data: st.DataObject, hides: bool
) -> None:
    """A prompt of token ids, cut anywhere, within a character too: the text and the places do not depend on the cut."""
    tokenizer = every[family]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    cut = data.draw(st.integers(0, len(ids)))
    if family not in ("byte_level", *SENTENCEPIECE):
        cut = len(ids)  # these lose a character that a prompt began
    detokenizer = tokenizer.detokenizer(skip_special_tokens=hides)
    places, text = [], ""
    for token_id in ids:
        places.append(len(text))
        text += detokenizer.add([token_id])
    text += detokenizer.flush()
    prompt = PromptText.of_tokens(tokenizer, ids[:cut], hides_special_tokens=hides, ends=cut == len(ids))
    assert prompt.offsets == places[:cut]
    output = tokenizer.detokenizer(ids[:cut], skip_special_tokens=hides)
    assert prompt.text + (output.add(ids[cut:]) + output.flush() if cut < len(ids) else "") == text


def test_a_text_that_the_tokenizer_changed(every: dict[str, Tokenizer]) -> None:
    """The client's characters are counted, not those of the tokens."""
    token_ids, prompt = of_client(every["composed"], "e\u0301e\u0301x", adds=False)
    assert [prompt.text[begin:] for begin in prompt.offsets][-1] == "x"
    assert set(prompt.offsets) == {0, 2, 4}
    token_ids, prompt = of_client(every["lower_case"], "Hello,  WORLD")
    spelled = every["lower_case"].token_strings(token_ids)
    assert spelled == ["[CLS]", "hello", ",", "world", "[SEP]"]
    assert prompt.offsets == [0, 0, 5, 6, 13]


def test_added_special_tokens_have_no_characters(every: dict[str, Tokenizer], tmp_path: Path) -> None:
    around = byte_level()
    around.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = Tokenizer.from_folder(save(tmp_path / "around", around))
    for text in ("x", "<s>x", "x</s>", "<s></s>"):
        token_ids, prompt = of_client(tokenizer, text)
        assert prompt.offsets[1] == 0
        assert prompt.offsets[-1] == len(text)
        assert len(token_ids) == len(prompt.offsets)
