"""Models that the code of `transformers` computes, with our attention, against that code with its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.engine.runner.pool.memory_needs import weight_bytes
from pdserve.models.model_impl import AnyDecoder, load_model_decoder, read_model_config
from tests.support.kernels.paged_run import PagedRun
from tests.support.models.any_family import causal_families, float32_logits, make_any_family, refusal
from tests.support.models.checkpoints import edit_json

ATOL = 3e-4
ARCHITECTURES = dict(causal_families())
TOKENS = [5, 9, 200, 31, 7, 8]


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["starcoder2", "stablelm", "deepseek_v3", "cohere2", "dbrx"])
def test_a_family_without_code_of_ours(family: str, tmp_path: Path) -> None:
    """Windows; rotated parts of heads; experts, and values of another size than keys; scaled logits; a loop over chosen experts."""
    logits = float32_logits(tmp_path, family)
    assert logits.difference < ATOL
    assert len(set(logits.theirs.argmax(-1).tolist())) > 5, "the answers are degenerate and test nothing"


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("mamba", "it keeps another state than keys and values"),
        ("gptj", "its layers do not use the attention interface of transformers"),
        ("bart", "it has an encoder and a decoder"),
        ("gemma3n_text", "num_kv_shared_layers is 15: layers share keys and values"),
        ("diffllama", "attention 1 belongs to layer 0: a layer attends more than once"),
        (
            "jetmoe",
            "its code reads numbers of tensors to decide what it computes, and a trace without weights has none",
        ),
    ],
)
def test_a_family_that_cannot_be_served_is_refused_with_the_reason(family: str, message: str, tmp_path: Path) -> None:
    assert message in str(refusal(tmp_path, family, ARCHITECTURES[family]))


def test_a_model_whose_tokens_see_later_ones_is_refused(tmp_path: Path) -> None:
    refusal(tmp_path, "bert", "BertLMHeadModel")
    edit_json(tmp_path / "config.json", is_decoder=False)
    with pytest.raises(UnsupportedModel, match="its attention mask is neither causal nor a sliding window"):
        read_model_config(tmp_path)


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "foo"},
            "model_type 'foo': no native family computes it, nor does transformers [0-9.]+ have it$",
        ),
        ({"model_type": "foo", "auto_map": {"AutoConfig": "x.Y"}}, "the code that its auto_map names is never run"),
        ({"model_type": "stablelm"}, "Starcoder2ForCausalLM is not the causal language model of model_type 'stablelm'"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "weights are quantized by aqlm"),
        ({"num_key_value_heads": 3}, "Starcoder2ForCausalLM is not served: "),
        ({"hidden_size": "many"}, "transformers refuses it: .*hidden_size"),
        ({"num_hidden_layers": 5000}, r"it has 5000 layers \(1 to 4096\)"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refusal(tmp_path, "starcoder2", "Starcoder2ForCausalLM")
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises((ConfigError, UnsupportedModel), match=message):
        read_model_config(tmp_path, model_impl="transformers")


def _without(weights: dict[str, Tensor]) -> None:
    del weights["model.layers.1.mlp.c_fc.weight"]


def _with_another(weights: dict[str, Tensor]) -> None:
    weights["model.layers.7.mlp.c_fc.weight"] = torch.zeros(3)


def _cut(weights: dict[str, Tensor]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"][:5].clone()


def _not_a_number(weights: dict[str, Tensor]) -> None:
    weights["model.norm.weight"][3] = torch.nan


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without, "weight model.layers.1.mlp.c_fc.weight is missing"),
        (_with_another, "1 weights have no place: model.layers.7.mlp.c_fc.weight"),
        (_cut, r"model.norm.weight has shape \[5\], config.json says \[64\]"),
        (_not_a_number, "model.norm.weight has 1 values that are NaN or infinite"),
    ],
)
def test_weights_are_checked(change: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path) -> None:
    make_any_family(tmp_path, "starcoder2")
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        load_model_decoder(tmp_path)


def _logits(decoder: AnyDecoder) -> Tensor:
    return PagedRun(decoder).step({}, {"a": TOKENS})["a"]


def test_a_head_that_differs_from_its_embedding_is_used(tmp_path: Path) -> None:
    make_any_family(tmp_path, "starcoder2", tie_word_embeddings=True)
    tied = _logits(load_model_decoder(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(_logits(load_model_decoder(tmp_path)), tied)
    weights["lm_head.weight"] *= 2
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.allclose(_logits(load_model_decoder(tmp_path)), 2 * tied)


def test_dummy_weights_are_the_same_each_time_and_counted_without_a_file(tmp_path: Path) -> None:
    model = make_any_family(tmp_path, "starcoder2")
    read = weight_bytes(tmp_path, "float32")
    (tmp_path / "model.safetensors").unlink()
    one, two = (_logits(load_model_decoder(tmp_path, load_format="dummy")) for _ in range(2))
    assert torch.equal(one, two)
    assert weight_bytes(tmp_path, "float32", "dummy") == read == 4 * model.num_parameters()


@pytest.mark.few(1)
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_length_stay_and_bound_it(rope_type: str, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 500.0, "factor": 4.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.5] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
    logits = float32_logits(tmp_path, "starcoder2", rope_parameters=rope)
    assert logits.difference < ATOL
    config = read_model_config(tmp_path)
    assert config.max_position_embeddings == config.derived_max_model_len == (64 if rope_type == "longrope" else 256)


def test_a_family_with_the_class_of_a_native_one_and_its_own_configuration(tmp_path: Path) -> None:
    make_any_family(tmp_path, "internlm3")
    assert read_model_config(tmp_path).architecture == "LlamaForCausalLM"
    assert torch.equal(
        _logits(load_model_decoder(tmp_path)), _logits(load_model_decoder(tmp_path, model_impl="transformers"))
    )
    with pytest.raises(UnsupportedModel, match="model_type 'internlm3' is not that of LlamaForCausalLM"):
        read_model_config(tmp_path, model_impl="native")


def test_a_native_family_by_both_codes(tmp_path: Path) -> None:
    make_any_family(tmp_path, "qwen3")
    native, theirs = (load_model_decoder(tmp_path, model_impl=each) for each in ("native", "transformers"))
    assert type(native) is not type(theirs)
    assert torch.allclose(_logits(native), _logits(theirs), atol=ATOL)
    specs = [[config.attention_spec(layer) for layer in range(3)] for config in (native.config, theirs.config)]
    assert specs[0] == specs[1]
