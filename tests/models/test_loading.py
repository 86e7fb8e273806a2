"""Model folders that load, and folders that say what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.common.errors import ConfigError
from pdserve.models.loading import LoadProgress, load_decoder
from pdserve.models.weights.checkpoint import MAX_HEADER_BYTES
from pdserve.models.weights.weight_loader import verify_finite
from tests.support.models.checkpoints import edit_json, make_checkpoint

TOKENS = [3, 14, 15, 92, 65]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def _change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    weights = load_file(folder / WEIGHTS)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "sharded", max_shard_size="100KB")


def test_shards_are_one_model(folder: Path, sharded: Path, paged_run: Any) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = (paged_run(load_decoder(path)).step({}, {"a": TOKENS})["a"] for path in (folder, sharded))
    assert torch.equal(one, many)


def test_weights_do_not_follow_the_file(folder: Path, paged_run: Any) -> None:
    """Files are mapped only while they are read: a folder may be replaced under a running server."""
    decoder = load_decoder(folder)
    before = paged_run(decoder).step({}, {"a": TOKENS})["a"]
    with (folder / WEIGHTS).open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 100_000)
    assert torch.equal(paged_run(decoder).step({}, {"a": TOKENS})["a"], before)


@pytest.mark.parametrize("tied", [False, True])
def test_progress_counts_every_byte_once(tmp_path: Path, tied: bool) -> None:
    folder = make_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    seen: list[LoadProgress] = []
    load_decoder(folder, dtype="bfloat16", progress=seen.append)
    assert [step.loaded_bytes for step in seen] == sorted({step.loaded_bytes for step in seen})
    assert {step.total_bytes for step in seen} == {seen[-1].loaded_bytes}
    assert seen[0].name == "model.embed_tokens.weight"
    numel = sum(tensor.numel() for tensor in load_file(folder / WEIGHTS).values())
    assert seen[-1].total_bytes == 2 * numel


def test_a_tied_checkpoint_may_hold_the_head_too(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    _change_weights(folder, lm_head__weight=load_file(folder / WEIGHTS)["model.embed_tokens.weight"].clone())
    seen: list[LoadProgress] = []
    load_decoder(folder, progress=seen.append)
    assert "lm_head.weight" not in [step.name for step in seen]


def test_frequencies_of_old_checkpoints_are_ignored(folder: Path) -> None:
    _change_weights(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    load_decoder(folder)


def test_no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=f"neither {WEIGHTS} nor {INDEX}"):
        load_decoder(folder)


def test_a_shard_that_is_missing_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        load_decoder(sharded)


@pytest.mark.parametrize("size", [0, 5, 100, 50_000])
def test_a_truncated_file_is_named(folder: Path, size: int) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:size])
    with pytest.raises(ConfigError, match=rf"{WEIGHTS} is truncated"):
        load_decoder(folder)


@pytest.mark.parametrize("name", ["../model/model.safetensors", "/dev/zero", "", "..", "a\0b", "x" * 256, "\ud800"])
def test_an_index_may_not_name_files_elsewhere(sharded: Path, name: str) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = name
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="not a file of this folder"):
        load_decoder(sharded)


def test_an_index_without_a_map(sharded: Path) -> None:
    edit_json(sharded / INDEX, weight_map=...)
    with pytest.raises(ConfigError, match="weight_map is missing"):
        load_decoder(sharded)


def test_a_missing_weight_is_named(folder: Path) -> None:
    _change_weights(folder, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_decoder(folder)


def test_a_weight_of_another_shape_is_named(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=95)
    with pytest.raises(ConfigError, match=r"gate_proj\.weight has shape \[96, 64\], config\.json says \[95, 64\]"):
        load_decoder(folder)


def test_a_weight_without_a_place_is_refused(folder: Path) -> None:
    """A bias that `config.json` does not speak of would change every answer if it were dropped."""
    _change_weights(folder, model__layers__0__self_attn__q_proj__bias=torch.ones(64))
    with pytest.raises(ConfigError, match=r"1 weights have no place: .*q_proj\.bias"):
        load_decoder(folder)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64")], ids=str
)
def test_weights_of_other_dtypes_are_refused(folder: Path, dtype: torch.dtype, name: str) -> None:
    _change_weights(folder, model__norm__weight=torch.ones(64).to(dtype))
    with pytest.raises(ConfigError, match=rf"model\.norm\.weight has dtype {name}; read are F32, BF16, F16"):
        load_decoder(folder)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
def test_a_weight_that_is_no_number_is_named(tmp_path: Path, name: str, value: float, dtype: str) -> None:
    folder = make_checkpoint(tmp_path / "model", dtype=dtype)
    weight = load_file(folder / WEIGHTS)[name]
    weight.view(-1)[[1003, 2007]] = value
    _change_weights(folder, **{name: weight})
    with pytest.raises(
        ConfigError, match="has 2 values that are NaN or infinite; the first is number 1003 of"
    ) as error:
        load_decoder(folder)
    assert f"{folder / WEIGHTS}: {name}" in error.value.message


def test_a_number_that_is_none_is_found_wherever_it_stands() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for value in (torch.nan, torch.inf, -torch.inf):
            for place in range(200):
                weight = torch.randn(200, generator=torch.Generator().manual_seed(place)).to(dtype)
                verify_finite(weight, weight, "weight")
                weight[place] = value
                with pytest.raises(ConfigError, match=f"the first is number {place} of 200"):
                    verify_finite(weight, weight, "weight")


def test_a_weight_beyond_the_served_dtype_says_so(folder: Path) -> None:
    _change_weights(folder, model__norm__weight=torch.full((64,), 1e6))
    load_decoder(folder)
    with pytest.raises(
        ConfigError, match=r"model\.norm\.weight has numbers beyond torch.float16, .* 65504; serve it in"
    ):
        load_decoder(folder, dtype="float16")


def test_a_head_that_differs_from_the_embedding_is_used(
    tmp_path: Path, oracle_logits: Any, paged_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers does, whatever `tie_word_embeddings` says."""
    folder = make_checkpoint(tmp_path / "llama", tie_word_embeddings=True)
    _change_weights(folder, lm_head__weight=torch.randn(320, 64, generator=torch.Generator().manual_seed(1)))
    seen: list[LoadProgress] = []
    logits = paged_run(load_decoder(folder, progress=seen.append)).step({}, {"a": TOKENS})["a"]
    torch.testing.assert_close(logits, oracle_logits(folder, TOKENS), atol=1e-4, rtol=0)
    assert "lm_head.weight has other numbers than model.embed_tokens.weight" in caplog.text
    assert seen[-1].loaded_bytes == seen[-1].total_bytes


