"""GGUF files in llama.cpp and here: the tokens of texts, and the distributions of the next token."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: make llama-cpp installs it")

import llama_cpp
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

from pdserve.models.gguf.gguf_tokenizer import PRE_TOKENIZERS, GgufTokenizer
from pdserve.models.json_object import JsonObject
from pdserve.models.loading import load_decoder
from pdserve.models.model_folder import model_folder
from tests.models.test_gguf import CASES
from tests.support.inputs.random_prompts import prompt_of
from tests.support.inputs.varied_texts import varied_texts
from tests.support.kernels.paged_run import PagedRun
from tests.support.models.family_checkpoints import make_family
from tests.support.models.gguf_checkpoints import add_key, write_gguf
from tests.support.models.real_weights import NAMES, gguf_file, real_folder

pytestmark = [
    pytest.mark.slow,
    # its destructors run when the interpreter has taken apart what they need
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
NUM_TEXTS, NUM_POSITIONS, CHUNK = 500, 2000, 250
_F32 = 0


def in_llama_cpp(path: Path, **options: Any) -> Any:
    return llama_cpp.Llama(str(path), verbose=False, **options)


def tokens_in_llama_cpp(path: Path, texts: list[str]) -> list[list[int]]:
    model = in_llama_cpp(path, vocab_only=True)
    try:
        return [model.tokenize(text.encode(), add_bos=True, special=True) for text in texts]
    finally:
        model.close()


def write_vocabulary(path: Path, keys: Mapping[str, Any]) -> Path:
    """A file without weights."""
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{name}", 64)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name, value in keys.items():
        add_key(writer, f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def made(keys: Mapping[str, Any]) -> Tokenizer:
    metadata = JsonObject({f"tokenizer.ggml.{name}": value for name, value in keys.items()}, "vocabulary.gguf")
    return Tokenizer.from_str(GgufTokenizer(metadata).tokenizer_json())


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_real_models(name: str) -> None:
    folder, texts = real_folder(name), varied_texts(NUM_TEXTS)
    found = [encoding.ids for encoding in Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(texts)]
    assert found == tokens_in_llama_cpp(gguf_file(folder), texts)


@pytest.fixture(scope="module")
def byte_pairs() -> dict[str, Any]:
    """A vocabulary that joins across words, digits and lines, so that each boundary of a pre-tokenizer shows."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = byte_level
    trainer = trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=byte_level.alphabet(), special_tokens=["<unk>"], max_token_length=12,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(varied_texts(3000, seed=1), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "model": "gpt2", "tokens": tokens, "token_type": [3] + [1] * (len(tokens) - 1),
        "merges": [" ".join(merge) for merge in model["merges"]], "bos_token_id": 0, "eos_token_id": 0, "add_bos_token": False,
    }  # fmt: skip


def _has_marks_or_case(text: str) -> bool:
    return any(
        unicodedata.category(char)[0] == "M" or (char > "\x7f" and char.lower() != char.upper()) for char in text
    )


APPROXIMATED: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(("tekken", "gpt-4o", "llama4", "kanana2"), _has_marks_or_case),
    "deepseek-coder": lambda text: "\u3000" in text,
}
"""Names whose rule, that of the model's own tokenizer, llama.cpp approximates, and the texts in which that may show."""


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_tokens_by_each_named_pre_tokenizer(pre: str, byte_pairs: dict[str, Any], tmp_path: Path) -> None:
    keys = byte_pairs | {"pre": pre}
    may_differ = APPROXIMATED.get(pre, lambda _: False)
    texts = [text for text in varied_texts(3 * NUM_TEXTS) if not may_differ(text)][:NUM_TEXTS]
    assert len(texts) == NUM_TEXTS
    found = [encoding.ids for encoding in made(keys).encode_batch(texts)]
    assert found == tokens_in_llama_cpp(write_vocabulary(tmp_path / "vocabulary.gguf", keys), texts)
    # the name matters for this vocabulary
    other = made(byte_pairs | {"pre": "smollm" if pre == "gpt-2" else "gpt-2"})
    if PRE_TOKENIZERS[pre].patterns != PRE_TOKENIZERS["gpt-2"].patterns:
        assert [encoding.ids for encoding in other.encode_batch(texts)] != found


@pytest.mark.parametrize("adds_space", [True, False])
def test_tokens_of_sentence_pieces(adds_space: bool, tmp_path: Path) -> None:
    """A random vocabulary in which most tokens can be made of others in several ways."""
    counts = Counter[str]()
    for text in varied_texts(2000, seed=1):
        spaced = "\u2581" + text.replace(" ", "\u2581")
        for length in range(1, 9):
            counts.update(spaced[first : first + length] for first in range(0, len(spaced) - length + 1, 8))
    common = [piece for piece, _ in counts.most_common(6000) if "\0" not in piece]
    pieces = list(dict.fromkeys([*common, *sorted(set("".join(common)))]))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    keys = {
        "model": "llama", "tokens": tokens, "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))], "bos_token_id": 1, "eos_token_id": 2,
        "unknown_token_id": 0, "add_space_prefix": adds_space,
    }  # fmt: skip
    texts = varied_texts(NUM_TEXTS)
    found = [encoding.ids for encoding in made(keys).encode_batch(texts)]
    assert found == tokens_in_llama_cpp(write_vocabulary(tmp_path / "vocabulary.gguf", keys), texts)


