"""Adapters of models with images: the names that PEFT gave their modules, and refusals of modules of the vision encoder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.models.loading import load_decoder
from pdserve.models.lora.lora_adapter import WEIGHTS_FILE, read_adapter
from pdserve.models.lora.lora_targets import LoraTargets, with_lora_targets
from tests.support.models.image_checkpoints import make_image_checkpoint
from tests.support.models.lora_adapters import make_adapter

Rename = Callable[[str], str]
PREFIXES = ("model.language_model.", "model.", "language_model.model.")
"""Before `layers`, by versions of transformers."""


class Base(NamedTuple):
    folder: Path
    targets: LoraTargets


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = make_image_checkpoint(tmp_path_factory.mktemp("qwen2_5_vl"))
    return Base(folder, with_lora_targets(load_decoder(folder), max_loras=1, max_rank=4)[1])


def renamed(folder: Path, rename: Rename) -> Path:
    """The adapter with other names of its tensors."""
    path = folder / WEIGHTS_FILE
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path)
    return folder


def with_prefix(prefix: str) -> Rename:
    """Rename modules of the language model."""
    return lambda name: re.sub(r"base_model\.model\..*layers\.", f"base_model.model.{prefix}layers.", name)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_modules_of_the_language_model_have_their_names_of_any_version(tmp_path: Path, base: Base, prefix: str) -> None:
    plain = read_adapter(make_adapter(tmp_path / "plain", base.folder), base.targets)
    assert set(plain.weights) == set(base.targets.by_name)
    whole_names = [f"{prefix}layers.{layer}.self_attn.q_proj" for layer in range(3)]
    folder = make_adapter(tmp_path / "other", base.folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"] = [*config["target_modules"][1:], *whole_names]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    found = read_adapter(renamed(folder, with_prefix(prefix)), base.targets)
    assert found.weights.keys() == plain.weights.keys()
    for name, matrices in found.weights.items():
        assert torch.equal(matrices.a, plain.weights[name].a)
        assert torch.equal(matrices.b, plain.weights[name].b)


@pytest.mark.parametrize(
    ("module", "part"),
    [
        ("model.visual.blocks.0.mlp.gate_proj", "vision encoder"),
        ("visual.blocks.2.attn.qkv", "vision encoder"),
        ("visual.merger.mlp.0", "merger"),
        ("model.visual.deepstack_merger_list.1.linear_fc1", "merger"),
    ],
)
def test_modules_of_the_vision_encoder_are_refused_by_name(tmp_path: Path, base: Base, module: str, part: str) -> None:
    folder = make_adapter(tmp_path, base.folder)
    path = folder / WEIGHTS_FILE
    matrices = {f"base_model.model.{module}.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"}
    save_file(load_file(path) | matrices, path)
    message = rf"{module}\.lora_A\.weight: target_modules reaches {module} in the {part}, and an image is encoded once"
    with pytest.raises(UnsupportedModel, match=message):
        read_adapter(folder, base.targets)


def test_an_adapter_of_all_layers_is_refused_by_the_name_of_one(tmp_path: Path, base: Base) -> None:
    """In float32 and with the largest rank it is longer than any that is served."""
    folder = make_adapter(tmp_path, base.folder, has_vision=True)
    with pytest.raises(
        UnsupportedModel, match=r"reaches (model\.)?visual\.blocks\.\d\.mlp\.\w+_proj in the vision encoder"
    ):
        read_adapter(folder, base.targets)


def test_two_names_of_one_module_are_refused(tmp_path: Path, base: Base) -> None:
    folder = renamed(make_adapter(tmp_path, base.folder), with_prefix(PREFIXES[0]))
    path = folder / WEIGHTS_FILE
    tensors = load_file(path)
    [one, *_] = tensors
    save_file(tensors | {with_prefix(PREFIXES[1])(one): tensors[one].clone()}, path)
    with pytest.raises(ConfigError, match=r"base_model\.\S+ and base_model\.\S+ are for the same module"):
        read_adapter(folder, base.targets)


def test_what_is_no_layer_is_refused_with_the_layers_that_are(tmp_path: Path, base: Base) -> None:
    folder = renamed(make_adapter(tmp_path, base.folder), lambda name: name.replace("q_proj", "query"))
    with pytest.raises(
        UnsupportedModel, match="no adapter is served for this module; there are q_proj, k_proj, v_proj"
    ):
        read_adapter(folder, base.targets)
