"""GGUF files: the same configuration and the same numbers as the folder that they were written from, or a refusal by name."""

from __future__ import annotations

import os
import struct
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.common.security.fingerprint import model_fingerprint
from pdserve.models.gguf.gguf_file import BLOCKS
from pdserve.models.gguf.gguf_groups import GROUPED_TYPES
from pdserve.models.gguf.gguf_tensors import GgufIndex, GgufWeight
from pdserve.models.loading import load_decoder
from pdserve.models.model_folder import model_folder
from pdserve.models.read_config import read_config
from pdserve.models.weights.gguf_weights import GgufWeights
from pdserve.models.weights.open_weights import open_weights
from pdserve.models.weights.rank_shard import Part
from tests.support.models.checkpoints import make_checkpoint, tiny_tokenizer
from tests.support.models.family_checkpoints import make_family
from tests.support.models.gguf_checkpoints import byte_pair_metadata, folder_weights, write_gguf

_LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5], "long_factor": [2.0, 2.1, 2.2, 2.3, 3.5, 4.7, 5.0, 6.5],
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("llama", "llama", {"tie_word_embeddings": True}, {}),
    ("llama", "llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}, {"attention__key_length": None}),
    ("llama", "mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}, {}),
    ("qwen2", "qwen2", {}, {"rope__dimension_count": 16}),
    ("qwen3", "qwen3", {"head_dim": 24, "tie_word_embeddings": True}, {}),
    (
        "qwen3moe", "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}, {},
    ),
    ("gemma2", "gemma2", {"sliding_window": 13, "query_pre_attn_scalar": 16, "final_logit_softcapping": 7.0}, {}),
    (
        "gemma3", "gemma3_text", {"sliding_window": 13, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
        {"rope__freq_base": 1e6},
    ),
    (
        "gemma3", "gemma3_text", {"sliding_window": 9, "query_pre_attn_scalar": 16, "rope_parameters": _LINEAR},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "rope__freq_base_swa": 100.0},
    ),
    ("phi3", "phi3", {}, {}),
    (
        "phi3", "phi3", {"sliding_window": 15, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope__dimension_count": 8},
    ),
    ("granite", "granite", {"embedding_multiplier": 12.0, "attention_multiplier": 0.0625, "logits_scaling": 8.0}, {}),
    ("smollm3", "smollm3", {"num_hidden_layers": 8}, {}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("architecture", "family", "fields", "keys"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)]
)
def test_configuration_and_weights_are_those_of_the_folder(
    tmp_path: Path, architecture: str, family: str, fields: dict[str, Any], keys: dict[str, Any]
) -> None:
    source = tmp_path / "source"
    make_family(source, family, fields, "bfloat16")
    folder = model_folder(str(write_gguf(tmp_path / "model.gguf", source, architecture, **keys)))
    expected = read_config(source, "bfloat16")
    # the tests' configurations name tokens, and the file does not
    found = replace(
        read_config(folder, "bfloat16"), eos_token_ids=expected.eos_token_ids, bos_token_id=expected.bos_token_id
    )
    assert found == replace(expected, unknown_fields=())
    with open_weights(folder, None) as weights:
        stored = folder_weights(source)
        if expected.tie_word_embeddings:
            stored.pop("lm_head.weight", None)
        assert set(weights.names) == set(stored)
        for name, numbers in stored.items():
            assert torch.equal(weights.read(name, tuple(numbers.shape)).bfloat16(), numbers), name
    load_decoder(folder, dtype="bfloat16")


def test_factors_of_rotary_frequencies(tmp_path: Path) -> None:
    """Llama 3's file has the factor of each pair in place of the formula, Phi-3's both lists."""
    source = make_checkpoint(tmp_path / "source", rope_parameters=_LLAMA3, max_position_embeddings=512)
    expected = read_config(source).rope.inverse_frequencies(16)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    path = tmp_path / "model.gguf"
    _with_tensors(path, source, "llama", {"rope_freqs.weight": (plain / expected).numpy()})
    rope = read_config(model_folder(str(path))).rope
    assert torch.allclose(rope.inverse_frequencies(16), expected, rtol=1e-6)
    assert rope.attention_factor == 1.0
    assert read_config(model_folder(str(path))).max_position_embeddings == 512

    source = tmp_path / "phi"
    make_family(source, "phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 256})
    lists = {f"rope_factors_{kind}.weight": np.float32(_LONGROPE[f"{kind}_factor"]) for kind in ("short", "long")}
    path = tmp_path / "phi.gguf"
    _with_tensors(path, source, "phi3", lists, rope__scaling__original_context_length=256)
    for length in (None, 400):
        assert read_config(model_folder(str(path)), "auto", length).rope == read_config(source, "auto", length).rope


def test_yarn(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    source = make_checkpoint(tmp_path / "source", "qwen2", rope_parameters=yarn, max_position_embeddings=512)
    keys: dict[str, Any] = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 128,
    }
    folder = model_folder(str(write_gguf(tmp_path / "model.gguf", source, "qwen2", **keys)))
    assert read_config(folder).rope == read_config(source).rope


UNREAD = ("F64", *(f"I{num_bits}" for num_bits in (8, 16, 32, 64)), "Q1_0", "Q8_1", "Q8_K")
"""Types that the package does not widen, or that no weight has."""


@pytest.mark.parametrize("kind", [name for name in BLOCKS if name not in UNREAD])
def test_every_type_is_widened_as_by_the_package(tmp_path: Path, kind: str) -> None:
    """Whole, in runs of rows, in parts, and with rows in the order of llama.cpp."""
    type_ = gguf.GGMLQuantizationType[kind]
    block, size = BLOCKS[kind]
    columns = max(block, 256) * 2
    random = np.random.default_rng(0)
    stored = random.integers(0, 256, (48, columns // block * size), np.uint8)
    if kind in ("F32", "F16", "BF16"):
        numbers = random.standard_normal((48, columns)).astype(np.float32)
        stored = gguf.quantize(numbers, type_).view(np.uint8).reshape(48, -1)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = torch.from_numpy(np.array(gguf.dequantize(stored, type_), np.float32))
    (tmp_path / "model.gguf").write_bytes(b"\0" * 64 + stored.tobytes())
    files = {"model.gguf": np.memmap(tmp_path / "model.gguf", mode="r")}
    weight = GgufWeight("model.gguf", kind, (48, columns), 64)
    permuted = GgufWeight("model.gguf", kind, (48, columns), 64, permuted_heads=3)
    weights = GgufWeights(tmp_path, files, GgufIndex({"plain": weight, "permuted": permuted}))
    rows = [head * 16 + place for head in range(3) for half in (0, 1) for place in range(half, 16, 2)]
    for name, whole in (("plain", expected), ("permuted", expected[rows])):
        for part in (None, Part(0, 16, 32), Part(1, columns // 2, columns)):
            cut = whole if part is None else whole[part.slices(2)]
            assert torch.allclose(weights.read(name, (48, columns), part=part), cut, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", GROUPED_TYPES)
def test_integers_in_groups_stand_for_the_same_numbers(tmp_path: Path, kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    random = np.random.default_rng(0)
    if kind.endswith("_K"):
        block, size = BLOCKS[kind]
        stored = random.integers(0, 256, (24, 512 // block, size), np.uint8)
        # scales that are numbers
        places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
        for place in places:
            halves = (random.random((24, 512 // block, 1)) + 0.5).astype(np.float16)
            stored[..., place : place + 2] = halves.view(np.uint8)
        stored = stored.reshape(24, -1)
    else:
        stored = gguf.quantize(random.standard_normal((24, 512)).astype(np.float32), type_)
    (tmp_path / "model.gguf").write_bytes(stored.tobytes())
    files = {"model.gguf": np.memmap(tmp_path / "model.gguf", mode="r")}
    for heads in (0, 3):
        weight = GgufWeight("model.gguf", kind, (24, 512), 0, permuted_heads=heads)
        matrix = GgufWeights(tmp_path, files, GgufIndex({"w": weight})).stored("w")
        assert matrix is not None
        expected = matrix.rows(0, 24)
        for start, stop in ((0, 24), (8, 16)):
            found = matrix.grouped(start, stop)
            assert (found.num_bits, found.group_size, found.offsets is not None, found.is_float) == matrix.group_form
            assert (found.widened() - expected[start:stop]).abs().max() <= 1e-6 * expected.abs().max()


def test_large_weights_are_read_in_runs_of_rows(tmp_path: Path) -> None:
    weight = GgufWeight("model.gguf", "Q8_0", (40_000, 256), 0)
    stored = np.zeros((40_000, 8, 34), np.uint8)
    stored[:, :, 1] = 0x3C  # scale 1
    stored[:, 0, 2] = np.arange(40_000) % 100
    (tmp_path / "model.gguf").write_bytes(stored.tobytes())
    files = {"model.gguf": np.memmap(tmp_path / "model.gguf", mode="r")}
    pieces = list(GgufWeights(tmp_path, files, GgufIndex({"w": weight})).pieces("w", (40_000, 256)))
    assert len(pieces) > 1
    assert max(piece.nbytes for piece in pieces) <= 16 << 20
    assert torch.equal(torch.cat(pieces)[:, 0], torch.arange(40_000) % 100)


def test_files_of_a_split_model(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    whole = model_folder(str(write_gguf(tmp_path / "whole.gguf", source, "llama")))
    first = write_gguf(tmp_path / "parts.gguf", source, "llama", split_max_tensors=7)
    folder = model_folder(str(first))
    assert len(list(folder.glob("*.gguf"))) > 2
    with open_weights(whole, None) as one, open_weights(folder, None) as other:
        assert set(one.names) == set(other.names)
        for name in one.names:
            assert torch.equal(one.read(name, one.shape(name)), other.read(name, one.shape(name)))
    parts = sorted(tmp_path.glob("parts-*.gguf"))
    with pytest.raises(ConfigError, match=r"is not the first of \d files: give parts-00001-of-"):
        model_folder(str(parts[1]))
    parts[1].rename(tmp_path / "elsewhere.gguf")
    parts[0].rename(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match=r"is one of \d files; their names end with -00001-of-"):
        model_folder(str(tmp_path / "other.gguf"))
    (tmp_path / "other.gguf").rename(parts[0])
    os.utime(parts[0])
    with pytest.raises(ConfigError, match=r"of which parts-00002-of-0000\d.gguf are missing"):
        model_folder(str(parts[0]))


def test_a_folder_is_made_once_and_by_several_at_a_time(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a model.gguf", make_checkpoint(tmp_path / "source"), "llama")
    with ProcessPoolExecutor(4) as pool:
        folders = set(pool.map(model_folder, [str(path)] * 8))
    [folder] = folders
    assert folder.name == "a model"
    assert {entry.name for entry in folder.parent.iterdir()} == {"a model"}
    written = (folder / "config.json").stat().st_mtime_ns
    assert model_folder(str(path)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    before = model_fingerprint(folder, "float32")
    other = tmp_path / "elsewhere" / "other.gguf"
    other.parent.mkdir()
    path.rename(other)
    assert model_fingerprint(model_folder(str(other)), "float32") == before
    with other.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(struct.pack("<f", 0.5))
    assert model_fingerprint(model_folder(str(other)), "float32") != before


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"attention__clamp_kqv": 8.0}, "llama.attention.clamp_kqv is 8.0; read is 0.0"),
    ({"attention__causal": False}, "llama.attention.causal is false; read is True"),
    ({"attention__sliding_window": 64}, "llama.attention.sliding_window is 64, which is not read for LlamaForCausalLM"),
    ({"attention__value_length": 8}, "llama.attention.value_length is 8; read is 16, as of keys"),
    ({"rope__dimension_count": 8}, "llama.rope.dimension_count is 8; read is 16, the size of a head"),
    ({"rope__scaling__type": "spiral"}, 'llama.rope.scaling.type is "spiral"; read is none, linear or yarn'),
    ({"feed_forward_length": [96, 48]}, r"llama.feed_forward_length is \[96, 48\]; read is the same for every layer"),
    ({"block_count": None}, "llama.block_count is missing"),
    ({"attention__head_count": 0}, "num_attention_heads must be an integer of at least 1, not 0"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_keys_that_are_not_computed_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "source"), "llama", **keys)
    with pytest.raises((ConfigError, UnsupportedModel), match=message):
        read_config(model_folder(str(path)))


def test_other_kinds_of_files(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.add_type("mmproj")
    _finish(writer)
    with pytest.raises(UnsupportedModel, match="is a multimodal projector"):
        model_folder(str(tmp_path / "mmproj.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "lora.gguf", "llama")
    writer.add_type("adapter")
    _finish(writer)
    with pytest.raises(ConfigError, match=r"is no model: general.type is 'adapter'"):
        model_folder(str(tmp_path / "lora.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    _finish(writer)
    with pytest.raises(UnsupportedModel, match=r"general.architecture is 'mamba'; read from GGUF are llama, qwen2"):
        model_folder(str(tmp_path / "other.gguf"))
    (tmp_path / "text.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match="git-lfs pointer"):
        model_folder(str(tmp_path / "text.gguf"))
    path = write_gguf(tmp_path / "big.gguf", source, "llama")
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack(">I", 3)
    (tmp_path / "big.gguf").write_bytes(data)
    with pytest.raises((ConfigError, UnsupportedModel), match=r"big-endian|is truncated or no GGUF file"):
        model_folder(str(tmp_path / "big.gguf"))


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    """At every place of its header, and within its weights."""
    whole = write_gguf(tmp_path / "whole.gguf", make_checkpoint(tmp_path / "source"), "llama").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (0, 3, 4, 7, 20, 23, 30, 100, *range(200, 12_000, 371), len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match="is truncated or no GGUF file"):
            model_folder(str(path))
    path.write_bytes(whole)
    folder = model_folder(str(path))
    # after its folder was made
    state = path.stat()
    path.write_bytes(whole[:-64])
    with pytest.raises(ConfigError, match=r"is truncated: .* ends at byte"), open_weights(folder, None):
        pass
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"), open_weights(folder, None):
        pass
    assert state.st_size == len(whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'; read are gpt2"),
        ({"pre": "spiral"}, "tokenizer.ggml.pre is 'spiral'; read are default"),
        ({"merges": ["a b c"]}, "tokenizer.ggml.merges has 'a b c', which is not two tokens that make a third"),
        ({"merges": ["nothing"]}, "tokenizer.ggml.merges has 'nothing'"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type must be a list of 320 types"),
        ({"tokens": ["same"] * 320}, "tokenizer.ggml.tokens has 'same' more than once"),
        ({"model": "llama"}, "tokenizer.ggml.scores must be a list of 320 numbers"),
    ],
)
def test_tokenizers_that_are_not_read(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    metadata = byte_pair_metadata(tiny_tokenizer()) | changes
    path = write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "source"), "llama", metadata)
    with pytest.raises((ConfigError, UnsupportedModel)) as refused:
        model_folder(str(path))
    assert message in refused.value.message
    assert str(path) in refused.value.message


def _with_tensors(path: Path, source: Path, architecture: str, more: dict[str, Any], **keys: Any) -> None:
    """`write_gguf` with further tensors, as a file that is read and written again."""
    write_gguf(path, source, architecture, **keys)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, numbers in more.items():
        writer.add_tensor(name, np.ascontiguousarray(numbers, np.float32))
    _finish(writer)
    path.with_suffix(".new").rename(path)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
