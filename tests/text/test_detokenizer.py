"""Deltas joined are the text of all ids at once, for any ids, any cut and every decoder family."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from pdserve.common.decoder_rules import DecoderRules
from pdserve.text.outputs.detokenizer import ByteDetokenizer, WindowDetokenizer
from pdserve.text.tokenization.tokenizer import Tokenizer

FFFD = "\ufffd"
IDS = st.lists(st.integers(0, 400), max_size=24)
EXACT = ["byte_level", "metaspace_always", "metaspace_never"]


def stream(tokenizer: Tokenizer, ids: list[int], *, prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt or [], skip_special_tokens=skip)
    return [*(detokenizer.add([token_id]) for token_id in ids), detokenizer.flush()]


def backend_of(tokenizer: Tokenizer) -> Backend:
    return tokenizer._backend


@pytest.mark.parametrize("family", EXACT)
@given(data=st.data(), skip=st.booleans())
def test_random_ids_in_random_pieces(
    tokenizers: dict[str, Tokenizer], family: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = tokenizers[family]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=24))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    text = "".join([detokenizer.add(piece) for piece in pieces]) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=30))
@example(text="e\u0301 नमस्ते 👩‍👩‍👧‍👦 🇫🇷 \ufffd 你好\n")
def test_any_unicode_survives_and_no_half_character_is_shown(byte_level_tokenizer: Tokenizer, text: str) -> None:
    ids = byte_level_tokenizer.encode(text, add_special_tokens=False)
    deltas = stream(byte_level_tokenizer, ids)
    assert "".join(deltas) == text
    assert sum(delta.count(FFFD) for delta in deltas) == text.count(FFFD)


@given(ids=IDS, prompt=IDS, skip=st.booleans())
def test_output_continues_its_prompt(
    byte_level_tokenizer: Tokenizer, ids: list[int], prompt: list[int], skip: bool
) -> None:
    before = "".join(stream(byte_level_tokenizer, prompt, skip=skip)[:-1])
    after = "".join(stream(byte_level_tokenizer, ids, prompt=prompt, skip=skip))
    assert before + after == byte_level_tokenizer.decode(prompt + ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", ["byte_fallback", "metaspace_always"])
@given(data=st.data())
def test_spaces_after_a_prompt(tokenizers: dict[str, Tokenizer], family: str, data: st.DataObject) -> None:
    tokenizer = tokenizers[family]
    # Without the byte tokens, so that the library's decoding is the reference.
    ids = st.lists(st.sampled_from([i for i in range(tokenizer.vocab_size) if not 3 <= i < 259 or "meta" in family]))
    prompt, output = data.draw(ids), data.draw(ids)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=True)
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    assert before + "".join(stream(tokenizer, output, prompt=prompt)) == whole
    assert "".join(stream(tokenizer, output)) == tokenizer.decode(output, skip_special_tokens=True)


def test_leading_space_is_kept_only_after_a_visible_prompt(tokenizers: dict[str, Tokenizer]) -> None:
    llama = tokenizers["byte_fallback"]
    bos, space_a = llama.bos_token_id, llama._backend.token_to_id("▁a")
    assert bos is not None
    assert space_a is not None
    assert stream(llama, [space_a]) == ["a", ""]
    assert stream(llama, [space_a], prompt=[bos]) == ["a", ""]
    assert stream(llama, [space_a], prompt=[bos, space_a]) == [" a", ""]
    # BOS is visible here, and the text begins with it.
    assert stream(llama, [space_a], prompt=[bos], skip=False) == [" a", ""]


def test_more_than_one_leading_space_can_be_stripped(tmp_path: Path, folders: dict[str, Path]) -> None:
    content = json.loads((folders["byte_fallback"] / "tokenizer.json").read_text())
    content["decoder"]["decoders"][-1]["start"] = 2
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert isinstance(tokenizer.detokenizer(), ByteDetokenizer)
    space, space_a = (backend_of(tokenizer).token_to_id(token) for token in ("▁", "▁a"))
    assert space is not None
    assert space_a is not None
    for ids in ([space, space, space_a], [space, space_a, space], [space_a, space_a], [260, space, space_a]):
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)
    assert stream(tokenizer, [space_a], prompt=[space]) == ["a", ""]


def byte_tokens(data: bytes) -> list[int]:
    return [3 + byte for byte in data]


def lossy(run: bytes) -> str:
    """UTF-8 as far as it is, one U+FFFD for each other byte."""
    return run.decode("utf-8", "pdserve.replace_each_byte")


@given(
    parts=st.lists(
        st.one_of(
            st.text(max_size=3).map(lambda text: byte_tokens(text.encode())),
            st.binary(max_size=4).map(byte_tokens),
            st.lists(st.integers(0, 300), max_size=3),
        ),
        max_size=8,
    ),
    skip=st.booleans(),
)
def test_byte_fallback(tokenizers: dict[str, Tokenizer], parts: list[list[int]], skip: bool) -> None:
    tokenizer = tokenizers["byte_fallback"]
    ids = [token_id for part in parts for token_id in part]
    runs: list[str] = []
    run = b""
    tokens = [t for i in ids if (t := backend_of(tokenizer).id_to_token(i)) and not (skip and 0 <= i < 3)]
    for token in tokens:
        if match := re.fullmatch("<0x(..)>", token):
            run += bytes.fromhex(match[1])
        else:
            runs += [lossy(run), token.replace("▁", " ")]
            run = b""
    text = "".join([*runs, lossy(run)])
    assert "".join(stream(tokenizer, ids, skip=skip)) == text.removeprefix(" ")


@given(text=st.text(max_size=12))
def test_byte_fallback_is_the_library_where_the_bytes_are_utf8(tokenizers: dict[str, Tokenizer], text: str) -> None:
    tokenizer = tokenizers["byte_fallback"]
    ids = byte_tokens(text.encode())
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)
    # Cut off in the middle of the only character: one U+FFFD a byte, as the library.
    emoji = byte_tokens("🙂".encode()[:3])
    assert stream(tokenizer, emoji) == ["", "", "", FFFD * 3]
    assert tokenizer.decode(emoji, skip_special_tokens=True) == FFFD * 3


def test_shown_characters_stay_when_the_run_turns_out_malformed(tokenizers: dict[str, Tokenizer]) -> None:
    """The library's own stream raises here."""
    ids = [*byte_tokens("你".encode()), *byte_tokens(b"\xe4"), 260]
    assert "".join(stream(tokenizers["byte_fallback"], ids)) == f"你{FFFD}a"


