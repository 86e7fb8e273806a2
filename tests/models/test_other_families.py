"""Checkpoints of other families under a supported name: answered as their own class answers, or refused by name.

Most decoder families have Llama's tensor names, so that a changed `architectures` is all it takes to load one.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.models.config import config_fields
from pdserve.models.config.family_fields import FAMILY_FIELDS
from pdserve.models.loading import load_decoder
from pdserve.models.registry import FAMILIES
from tests.support.models.checkpoints import VOCAB_SIZE, edit_json, make_checkpoint, make_other_family

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

GRANITE = {"attention_multiplier": 0.25}
"""At heads of 16 numbers this is every family's."""

SMALL_EXPERTS = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}

EQUAL: list[tuple[str, str, dict[str, Any]]] = [
    ("granite", "LlamaForCausalLM", GRANITE),
    ("granite", "MistralForCausalLM", GRANITE),
    ("smollm3", "LlamaForCausalLM", {"no_rope_layers": [1, 1, 1, 1]}),
    ("seed_oss", "Qwen2ForCausalLM", {}),
    ("ministral", "MistralForCausalLM", {"sliding_window": 9}),
]

REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("granite", "LlamaForCausalLM", {}, "attention_multiplier is 1.0, .* must be 0.25 or absent"),
    ("granite", "LlamaForCausalLM", GRANITE | {"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0"),
    ("granite", "Qwen2ForCausalLM", GRANITE | {"residual_multiplier": 0.22}, "residual_multiplier is 0.22"),
    ("granite", "MistralForCausalLM", GRANITE | {"logits_scaling": 8.0}, "logits_scaling is 8.0"),
    ("smollm3", "LlamaForCausalLM", {}, r"no_rope_layers is \[1, 1, 1, 0\]"),
    ("cohere", "LlamaForCausalLM", {}, "logit_scale|layer_norm_eps"),
    ("cohere2", "MistralForCausalLM", {}, "logit_scale|layer_norm_eps"),
    ("olmo", "LlamaForCausalLM", {}, "clip_qkv|input_layernorm"),
    ("olmo", "LlamaForCausalLM", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
    ("olmo2", "LlamaForCausalLM", {}, "input_layernorm"),
    ("gemma", "LlamaForCausalLM", {}, "hidden_act 'gelu_pytorch_tanh'"),
    ("gemma2", "LlamaForCausalLM", {}, "softcapping is"),
    ("gemma2", "Qwen3ForCausalLM", {}, "layer_types|softcapping"),
    ("vaultgemma", "MistralForCausalLM", {}, "softcapping is"),
    ("phi3", "LlamaForCausalLM", {}, "q_proj.weight"),
    ("seed_oss", "LlamaForCausalLM", {}, r"o_proj\.bias"),
    ("seed_oss", "MistralForCausalLM", {}, r"6|12 weights have no place"),
    ("ministral", "LlamaForCausalLM", {"sliding_window": 9}, "layer_types is"),
    ("ministral", "Qwen3ForCausalLM", {"sliding_window": 9}, "no sliding window is in use"),
    ("ministral3", "MistralForCausalLM", {}, "llama_4_scaling_beta is 0.1"),
    ("glm", "LlamaForCausalLM", {}, "partial_rotary_factor"),
    ("stablelm", "LlamaForCausalLM", {}, "partial_rotary_factor"),
    ("exaone4", "Qwen3ForCausalLM", {}, "sliding"),
    ("diffllama", "LlamaForCausalLM", {}, "lambda_std_dev"),
    ("hyperclovax", "LlamaForCausalLM", {}, "use_post_norm is true"),
    ("mixtral", "MistralForCausalLM", {}, "num_experts_per_tok is 2"),
    ("mixtral", "Qwen3MoeForCausalLM", {}, "q_norm"),
    ("qwen2_moe", "Qwen3MoeForCausalLM", {"num_experts": 4}, "shared_expert_intermediate_size is"),
    ("olmoe", "Qwen3MoeForCausalLM", {}, "q_norm.weight has shape"),
    ("qwen3", "Qwen3MoeForCausalLM", {}, r"mlp\.gate\.weight is in none of"),
    ("qwen3_moe", "Qwen3ForCausalLM", {}, "decoder_sparse_step is 1, which Qwen3ForCausalLM does not compute"),
    ("olmo3", "Qwen3ForCausalLM", {}, "differ between layers|layer_types"),
    ("arcee", "LlamaForCausalLM", {}, "hidden_act 'relu2'"),
    ("arcee", "LlamaForCausalLM", {"hidden_act": "silu"}, "gate_proj"),
    ("starcoder2", "Qwen2ForCausalLM", {}, "hidden_act"),
    ("hunyuan_v1_dense", "Qwen3ForCausalLM", {}, "q_norm|layernorm"),
    ("gemma2", "Gemma3ForCausalLM", {}, "attn_logit_softcapping is 50.0|known are full_attention"),
    ("gemma3_text", "Gemma2ForCausalLM", {}, "differ between layers"),
    (
        "gemma",
        "Gemma2ForCausalLM",
        {"hidden_activation": "gelu_pytorch_tanh"},
        "feedforward_layernorm.weight is in none",
    ),
    ("glm", "Glm4ForCausalLM", {}, "post_self_attn_layernorm.weight is in none"),
    ("olmo3", "Olmo2ForCausalLM", {}, "differ between layers"),
    ("granitemoe", "GraniteForCausalLM", {}, "num_experts_per_tok is 2"),
    (
        "dots1",
        "Glm4MoeForCausalLM",
        {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
        "sliding|norm",
    ),
    ("deepseek_v3", "Glm4MoeForCausalLM", {"num_key_value_heads": 4, **SMALL_EXPERTS}, "kv_lora_rank is 512"),
    ("mixtral", "MiniMaxM2ForCausalLM", {}, "q_norm"),
    ("glm4_moe", "Dots1ForCausalLM", SMALL_EXPERTS, "partial_rotary_factor"),
    ("glm4_moe", "SolarOpenForCausalLM", {**SMALL_EXPERTS, "use_qk_norm": True}, "partial_rotary_factor|use_qk_norm"),
    (
        "deepseek_v3",
        "YoutuForCausalLM",
        {"num_key_value_heads": 4, **SMALL_EXPERTS},
        "first_k_dense_replace is 3, which Youtu",
    ),
    (
        "qwen3_moe",
        "Qwen2MoeForCausalLM",
        {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2},
        "q_proj.bias is in none of",
    ),
    (
        "qwen3_moe",
        "OlmoeForCausalLM",
        {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2},
        "(decoder_sparse_step|moe_intermediate_size) is",
    ),
    ("ernie4_5", "Ernie4_5_MoeForCausalLM", {}, r"mlp\.gate\.weight is in none of"),
    ("axk1", "Glm4MoeLiteForCausalLM", {"num_key_value_heads": 4, **SMALL_EXPERTS}, "post_mlp_layernorm"),
    ("phimoe", "MixtralForCausalLM", {}, "lm_head_bias|no place|sliding"),
]

SAME_FIELDS_AND_TENSORS = ("helium", "ernie4_5")
"""Only their type tells them from Llama: they rotate neighbours."""


def _relabel(folder: Path, architecture: str) -> None:
    edit_json(folder / "config.json", architectures=[architecture], model_type=FAMILIES[architecture].model_type)


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "architecture", "options"), EQUAL)
def test_neutral_fields_change_nothing(
    family: str, architecture: str, options: dict[str, Any], tmp_path: Path, paged_run: Any
) -> None:
    model = make_other_family(tmp_path, family, **options)
    _relabel(tmp_path, architecture)
    tokens = torch.randint(0, VOCAB_SIZE, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens).logits[0]
    logits = paged_run(load_decoder(tmp_path)).step({}, {"a": tokens[0].tolist()})["a"]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


