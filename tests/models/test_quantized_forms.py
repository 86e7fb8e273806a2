"""Every quantized form of a checkpoint: the numbers that it stands for, whole and in parts, or a refusal by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.engine.runner.pool.memory_needs import weight_bytes
from pdserve.kernels.native.native_library import built_library
from pdserve.models.loading import load_decoder
from pdserve.models.model_impl import load_model_decoder
from pdserve.models.read_config import read_config
from pdserve.models.weights.open_weights import open_weights
from pdserve.models.weights.quantized.quantization_method import MODELOPT_FILE
from pdserve.models.weights.rank_shard import Part, RankShard
from pdserve.models.weights.weight_loader import LoadProgress
from tests.support.engine.thread_ranks import ThreadRank, on_all_ranks
from tests.support.kernels.paged_run import PagedRun
from tests.support.models.checkpoints import edit_json, make_checkpoint, make_other_family
from tests.support.models.quantized_checkpoints import FORMS, quantize_folder

SIZES: dict[str, Any] = {"intermediate_size": 128, "hidden_size": 128, "head_dim": 16, "num_attention_heads": 4}


@pytest.mark.parametrize("name", FORMS)
def test_weights_are_those_that_the_form_stands_for(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen2", **SIZES)
    meant = quantize_folder(folder, FORMS[name], keep=("layers.1.mlp",))
    config = read_config(folder)
    assert config.unknown_fields == ()
    with open_weights(folder, config.stored_quantization) as weights:
        assert set(weights.names) == set(meant)
        for weight, numbers in meant.items():
            shape = tuple(numbers.shape)
            assert torch.equal(weights.read(weight, shape), numbers), weight
            if len(shape) == 2 and ".layers." in weight:
                rows, columns = shape
                for part in (Part(0, rows // 2, rows), Part(0, 8, 24), Part(1, columns // 4, columns // 2)):
                    assert torch.equal(weights.read(weight, shape, part=part), numbers[part.slices(2)]), (weight, part)
    load_decoder(folder, dtype="bfloat16")


@pytest.mark.parametrize("name", FORMS)
def test_integers_in_groups_stand_for_the_same_numbers(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", **SIZES)
    meant = quantize_folder(folder, FORMS[name])
    config = read_config(folder)
    has_groups = not any(part in name for part in ("order of activations", "uneven", "2 bits", "bitsandbytes"))
    is_float = any(part in name for part in ("fp8", "FP8"))
    with open_weights(folder, config.stored_quantization) as weights:
        for weight in (name for name in meant if name.endswith("_proj.weight")):
            stored = weights.stored(weight)
            assert stored is not None
            form = stored.group_form
            assert (form is not None) == has_groups
            if form is None:
                continue
            for start, stop in ((0, stored.shape[0]), (8, 24)):
                found = stored.grouped(start, stop)
                assert (found.num_bits, found.group_size, found.offsets is not None, found.is_float) == form
                largest = meant[weight].abs().max()
                assert (found.widened() - meant[weight][start:stop]).abs().max() < 1e-6 * largest
    whole = weight_bytes(folder, "bfloat16")
    on_gpu = weight_bytes(folder, "bfloat16", quantization="stored", device="cuda")
    # the interpreter's machine has no GPU, and may have no Triton
    assert on_gpu < 0.9 * whole if has_groups and find_spec("triton") else on_gpu == whole
    if has_groups and built_library() is not None:
        small = weight_bytes(folder, "bfloat16", quantization="stored")
        assert small == whole if is_float else small < 0.9 * whole
        kept: list[LoadProgress] = []
        load_decoder(folder, dtype="bfloat16", quantization="stored", progress=kept.append)
        assert kept[-1].kept_bytes == small


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["W4A16", "W8A16 per channel", "AWQ", "NVFP4 of compressed-tensors"])
def test_logits_of_matrices_that_are_kept_small(name: str, size: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen2", **SIZES)
    quantize_folder(folder, FORMS[name], keep=("k_proj", "layers.1.mlp.up_proj"))
    steps: list[dict[str, Sequence[int]]] = [{"a": [3, 14, 15, 92, 65]}, {"a": [35]}, {"a": [89]}]

    def logits(form: Any) -> Any:
        def compute(rank: ThreadRank) -> list[Tensor]:
            shard = RankShard(rank.rank, rank.size, rank)
            run = PagedRun(load_decoder(folder, quantization=form, shard=shard), shard=shard)
            return [run.step({}, step)["a"] for step in steps]

        return torch.cat(on_all_ranks(size, compute)[0])

    torch.testing.assert_close(logits("stored"), logits(None), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["fp8 in blocks", "NVFP4 of ModelOpt", "AWQ"])
def test_experts_of_a_mixture(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_moe", **SIZES, num_experts=3, moe_intermediate_size=64)
    meant = quantize_folder(folder, FORMS[name])
    plain = make_checkpoint(tmp_path / "plain", "qwen3_moe", **SIZES, num_experts=3, moe_intermediate_size=64)
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    one, other = (PagedRun(load_decoder(path)).step({}, {"a": [3, 14, 15, 92]})["a"] for path in (folder, plain))
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["W4A16", "GPTQ in order of activations"])
def test_a_last_group_with_fewer_inputs(name: str, tmp_path: Path) -> None:
    """48 inputs in groups of 32: two scales, of 32 and of 16 inputs."""
    folder = make_checkpoint(tmp_path / "model", "llama", **SIZES | {"intermediate_size": 48})
    meant = quantize_folder(folder, FORMS[name])
    with open_weights(folder, read_config(folder).stored_quantization) as weights:
        weight = "model.layers.0.mlp.down_proj.weight"
        assert torch.equal(weights.read(weight, (128, 48)), meant[weight])
        stored = weights.stored(weight)
        assert stored is not None
        assert stored.group_form is None


def test_code_of_transformers_gets_widened_weights(tmp_path: Path) -> None:
    make_other_family(tmp_path / "model", "stablelm", hidden_size=64, intermediate_size=128)
    (tmp_path / "plain").mkdir()
    for path in (tmp_path / "model").iterdir():
        (tmp_path / "plain" / path.name).write_bytes(path.read_bytes())
    meant = quantize_folder(tmp_path / "model", FORMS["W4A16"])
    save_file(meant, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    one, other = (
        PagedRun(load_model_decoder(tmp_path / name)).step({}, {"a": [3, 14, 15, 92]})["a"]
        for name in ("model", "plain")
    )
    assert torch.equal(one, other)


def test_the_file_of_modelopt_counts_where_config_json_says_nothing(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen2", **SIZES)
    meant = quantize_folder(folder, FORMS["NVFP4 of ModelOpt"])
    edit_json(folder / "config.json", quantization_config=...)
    said = {
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        }
    }
    (folder / MODELOPT_FILE).write_text(json.dumps(said))
    with open_weights(folder, read_config(folder).stored_quantization) as weights:
        name = "model.layers.0.mlp.up_proj.weight"
        assert torch.equal(weights.read(name, tuple(meant[name].shape)), meant[name])


def _edit(folder: Path, **changes: Tensor | None) -> None:
    weights = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, tensor in changes.items():
        full = f"model.layers.0.mlp.up_proj.{name}"
        assert full in weights
        del weights[full]
        if tensor is not None:
            weights[full] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


BROKEN: list[tuple[str, dict[str, Tensor | None], str]] = [
    ("fp8 in blocks", {"weight_scale_inv": torch.ones(3, 3)}, r"weight_scale_inv has shape \[3, 3\], \[8, 4\] is expected"),
    ("fp8 in blocks", {"weight_scale_inv": torch.zeros(8, 4)}, "weight_scale_inv has a scale that is not a positive number"),
    ("fp8 in blocks", {"weight_scale_inv": torch.full((8, 4), torch.nan)}, "is not a positive number"),
    ("fp8 in blocks", {"weight_scale_inv": None}, r"up_proj\.weight has dtype F8_E4M3; read are F32, BF16, F16"),
    ("fp8 in blocks", {"weight": None}, r"up_proj\.weight is in none of model\.safetensors"),
    ("fp8 in blocks", {"weight": torch.ones(128, 128)}, r"up_proj\.weight has dtype F32; read are I8, F8_E4M3"),
    ("NVFP4 of ModelOpt", {"weight_scale": torch.ones(128, 7).to(torch.float8_e4m3fn)}, r"\[128, 8\] is expected"),
    ("NVFP4 of ModelOpt", {"weight_scale_2": torch.tensor(torch.inf)}, "weight_scale_2 is not one positive number"),
    ("NVFP4 of ModelOpt", {"weight_scale_2": None}, r"up_proj\.weight_scale has dtype F8_E4M3; read are F32, BF16, F16"),
    ("W4A16", {"weight_shape": torch.tensor([128, 127])}, r"stands for shape \[128, 127\], config\.json says \[128, 128\]"),
    ("W4A16", {"weight_shape": torch.tensor([128, 4000])}, "has 16 numbers in a row, which 4000 numbers of 4 bits do not fill"),
    ("W4A16", {"weight_scale": torch.ones(128, 3)}, "weight_scale has shape .*, 4 groups of 32 for 128 inputs is expected"),
    ("W4A16", {"weight_scale": None}, r"up_proj\.weight_scale is in none of"),
    ("W4A16 in order of activations", {"weight_g_idx": torch.full((128,), 99)}, "has a group that is not one of 8"),
    ("GPTQ", {"qzeros": torch.zeros(8, 3, dtype=torch.int32)}, r"qzeros has shape \[8, 3\], config.json says \[8, 16\]"),
    ("GPTQ", {"g_idx": torch.full((128,), -1, dtype=torch.int32)}, "g_idx has a group that is not one of 8"),
    ("GPTQ", {"scales": torch.ones(8, 7).half()}, r"scales has shape \[8, 7\], \[GROUPS, 128\] is expected"),
    ("AWQ", {"scales": torch.ones(7, 128).half()}, r"qzeros has shape \[8, 16\], config.json says \[7, 16\]"),
    (
        "AWQ", {"scales": torch.ones(7, 128).half(), "qzeros": torch.zeros(7, 16, dtype=torch.int32)},
        r"scales has shape \[7, 128\], 8 groups of 16 for 128 inputs is expected",
    ),
    ("AWQ", {"qzeros": None}, r"up_proj\.qzeros is in none of"),
    (
        "bitsandbytes", {"weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b"[]"), dtype=torch.uint8)},
        "bitsandbytes__nf4 is no JSON object",
    ),
    (
        "bitsandbytes", {"weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b"{}"), dtype=torch.uint8)},
        "shape must be two positive numbers",
    ),
    ("bitsandbytes", {"weight.absmax": torch.ones(3)}, r"absmax has shape \[3\], config.json says \[256\]"),
]  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize(("name", "changes", "message"), BROKEN)
def test_a_broken_file_is_one_sentence(
    name: str, changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen2", **SIZES)
    quantize_folder(folder, FORMS[name])
    _edit(folder, **changes)
    with pytest.raises((ConfigError, UnsupportedModel), match=message):
        load_decoder(folder)


UNREAD: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "quark"}, "weights are quantized by quark; read are compressed-tensors, fp8"),
    ({"quant_method": "hqq"}, "weights are quantized by hqq"),
    ({"bits": 4}, r"by a method that it does not name \(quant_method\)"),
    ({"quant_method": "gptq", "bits": 3}, "bits is 3; read is 2, 4 and 8"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, 'checkpoint_format is "marlin"; read is gptq'),
    ({"quant_method": "awq", "version": "gemv"}, 'version is "gemv"; read is "gemm"'),
    ({"quant_method": "awq", "bits": 8}, "bits is 8; read is 4"),
    (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "load_in_4bit is null; read are weights that are stored in four",
    ),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, 'quant_algo is "W4A8_AWQ"; read is FP8, NVFP4'),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size is 32; read is 16"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, 'fmt is "e5m2"; read is "e4m3"'),
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, 'expert_dtype is "fp4", which is not read'),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two positive numbers"),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "marlin-24",
            "config_groups": {"a": {"weights": {"num_bits": 4}}},
        },
        "format is 'marlin-24'; read are int-quantized",
    ),
]


@pytest.mark.parametrize(("config", "message"), UNREAD)
def test_what_is_not_read_is_named(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    edit_json(folder / "config.json", quantization_config=config)
    with pytest.raises((UnsupportedModel, ConfigError), match=message):
        read_config(folder)