def test_a_head_alone_is_the_embedding_too(tmp_path: Path, oracle_logits: Any, paged_run: Any) -> None:
    folder = make_checkpoint(tmp_path / "llama", tie_word_embeddings=True)
    weights = load_file(folder / WEIGHTS)
    _change_weights(folder, model__embed_tokens__weight=None, lm_head__weight=weights["model.embed_tokens.weight"])
    logits = paged_run(load_decoder(folder)).step({}, {"a": TOKENS})["a"]
    torch.testing.assert_close(logits, oracle_logits(folder, TOKENS), atol=1e-4, rtol=0)


def test_one_file_comes_before_an_index(folder: Path, sharded: Path, oracle_logits: Any, paged_run: Any) -> None:
    """A folder may hold both; transformers reads the one file."""
    other = make_checkpoint(folder.parent / "llama", seed=7)
    for file in sharded.glob("model*"):
        (other / file.name).write_bytes(file.read_bytes())
    logits = paged_run(load_decoder(other)).step({}, {"a": TOKENS})["a"]
    torch.testing.assert_close(logits, oracle_logits(other, TOKENS), atol=1e-4, rtol=0)


def test_a_tensor_in_two_files_is_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    twice = load_file(first) | load_file(second)
    save_file(twice, second)
    with pytest.raises(ConfigError, match=f"is in {first.name} and in {second.name}"):
        load_decoder(sharded)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["pytorch_model.bin"], "but pytorch_model.bin: pickled weights are not read.*save_pretrained"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"], "pickled weights are not read"),
        (["consolidated.safetensors"], "other names for the weights"),
        (["adapter_model.safetensors"], "only after it was merged"),
        (["model.gguf"], "give the GGUF file itself as the model"),
        (["weights.safetensors"], "safetensors under another name"),
        ([], f"neither {WEIGHTS} nor {INDEX}$"),
    ],
)
def test_other_formats_of_weights_are_named(folder: Path, files: list[str], message: str) -> None:
    (folder / WEIGHTS).unlink()
    for file in files:
        (folder / file).write_bytes(b"")
    with pytest.raises(ConfigError, match=message):
        load_decoder(folder)