def test_a_real_replacement_character_is_shown_at_once(byte_level_tokenizer: Tokenizer) -> None:
    """The library's own stream withholds it."""
    ids = byte_level_tokenizer.encode(FFFD, add_special_tokens=False)
    assert "".join(stream(byte_level_tokenizer, ids)[:-1]) == FFFD


def test_flush_shows_what_is_incomplete(byte_level_tokenizer: Tokenizer) -> None:
    emoji = byte_level_tokenizer.encode("🙀", add_special_tokens=False)
    assert len(emoji) > 1
    detokenizer = byte_level_tokenizer.detokenizer()
    assert detokenizer.add(emoji[:-1]) == ""
    assert detokenizer.flush() == FFFD


def test_special_tokens_are_skipped_or_shown(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("a<|im_end|>b<tool é>", add_special_tokens=True)
    assert "".join(stream(byte_level_tokenizer, ids)) == "ab<tool é>"
    assert "".join(stream(byte_level_tokenizer, ids, skip=False)) == "<s>a<|im_end|>b<tool é>"


def test_nonsense_ids_make_no_text_and_are_not_kept(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        assert "".join(stream(tokenizer, [10**6, 2**40, -1])) == ""
    byte_detokenizer = tokenizers["byte_level"].detokenizer()
    assert isinstance(byte_detokenizer, ByteDetokenizer)
    assert 10**6 not in byte_detokenizer._pieces


@pytest.mark.parametrize("family", ["word_piece", "no_decoder"])
@given(data=st.data(), skip=st.booleans())
def test_other_decoders_by_window(
    tokenizers: dict[str, Tokenizer], family: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = tokenizers[family]
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40)
    prompt, output = data.draw(ids), data.draw(ids)
    assert isinstance(tokenizer.detokenizer(), WindowDetokenizer)
    assert "".join(stream(tokenizer, output, skip=skip)) == tokenizer.decode(output, skip_special_tokens=skip)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    assert before + "".join(stream(tokenizer, output, prompt=prompt, skip=skip)) == whole


@given(data=st.data())
def test_window_stays_small_and_agrees_on_valid_text(byte_level_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """The window is the fallback for every family; here it must agree with the exact one."""
    text = data.draw(st.text(max_size=30))
    ids = byte_level_tokenizer.encode(text, add_special_tokens=False)
    window = WindowDetokenizer(backend_of(byte_level_tokenizer), frozenset())
    assert "".join([window.add([token_id]) for token_id in ids]) + window.flush() == text
    assert len(window._window) <= 16


def test_rules_are_read_only_from_decoders_that_work_token_by_token():
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    fuse = {"type": "Fuse"}
    assert DecoderRules.of({"type": "Sequence", "decoders": [replace, fuse, strip]}) is not None
    for unknown in (
        None,
        {"type": "WordPiece"},
        {"type": "Sequence", "decoders": [strip, replace, fuse]},
        {"type": "Sequence", "decoders": [replace, strip]},
        {"type": "Sequence", "decoders": [replace, fuse, strip | {"stop": 1}]},
        {"type": "Sequence", "decoders": [replace | {"pattern": {"Regex": "x"}}, fuse]},
    ):
        assert DecoderRules.of(unknown) is None
