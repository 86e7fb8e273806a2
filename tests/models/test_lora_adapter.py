"""PEFT folders: what is read, and what is refused by name before a tensor is built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.common.errors import ConfigError
from pdserve.models.loading import load_decoder
from pdserve.models.lora import lora_adapter
from pdserve.models.lora.lora_adapter import LoraAdapter, read_adapter
from pdserve.models.lora.lora_targets import LoraTargets, with_lora_targets
from tests.support.models.lora_adapters import make_adapter


@pytest.fixture(scope="module")
def base(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture(scope="module")
def targets(base: Path) -> LoraTargets:
    return with_lora_targets(load_decoder(base), max_loras=1, max_rank=8)[1]


def config_with(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def weights_with(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def read(folder: Path, targets: LoraTargets) -> LoraAdapter:
    return read_adapter(folder, targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_folder_is_read_in_every_dtype(tmp_path: Path, base: Path, targets: LoraTargets, dtype: torch.dtype) -> None:
    adapter = read(make_adapter(tmp_path, base, dtype=dtype), targets)
    assert set(adapter.weights) == set(targets.by_name)
    assert {matrices.a.dtype for matrices in adapter.weights.values()} == {torch.float32}
    assert (adapter.rank, adapter.nbytes) == (
        4,
        sum(4 * 4 * (t.in_size + t.out_size) for t in targets.by_name.values()),
    )


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path, base: Path, targets: LoraTargets) -> None:
    first = read(make_adapter(tmp_path / "a", base, seed=1), targets).fingerprint
    assert first == read(make_adapter(tmp_path / "b", base, seed=1), targets).fingerprint
    assert first != read(make_adapter(tmp_path / "c", base, seed=2), targets).fingerprint
    assert first != read(make_adapter(tmp_path / "d", base, seed=1, alpha=9), targets).fingerprint
    assert len(first) == 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, 'peft_type is "IA3", only LORA'),
        ({"peft_type": None}, "peft_type is null, only LORA"),
        ({"task_type": "SEQ_CLS"}, 'task_type is "SEQ_CLS", only CAUSAL_LM'),
        ({"use_dora": True}, "use_dora is true, which is not served"),
        ({"bias": "all"}, 'bias is "all", only none'),
        ({"lora_bias": True}, "lora_bias is true"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \[.lm_head.\]"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern is"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is true"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa", which changes the base'),
        ({"init_lora_weights": ["a"]}, "init_lora_weights is"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
        ({"new_mathematics": 0.5}, "new_mathematics is 0.5, which is not served"),
        ({"r": 9}, "r is 9, max_lora_rank is 8"),
        ({"r": 0}, "r must be an integer of at least 1"),
        ({"r": 2}, r"shape \[4, 96\], the model and r need \[2, 96\]"),
        ({"lora_alpha": 0}, "lora_alpha must be a positive number"),
        ({"lora_alpha": "8"}, "lora_alpha must be a positive number"),
        ({"use_rslora": 1}, "use_rslora must be true or false"),
        ({"target_modules": ["nothing"]}, "target_modules names 'nothing', and no tensor"),
        ({"target_modules": [1]}, "target_modules must be a list of names"),
    ],
)
def test_fields_of_other_mathematics_are_refused(
    tmp_path: Path, base: Path, targets: LoraTargets, fields: dict[str, Any], message: str
) -> None:
    make_adapter(tmp_path, base)
    config_with(tmp_path, **fields)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, targets)


@pytest.mark.parametrize(
    "fields", [{"target_modules": ".*_proj"}, {"init_lora_weights": "gaussian"}, {"use_dora": False}]
)
def test_fields_without_effect_are_passed_over(
    tmp_path: Path, base: Path, targets: LoraTargets, fields: dict[str, Any]
) -> None:
    make_adapter(tmp_path, base)
    config_with(tmp_path, **fields)
    assert read(tmp_path, targets).rank == 4


PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


def _rename(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{PREFIX}.lora_A.weight"), "lora_A or lora_B is missing for model.layers.0.self_attn.q_proj"),
        (lambda t: t.update({f"{PREFIX}.lora_magnitude_vector": torch.ones(64)}), "lora_magnitude_vector is no lora_A"),
        (lambda t: t.update({f"{PREFIX}.lora_B.bias": torch.ones(64)}), "lora_B.bias is no lora_A"),
        (lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(2, 2)}), "lm_head.weight is no lora_A"),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}),
            "no adapter is served for this module; there are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
        ),
        (lambda t: _rename(t, f"{PREFIX}.lora_A.weight", "q.lora_A.weight"), "q.lora_A.weight is no lora_A"),
        (lambda t: t.update({f"{PREFIX}.lora_A.weight": torch.ones(4, 63)}), r"has shape \[4, 63\]"),
        (lambda t: t.update({f"{PREFIX}.lora_B.weight": torch.ones(64, 5)}), r"has shape \[64, 5\]"),
        (lambda t: t.update({f"{PREFIX}.lora_A.weight": torch.ones(4, 64).int()}), "has dtype I32"),
        (lambda t: t.update({f"{PREFIX}.lora_A.weight": torch.full((4, 64), torch.nan)}), "NaN or infinite"),
        (lambda t: t.clear(), "has no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, base: Path, targets: LoraTargets, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    make_adapter(tmp_path, base)
    weights_with(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, targets)


def test_files_that_are_no_adapters_are_refused(tmp_path: Path, base: Path, targets: LoraTargets) -> None:
    folder = make_adapter(tmp_path / "a", base)
    path = folder / "adapter_model.safetensors"
    whole = path.read_bytes()
    for content, message in (
        (b"", "truncated or no safetensors file"),
        (whole[: len(whole) // 2], "truncated or no safetensors file"),
        (b"\xff" * 64, "truncated or no safetensors file"),
        (whole + b"0" * (8 << 20), "more than"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read(folder, targets)
    path.rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"has adapter_model.bin, only adapter_model.safetensors is read"):
        read(folder, targets)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        read(folder, targets)


def test_no_tensor_is_built_before_all_fit(
    tmp_path: Path, base: Path, targets: LoraTargets, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_adapter(tmp_path, base)
    weights_with(folder, lambda t: t.update({f"{PREFIX}.lora_B.weight": torch.ones(64, 5)}))
    monkeypatch.setattr(lora_adapter, "load_safetensors", lambda data: pytest.fail("built"))
    with pytest.raises(ConfigError, match="has shape"):
        read(folder, targets)


def test_experts_take_no_adapter(tmp_path: Path, tiny_checkpoints: Callable[..., Path]) -> None:
    base = tiny_checkpoints("qwen3_moe")
    targets = with_lora_targets(load_decoder(base), max_loras=1, max_rank=8)[1]
    assert {name.rsplit(".", 1)[1] for name in targets.by_name} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    folder = make_adapter(tmp_path, base)
    with pytest.raises(ConfigError, match=r"experts.0.*: no adapter is served for this module"):
        read(folder, targets)