@pytest.mark.few(2)
@pytest.mark.parametrize(("family", "architecture", "options", "message"), REFUSED)
def test_other_mathematics_is_refused_by_name(
    family: str, architecture: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_other_family(tmp_path, family, **options)
    _relabel(tmp_path, architecture)
    with pytest.raises(ConfigError, match=message) as error:
        load_decoder(tmp_path)
    assert str(tmp_path) in error.value.message


@pytest.mark.parametrize("family", sorted({"granite", "smollm3", "seed_oss", "ministral", *SAME_FIELDS_AND_TENSORS}))
def test_a_type_that_is_not_the_architectures_is_refused(family: str, tmp_path: Path) -> None:
    """transformers goes by the type."""
    make_other_family(tmp_path, family)
    edit_json(tmp_path / "config.json", architectures=["LlamaForCausalLM"])
    with pytest.raises(UnsupportedModel, match=f"model_type '{family}' is not that of LlamaForCausalLM"):
        load_decoder(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sliding_window": 40}, "sliding_window is 40"),
        ({"sliding_window": 40, "use_sliding_window": True}, "sliding_window is 40"),
        ({"is_causal": False}, "is_causal is false, .* must be true or absent"),
        ({"clip_qkv": 1}, "clip_qkv is 1"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar is 256, .* must be 16 or absent"),
        ({"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0, .* must be absent, null or false"),
        ({"qk_layernorm": True}, "qk_layernorm is true"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config is"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is"),
        ({"num_local_experts": 8}, "num_local_experts is 8, .* must be 0 or absent"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 4}, "no_rope_layers is null"),
        ({"some_new_multiplier": 3}, "some_new_multiplier is 3"),
        ({"norm_eps": 1e-3}, "norm_eps is 0.001, .* must be 1e-06 or absent"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, r"mrope_section is \[2, 3, 3\]"),
        ({"rope_parameters": {"rope_type": "default", "short_mscale": 1.2}}, "short_mscale is 1.2"),
    ],
)
def test_single_fields_of_other_mathematics(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    edit_json(make_checkpoint(tmp_path) / "config.json", **fields)
    with pytest.raises(UnsupportedModel, match=message):
        load_decoder(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5, .* must be 1 or absent"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1, .* must be 0 or absent"),
        ({"scoring_func": "sigmoid"}, 'scoring_func is "sigmoid"'),
        ({"n_group": 4, "topk_group": 2}, "n_group is 4"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types is"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, not 1"),
        ({"num_experts": 4}, "num_local_experts must be num_experts .4., not 8"),
        ({"num_experts": 10**9}, "num_experts must be at most"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_experts .8., not 9"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be an integer of at least 1"),
        (
            {"moe_intermediate_size": 49},
            r"experts\.0\.gate_proj\.weight has shape \[48, 64\], config\.json says \[49, 64\]",
        ),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer of at least 1"),
        ({"decoder_sparse_step": 2}, r"mlp\.gate_proj\.weight is in none of"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers must be a list of layer numbers"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list"),
        ({"num_experts": 7, "num_local_experts": 7}, r"\[8, 64\], config\.json says \[7, 64\]"),
    ],
)
def test_fields_of_a_mixture_of_experts(
    fields: dict[str, Any], message: str, tiny_checkpoints: Any, tmp_path: Path
) -> None:
    source = tiny_checkpoints("qwen3_moe")
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    edit_json(tmp_path / "config.json", **fields)
    with pytest.raises(ConfigError, match=message):
        load_decoder(tmp_path)


