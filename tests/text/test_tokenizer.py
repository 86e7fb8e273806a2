"""Files of a model folder's tokenizer, and refusals of folders without a usable one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.text.outputs.detokenizer import ByteDetokenizer
from pdserve.text.prompt import TextInput, encode_prompt
from pdserve.text.tokenization.tokenizer import Tokenizer, TokenizerJson


def write(folder: Path, backend: Backend, **files: Any) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer.from_folder(folder)


def test_encode_and_decode(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("naïve 你好<|im_end|>", add_special_tokens=True)
    assert ids[0] == byte_level_tokenizer.bos_token_id == 0
    assert ids[1:] == byte_level_tokenizer.encode("naïve 你好<|im_end|>", add_special_tokens=False)
    assert byte_level_tokenizer.decode(ids, skip_special_tokens=True) == "naïve 你好"
    assert byte_level_tokenizer.decode(tuple(ids), skip_special_tokens=False) == "<s>naïve 你好<|im_end|>"
    assert byte_level_tokenizer.encode("", add_special_tokens=False) == []


def test_vocabulary(tmp_path: Path, byte_level_backend: Backend) -> None:
    size = byte_level_backend.get_vocab_size()
    tokenizer = write(tmp_path, byte_level_backend)
    assert tokenizer.vocab_size == size
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, ())
    assert tokenizer.generation_defaults == {}


def test_text_that_is_not_unicode_is_the_clients_fault(byte_level_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate at character 3"):
        byte_level_tokenizer.encode("abc\ud800", add_special_tokens=False)
    with pytest.raises(InvalidRequest, match="token_ids"):
        byte_level_tokenizer.decode([-1], skip_special_tokens=True)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"generation_config": {"eos_token_id": [7, 9, 7]}, "config": {"eos_token_id": 5}}, (7, 9)),
        ({"generation_config": {"eos_token_id": 0}, "config": {"eos_token_id": 5}}, (0,)),
        ({"generation_config": {"eos_token_id": []}, "config": {"eos_token_id": 5}}, (5,)),
        ({"generation_config": {}, "config": {"text_config": {"eos_token_id": [4]}}}, (4,)),
        ({"tokenizer_config": {"eos_token": "</s>"}}, (1,)),
        ({"special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}}, (2,)),
        ({"tokenizer_config": {"eos_token": None}}, ()),
    ],
)
def test_eos_from_the_first_file_that_names_it(
    tmp_path: Path, byte_level_backend: Backend, files: dict[str, object], eos: tuple[int, ...]
) -> None:
    assert write(tmp_path, byte_level_backend, **files).eos_token_ids == eos


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"config": {"vocab_size": 300}, "generation_config": {"eos_token_id": [5, 300, 10**30]}}, (5,)),
        ({"config": {"vocab_size": 300, "eos_token_id": 20_000}, "tokenizer_config": {"eos_token": "</s>"}}, ()),
        ({"config": {"vocab_size": 1}, "tokenizer_config": {"eos_token": "</s>"}}, ()),
    ],
)
def test_end_tokens_that_the_model_lacks_are_left_out_with_a_warning(
    tmp_path: Path,
    byte_level_backend: Backend,
    files: dict[str, object],
    eos: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in transformers, no other file's end token takes their place."""
    assert write(tmp_path, byte_level_backend, **files).eos_token_ids == eos
    [record] = caplog.records
    assert "is outside the vocabulary of" in record.getMessage()


@pytest.mark.parametrize(
    ("file", "kind"),
    [("tokenizer.model", "SentencePiece"), ("tekken.json", "Mistral's own format"), ("vocab.json", "merges.txt")],
)
def test_other_tokenizer_formats_are_named(tmp_path: Path, file: str, kind: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=rf"there is {file} \({kind}|{kind}") as error:
        Tokenizer.from_folder(tmp_path)
    assert "AutoTokenizer.from_pretrained" in error.value.message


@pytest.mark.parametrize("content", ["\ud800", {"content": "a\udfff"}])
def test_token_texts_that_are_no_unicode_are_left_out(
    tmp_path: Path, byte_level_backend: Backend, content: object
) -> None:
    config = {"eos_token": content, "additional_special_tokens": [content]}
    assert write(tmp_path, byte_level_backend, tokenizer_config=config).eos_token_ids == ()


@pytest.mark.parametrize(
    ("generation_config", "defaults"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0}, (0.6, 0.9, 20, 0.0)),
        ({"temperature": 1, "max_new_tokens": 5}, (1.0, None, None, None)),
        ({"repetition_penalty": 1.05}, (None, None, None, None, 1.05)),
        ({"do_sample": False, "temperature": 0.6}, (None, None, None, None)),
        ({"do_sample": True, "temperature": None}, (None, None, None, None)),
    ],
)
def test_generation_defaults_are_the_given_values(
    tmp_path: Path, byte_level_backend: Backend, generation_config: dict[str, object], defaults: tuple[object, ...]
) -> None:
    tokenizer = write(tmp_path, byte_level_backend, generation_config=generation_config)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = dict(zip(names, defaults, strict=False))
    assert tokenizer.generation_defaults == {name: value for name, value in given.items() if value is not None}


def test_tokens_that_only_the_config_declares_are_added(tmp_path: Path, byte_level_backend: Backend) -> None:
    size = byte_level_backend.get_vocab_size()
    config = {
        "eos_token": "<eos>",
        "additional_special_tokens": [{"content": "<extra>"}],
        "added_tokens_decoder": {
            str(size + 1): {"content": "<eos>", "special": False, "lstrip": False},
            str(size): {"content": "<tool>", "special": False},
            "2": {"content": "<|im_end|>", "special": True},
        },
    }
    tokenizer = write(tmp_path, byte_level_backend, tokenizer_config=config)
    text = "<tool><eos><extra>"
    assert tokenizer.encode(text, add_special_tokens=False) == [size, size + 1, size + 2]
    assert tokenizer.decode([size, size + 1, size + 2], skip_special_tokens=True) == "<tool>"
    assert tokenizer.special_token_ids == {0, 1, 2, size + 1, size + 2}
    assert tokenizer.eos_token_ids == (size + 1,)
    assert tokenizer.vocab_size == size + 3


