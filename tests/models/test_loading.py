"""Model folders that load, and folders that say what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, make_checkpoint
from safetensors.torch import load_file, save_file

from pdserve.common.errors import ConfigError
from pdserve.models.loading import LoadProgress, load_decoder

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
    _change_weights(folder, lm_head__weight=torch.zeros(320, 64))
    load_decoder(folder)


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


def test_an_index_may_not_name_files_elsewhere(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../model/model.safetensors"
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


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_weights_of_other_dtypes_are_refused(folder: Path, dtype: torch.dtype) -> None:
    _change_weights(folder, model__norm__weight=torch.ones(64).to(dtype))
    with pytest.raises(ConfigError, match=rf"model\.norm\.weight has dtype {dtype}"):
        load_decoder(folder)
