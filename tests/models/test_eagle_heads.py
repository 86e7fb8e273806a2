"""Folders of EAGLE-3 heads that are refused, by the field or the weight."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pdserve.common.errors import ConfigError, PdServeError, UnsupportedModel
from pdserve.models.eagle_head import read_eagle_config
from pdserve.models.loading import load_decoder
from pdserve.models.read_config import read_config
from tests.support.models.draft_heads import EagleModel
from tests.support.models.family_checkpoints import cases, make_family


@pytest.fixture
def model(tmp_path: Path) -> EagleModel:
    return EagleModel(tmp_path / "model", tmp_path / "head")


def load(model: EagleModel) -> Any:
    config = read_eagle_config(model.head, read_config(model.folder, "float32"))
    return load_decoder(model.folder, dtype="float32", draft_head=config)


def edited(model: EagleModel, **changes: Any) -> None:
    path = model.head / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"hidden_size": 32}, ConfigError, "hidden_size must be 64, as the model needs it, not 32"),
        ({"vocab_size": 300, "draft_vocab_size": 200}, ConfigError, "vocab_size must be 320"),
        ({"num_hidden_layers": 2}, ConfigError, "num_hidden_layers must be 1"),
        ({"draft_vocab_size": 321}, ConfigError, "draft_vocab_size"),
        ({"norm_before_fc": True}, UnsupportedModel, "norm_before_fc is true"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedModel, "use_aux_hidden_state is false"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, ConfigError, "3 ascending numbers of the model's 7 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}, ConfigError, "3 ascending numbers of the model's 7 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}, ConfigError, "3 ascending numbers of the model's 7 layers"),
        ({"architectures": ["LlamaForCausalLM"]}, UnsupportedModel, "LlamaForCausalLM is no draft head"),
        ({"attention_multiplier": 3.0}, UnsupportedModel, "attention_multiplier is 3.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_configurations(model: EagleModel, changes: dict[str, Any], kind: type[PdServeError], message: str) -> None:
    edited(model, **changes)
    with pytest.raises(kind, match=message):
        load(model)


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "midlayer.hidden_norm.weight", "lm_head.weight"])
def test_missing_weights(model: EagleModel, name: str) -> None:
    save_file({each: value for each, value in model.weights.items() if each != name}, model.head / "model.safetensors")
    with pytest.raises(ConfigError, match=name):
        load(model)


def test_token_ids(model: EagleModel) -> None:
    path = model.head / "model.safetensors"
    save_file({name: value for name, value in model.weights.items() if name != "d2t"}, path)
    with pytest.raises(ConfigError, match="d2t is missing, and draft_vocab_size is 200 of 320 tokens"):
        load(model)
    save_file({**model.weights, "d2t": torch.full((model.VOCAB,), 200)}, path)
    with pytest.raises(ConfigError, match="d2t: tokens outside the vocabulary of 320"):
        load(model)
    save_file({**model.weights, "d2t": torch.zeros(10, dtype=torch.int64)}, path)
    with pytest.raises(ConfigError, match="d2t"):
        load(model)


def test_other_taps_and_names(model: EagleModel) -> None:
    """The layer by its other name, the inputs of other layers, and an embedding of the head's own."""
    edited(model, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 6]})
    renamed = {name.replace("midlayer", "layers.0"): value for name, value in model.weights.items()}
    hidden = model.weights["norm.weight"].shape[0]
    save_file({**renamed, "embed_tokens.weight": torch.randn(320, hidden)}, model.head / "model.safetensors")
    head = load(model).draft_head
    assert head.tapped_layers == (0, 3, 6)
    assert head.embedding is not None
    assert head.embedding(torch.tensor([319])).shape == (1, hidden)


def test_a_model_with_few_layers(tmp_path: Path) -> None:
    model = EagleModel(tmp_path / "model", tmp_path / "head", num_hidden_layers=5)
    with pytest.raises(ConfigError, match="eagle_aux_hidden_state_layer_ids is missing, and the model has 5 layers"):
        load(model)


def test_a_model_whose_layers_have_other_numbers(model: EagleModel, tmp_path: Path) -> None:
    folder = tmp_path / "falcon"
    folder.mkdir()
    make_family(folder, "falcon_h1", cases("falcon_h1")[0])
    config = replace(read_config(folder, "float32"), hidden_size=64, vocab_size=320)
    with pytest.raises(UnsupportedModel, match="FalconH1ForCausalLM, whose layers are not computed one by one"):
        read_eagle_config(model.head, config)