def test_a_plain_added_token_can_be_declared_special(tmp_path: Path, byte_level_backend: Backend) -> None:
    byte_level_backend.add_tokens([AddedToken("<late>", special=False)])
    late = byte_level_backend.token_to_id("<late>")
    tokenizer = write(tmp_path, byte_level_backend, tokenizer_config={"pad_token": "<late>"})
    assert late in tokenizer.special_token_ids
    assert tokenizer.decode([late], skip_special_tokens=True) == ""


def test_stored_truncation_and_padding_do_not_touch_prompts(tmp_path: Path, byte_level_backend: Backend) -> None:
    byte_level_backend.enable_truncation(4)
    byte_level_backend.enable_padding(length=64)
    tokenizer = write(tmp_path, byte_level_backend)
    text = "the cat sat on the mat " * 10
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_fingerprint_follows_what_decides_ids(tmp_path: Path, byte_level_backend: Backend) -> None:
    first = write(tmp_path, byte_level_backend).fingerprint
    assert len(bytes.fromhex(first)) == 16
    assert write(tmp_path, byte_level_backend, generation_config={"temperature": 1}).fingerprint == first
    byte_level_backend.add_tokens(["<more>"])
    assert write(tmp_path, byte_level_backend).fingerprint != first


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("generation_config.json", "{", "generation_config.json is not valid JSON"),
        ("config.json", "[]", "config.json must hold a JSON object, not list"),
        ("config.json", '{"eos_token_id": "x"}', "config.json: eos_token_id is 'x'"),
        ("generation_config.json", '{"eos_token_id": [true]}', "generation_config.json: eos_token_id"),
        ("generation_config.json", '{"temperature": "hot"}', "generation_config.json: temperature is 'hot'"),
        ("tokenizer_config.json", '{"chat_template": 3}', "tokenizer_config.json: chat_template"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder is malformed"),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}', "added_tokens_decoder is"),
        ("chat_template.jinja", "{% if %}", "chat_template.jinja: chat template, line 1"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja cannot be read: byte 0 is not UTF-8"),
        (
            "chat_template.jinja",
            "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
            "chat_template.jinja: the chat template",
        ),
        ("chat_template.jinja", b"x" * ((1 << 20) + 1), "chat_template.jinja has more than 1048576 bytes"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": 3}]}', "chat_template 'default'"),
        ("generation_config.json", '{"top_k": Infinity}', "generation_config.json: top_k is inf"),
        ("generation_config.json", '{"temperature": NaN}', "generation_config.json: temperature is nan"),
        ("generation_config.json", '{"min_p": 1' + "0" * 400 + "}", "generation_config.json: min_p is inf"),
        ("generation_config.json", '{"top_p": 0}', "generation_config.json: top_p must be above 0"),
        ("generation_config.json", '{"top_k": 1, "top_k": 2}', "the field 'top_k' is there twice"),
        ("generation_config.json", "[" * 100_000, "generation_config.json is not valid JSON"),
        ("generation_config.json", " " * (1 << 20) + "{}", "generation_config.json has more than 1048576 bytes"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "tokenizer.json is a git-lfs pointer"),
    ],
)
def test_broken_files_are_named(
    tmp_path: Path, byte_level_backend: Backend, name: str, content: str | bytes, complaint: str
) -> None:
    byte_level_backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert complaint in caught.value.message
    assert str(tmp_path) in caught.value.message


def test_rules_that_the_library_contradicts_are_not_used(folders: dict[str, Path]) -> None:
    """A decoder whose meaning changed must cost speed, not correctness."""
    folder = folders["byte_fallback"]
    tokenizer = Tokenizer.from_folder(folder)
    assert isinstance(tokenizer.detokenizer(), ByteDetokenizer)
    wrong = Tokenizer(tokenizer._backend, TokenizerJson({"type": "ByteLevel"}), _files(folder))
    assert not isinstance(wrong.detokenizer(), ByteDetokenizer)


def _files(folder: Path) -> Any:
    from pdserve.text.tokenization.tokenizer_folder import TokenizerFolder

    return TokenizerFolder.read(folder)


def test_many_threads(byte_level_tokenizer: Tokenizer) -> None:
    texts = [f"thread {i}: naïve 你好 🙂 " * 20 for i in range(8)]
    wrong: list[str] = []

    def work(text: str) -> None:
        ids = byte_level_tokenizer.encode(text, add_special_tokens=False)
        detokenizer = byte_level_tokenizer.detokenizer()
        if "".join([detokenizer.add([token_id]) for token_id in ids]) + detokenizer.flush() != text:
            wrong.append(text)

    threads = [threading.Thread(target=work, args=(text,)) for text in texts * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_imports_no_torch():
    program = (
        "import sys; import pdserve.text.outputs.output_processor;"
        "print(sorted({'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_text_that_goes_on_gets_no_beginning_of_its_own(byte_level_tokenizer: Tokenizer) -> None:
    begins = encode_prompt(byte_level_tokenizer, TextInput("the cat"), "text")
    goes_on = encode_prompt(byte_level_tokenizer, TextInput("the cat", add_special_tokens=False), "text")
    assert begins.token_ids[1:] == goes_on.token_ids
    assert begins.text == goes_on.text == "the cat"