def test_a_git_lfs_pointer_is_named(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    (folder / WEIGHTS).write_text(pointer)
    with pytest.raises(ConfigError, match=rf"{WEIGHTS} is a git-lfs pointer, .* git lfs pull"):
        load_decoder(folder)
    (folder / "config.json").write_text(pointer)
    with pytest.raises(ConfigError, match=r"config\.json is a git-lfs pointer"):
        load_decoder(folder)


@pytest.mark.parametrize("prefix", ["language_model.", ""])
def test_weights_of_another_prefix_are_shown(folder: Path, prefix: str) -> None:
    weights = load_file(folder / WEIGHTS)
    renamed = {prefix + (name if prefix else name.removeprefix("model.")): tensor for name, tensor in weights.items()}
    save_file(renamed, folder / WEIGHTS)
    there = "language_model.model.embed_tokens.weight" if prefix else "embed_tokens.weight"
    with pytest.raises(ConfigError, match=f"there is {there}, whose prefix is another"):
        load_decoder(folder)


def _with_header(folder: Path, header: bytes, length: int | None = None, data: bytes = b"") -> None:
    length = len(header) if length is None else length
    (folder / WEIGHTS).write_bytes(length.to_bytes(8, "little") + header + data)


def test_hostile_headers_are_refused_in_one_sentence(folder: Path) -> None:
    tensor = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    cases: list[tuple[bytes, int | None, str]] = [
        (b"{}", 2**63, "its header alone would have 9223372036854775808"),
        (b" " * (MAX_HEADER_BYTES + 1), None, f"a header of {MAX_HEADER_BYTES + 1} bytes, at most {MAX_HEADER_BYTES}"),
        (b"[]", None, "the header must hold a JSON object, not list"),
        (b"{" * 10_000, None, "the header is not valid JSON"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, "nested too deeply"),
        (b'{"a":1,"a":2}', None, "the field 'a' is there twice"),
        (b"\xff\xfe", None, "the header is not valid JSON"),
        (
            json.dumps({"a": tensor | {"data_offsets": [0, 2**62]}}).encode(),
            None,
            "is truncated or no safetensors file",
        ),
        (json.dumps({"a": tensor | {"data_offsets": [16, 0]}}).encode(), None, "is truncated or no safetensors file"),
        (json.dumps({"a": tensor, "b": tensor}).encode(), None, "is truncated or no safetensors file"),
        (json.dumps({"a": tensor | {"shape": [2**62, 2**62]}}).encode(), None, "is truncated or no safetensors file"),
        (json.dumps({"a": tensor | {"shape": [-4]}}).encode(), None, "is truncated or no safetensors file"),
        (json.dumps({"a": tensor | {"dtype": "X"}}).encode(), None, "is truncated or no safetensors file"),
        (json.dumps({"a": 5}).encode(), None, "is truncated or no safetensors file"),
    ]
    for header, length, message in cases:
        _with_header(folder, header, length, bytes(16))
        with pytest.raises(ConfigError, match=message) as error:
            load_decoder(folder)
        assert str(folder / WEIGHTS) in error.value.message
        assert len(error.value.message) < 600