def logits_in_llama_cpp(path: Path, prompts: list[list[int]]) -> Iterator[Tensor]:
    """`[T, V]` of each prompt, over a KV cache in float32."""
    options = {"n_ctx": 256, "n_batch": 256, "n_ubatch": 256, "n_threads": 2, "type_k": _F32, "type_v": _F32}
    model = in_llama_cpp(path, logits_all=True, flash_attn=False, **options)
    try:
        for prompt in prompts:
            model.reset()
            model.eval(prompt)
            yield torch.from_numpy(model.scores[: len(prompt)])
    finally:
        model.close()


def logits_here(folder: Path, prompts: list[list[int]]) -> Iterator[Tensor]:
    decoder = load_decoder(folder, dtype="float32")
    for prompt in prompts:
        yield PagedRun(decoder).step({}, {"a": prompt})["a"]


def in_float32(path: Path, copy: Path) -> Path:
    """The same file with all weights in float32."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(copy, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        if field.types[0] is gguf.GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return copy


@dataclass
class Difference:
    """Between logits of the same positions."""

    num_positions: int = 0
    same_best: int = 0
    """Positions at which the most likely token is the same."""
    summed_divergence: float = 0.0
    """From the first to the second, in nats."""
    largest: float = 0.0
    """Of two logits."""

    def add(self, first: Tensor, second: Tensor) -> None:
        """Logits `[T, V]`."""
        self.num_positions += len(first)
        self.same_best += int((first.argmax(-1) == second.argmax(-1)).sum())
        self.largest = max(self.largest, float((first - second).abs().max()))
        for one, other in zip(first, second, strict=True):
            mine, theirs = one.double().log_softmax(-1), other.double().log_softmax(-1)
            self.summed_divergence += float((mine.exp() * (mine - theirs)).sum())

    @property
    def divergence(self) -> float:
        """Mean over the positions."""
        return self.summed_divergence / self.num_positions


@pytest.mark.parametrize(("name", "largest"), [("smollm2", 1e-3), ("gemma3", 1.0)])
def test_distributions_of_real_models(name: str, largest: float, tmp_path: Path) -> None:
    """With the numbers of the file in float32 llama.cpp computes what we do, but for Gemma's activation, which it reads from a
    table in float16. With the file itself it rounds the inputs of each product to 8 bits, which explains the rest."""
    folder = real_folder(name)
    text = "\n".join(varied_texts(400, seed=9)[::4])
    token_ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:NUM_POSITIONS]
    prompts = [token_ids[first : first + CHUNK] for first in range(0, NUM_POSITIONS, CHUNK)]
    wide = in_float32(gguf_file(folder), tmp_path / "wide.gguf")
    same, rounded, rounded_there = Difference(), Difference(), Difference()
    of_all = (
        logits_here(folder, prompts), logits_in_llama_cpp(wide, prompts), logits_in_llama_cpp(gguf_file(folder), prompts),
    )  # fmt: skip
    for ours, of_wide, of_stored in zip(*of_all, strict=True):
        same.add(ours, of_wide)
        rounded.add(ours, of_stored)
        rounded_there.add(of_wide, of_stored)
    print(f"{name}: same numbers {same}, rounded inputs {rounded}, there {rounded_there}")
    assert same.num_positions == NUM_POSITIONS
    assert same.same_best >= NUM_POSITIONS - 1
    assert same.divergence < 1e-4
    assert same.largest < largest
    assert abs(rounded.divergence - rounded_there.divergence) < 0.02 * rounded_there.divergence
    assert abs(rounded.same_best - rounded_there.same_best) <= 2


@pytest.mark.parametrize(
    ("architecture", "family", "fields", "keys"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)]
)
def test_distributions_of_each_architecture(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    family: str,
    fields: dict[str, Any],
    keys: dict[str, Any],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_family(tmp_path / "source", family, fields, "float32")
    path = write_gguf(tmp_path / "model.gguf", tmp_path / "source", architecture, **keys)
    # llama.cpp has no window in phi3, whatever the file says
    longest = fields.get("sliding_window", 40) if architecture == "phi3" else 40
    prompts = [prompt_of(longest, 1), prompt_of(7, 2)]
    found = Difference()
    for ours, theirs in zip(
        logits_here(model_folder(str(path)), prompts), logits_in_llama_cpp(path, prompts), strict=True
    ):
        found.add(ours, theirs)
    assert found.same_best == longest + 7
    assert found.largest < 0.01