def test_fields_that_change_no_logit_pass_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    harmless: dict[str, Any] = {
        "_name_or_path": "somebody/model", "unsloth_version": "2026.1", "pretraining_tp": 2, "attention_dropout": 0.5,
        "id2label": {"0": "A"}, "auto_map": {"AutoConfig": "x.Y"}, "use_mrope": False, "summary_type": "last",
        "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28, "is_decoder": True,
        "router_aux_loss_coef": 0.1, "image_token_id": 9, "num_experts": 0, "embedding_multiplier": 1,
        "attn_logit_softcapping": None, "qk_layernorm": False, "n_embd": 64, "is_causal": True, "rope_scaling": None,
        "temperature": 0.6, "layer_norm_eps": 1e-6, "position_embedding_type": "rope", "model_max_length": 99,
        "no_rope_layers": [1, 1], "no_rope_layer_interval": 4, "query_pre_attn_scalar": 16, "pruned_heads": {},
    }  # fmt: skip
    edit_json(make_checkpoint(tmp_path) / "config.json", **harmless)
    with caplog.at_level(logging.WARNING):
        load_decoder(tmp_path)
    assert not caplog.records


def test_a_window_that_no_sequence_reaches_changes_nothing(tmp_path: Path) -> None:
    edit_json(make_checkpoint(tmp_path) / "config.json", sliding_window=4096)
    load_decoder(tmp_path)


def test_unknown_fields_give_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_json(make_checkpoint(tmp_path) / "config.json", favourite_colour="blue", training_notes={"a": 1})
    with caplog.at_level(logging.WARNING):
        load_decoder(tmp_path)
    [record] = caplog.records
    assert "favourite_colour, training_notes" in record.getMessage()


def test_every_field_of_the_installed_transformers_is_known() -> None:
    """A field that a new release brings is judged before it can be overlooked."""
    generic = {field.name for field in dataclasses.fields(CONFIG_MAPPING["llama"].__mro__[1])}
    known = FAMILY_FIELDS | config_fields.READ | config_fields.HARMLESS | generic
    missing = {
        f"{family}: {field.name}"
        for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        for field in dataclasses.fields(CONFIG_MAPPING[family])
        if field.name not in known and not config_fields.HARMLESS_NAMES.fullmatch(field.name)
    }
    assert not missing
