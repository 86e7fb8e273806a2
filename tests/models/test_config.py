"""Reading `config.json`: both generations of field names, each family's defaults, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.families.qwen3 import Qwen3
from pdserve.models.loading import load_decoder
from pdserve.models.read_config import read_config
from pdserve.models.transformers.read_transformers_config import read_transformers_config
from pdserve.router.bodies.client_bodies import model_len_of
from pdserve.text.audio.audio_processor import AudioProcessor
from pdserve.text.images.image_processor import ImageProcessor
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.models.checkpoints import ARCHITECTURES, edit_json, make_checkpoint
from tests.support.models.family_checkpoints import cases, make_family

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def _read(folder: Path, wanted_dtype: str = "auto", /, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**FIELDS, **fields}))
    return read_config(folder, wanted_dtype)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_defaults_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    make_config = ARCHITECTURES[architecture][0]
    expected = make_config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, layer_types=None
    )
    name = ARCHITECTURES[architecture][1].__name__
    found = _read(tmp_path, architectures=[name], num_key_value_heads=2)
    assert found.head_dim == (getattr(expected, "head_dim", None) or 8)
    assert found.rms_norm_eps == expected.rms_norm_eps
    assert found.rope.theta == expected.rope_parameters["rope_theta"]
    assert found.tie_word_embeddings == expected.tie_word_embeddings
    assert found.sliding_windows == (expected.sliding_window if architecture == "mistral" else None,) * 3
    assert found.dtype == "float32"


def test_dimensions_and_kv_layout(tmp_path: Path) -> None:
    config = read_config(make_checkpoint(tmp_path, "qwen3", dtype="bfloat16", attention_bias=True))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert config.family == Qwen3(sliding_windows=(None, None), qkv_bias=True, output_bias=True)
    assert config.dtype == "bfloat16"
    layout = config.kv_layout(8, "ab" * 16)
    assert layout.shapes[0].dims == (2, 2, 2, 8, 16)
    assert layout.shapes[0].block_bytes == 2 * 2 * 2 * 8 * 16 * 2
    assert read_config(tmp_path, "float16").kv_layout(8, "").shapes[0].dtype == "float16"


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (None, None, None)),
        ({"sliding_window": 9}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}, (None, None, 9)),
        ({"use_sliding_window": True, "sliding_window": None}, (None, None, None)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096, 4096, 4096)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (5, None, 5),
        ),
    ],
)
def test_qwen_windows(fields: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    read = _read(tmp_path, architectures=["Qwen2ForCausalLM"], num_key_value_heads=2, **fields)
    assert read.sliding_windows == windows


def test_mistral_null_window_is_none(tmp_path: Path) -> None:
    config = _read(tmp_path, architectures=["MistralForCausalLM"], num_key_value_heads=2, sliding_window=None)
    assert config.sliding_windows == (None, None, None)


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert _read(tmp_path).eos_token_ids == ()
    assert _read(tmp_path, eos_token_id=7, bos_token_id=3).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    config = _read(tmp_path, eos_token_id=7, bos_token_id=3)
    assert (config.eos_token_ids, config.bos_token_id) == ((5, 6), 3)
    edit_json(tmp_path / "generation_config.json", eos_token_id=0)
    assert _read(tmp_path, eos_token_id=7).eos_token_ids == (0,)


def test_dtype_names(tmp_path: Path) -> None:
    assert _read(tmp_path, torch_dtype="bfloat16").dtype == "bfloat16"
    assert _read(tmp_path, dtype="float16", torch_dtype="bfloat16").dtype == "float16"
    assert _read(tmp_path, "float32", dtype="float16").dtype == "float32"
    with pytest.raises(ConfigError, match="int8"):
        _read(tmp_path, "int8")
    with pytest.raises(UnsupportedModel, match="float8_e4m3fn"):
        _read(tmp_path, dtype="float8_e4m3fn")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"])
def test_a_null_number_of_kv_heads_is_that_of_heads(architecture: str, tmp_path: Path) -> None:
    config = _read(tmp_path, architectures=[architecture], num_key_value_heads=None)
    assert (config.num_heads, config.num_kv_heads) == (4, 4)


def test_swish_is_silu(tmp_path: Path) -> None:
    assert _read(tmp_path, hidden_act="swish") == _read(tmp_path)


def test_end_tokens_outside_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    config = _read(tmp_path, eos_token_id=[7, 100, 10**6], bos_token_id=100)
    assert (config.eos_token_ids, config.bos_token_id) == ((7,), None)


@pytest.mark.parametrize(
    ("rope", "derived"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 512),
        ({"rope_type": "yarn", "factor": 1.5}, 768),
        ({"rope_type": "linear", "factor": 3}, 1536),
        ({"rope_type": "dynamic", "factor": 3}, 512),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}, 512),
        ({"rope_type": "default"}, 512),
        ({"rope_type": "yarn", "factor": 1e30}, 2**31 - 1),
    ],
)
def test_the_length_that_a_scaling_was_made_for(rope: dict[str, Any], derived: int, tmp_path: Path) -> None:
    config = _read(tmp_path, rope_scaling=rope)
    assert (config.max_position_embeddings, config.derived_max_model_len) == (512, derived)


def test_longrope_serves_its_original_length_unless_a_setting_says_more(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
    config = _read(tmp_path, rope_scaling=rope, original_max_position_embeddings=128)
    assert (config.max_position_embeddings, config.derived_max_model_len) == (128, 512)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"architectures": None}, "none named"),
        ({"architectures": [[]]}, r"architecture \[\]; supported"),
        ({"architectures": [{"LlamaForCausalLM": 1}]}, "architecture {'LlamaForCausalLM': 1}; supported"),
        ({"hidden_act": "gelu"}, "gelu"),
        (
            {"quantization_config": {"quant_method": "quark"}},
            "quantized by quark; read are compressed-tensors, fp8",
        ),
        ({"quantization_config": {"bits": 4}}, "quantized by a method that it does not name"),
        ({"architectures": ["Qwen3Model"]}, "Qwen3Model is Qwen3ForCausalLM without its language-model head"),
        ({"model_type": "granite"}, "model_type 'granite' is not that of LlamaForCausalLM \\(llama\\)"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "num_key_value_heads": 2,
                "layer_types": ["sliding_attention"] * 3,
            },
            "layer_types has sliding_attention, but no sliding window is in use",
        ),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "'su'.*yarn"),
        ({"rope_parameters": {"rope_type": "axial"}}, "axial"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ between layers"),
    ],
)
def test_unsupported(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message) as error:
        _read(tmp_path, **fields)
    assert "config.json" in error.value.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "32"}, 'hidden_size must be an integer of at least 1, not "32"'),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"num_attention_heads": 64}, "head_dim must be even and at least 2, not 0"),
        (
            {"architectures": ["MistralForCausalLM"]},
            r"multiple of num_key_value_heads \(8, which MistralForCausalLM has where the field is absent\), not 4",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4096, not 1000000000"),
        ({"vocab_size": 10**12}, "vocab_size must be at most"),
        ({"hidden_size": 10**400}, "hidden_size must be at most"),
        ({"head_dim": 10**9}, "head_dim must be at most"),
        ({"max_position_embeddings": 10**300}, "max_position_embeddings must be at most"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"rope_theta": 1}, "rope_theta must be above 1"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 1}}, "an integer of at least 2"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 3}},
            r"high_freq_factor must be at least low_freq_factor \(4\)",
        ),
        ({"eos_token_id": -1}, "eos_token_id must be a token id"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}, "original_max_position_embeddings": 64},
            "short_factor must be a list of 4 positive numbers",
        ),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "num_key_value_heads": 2,
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            "layer_types must be 3 times",
        ),
    ],
)
def test_errors_name_file_field_and_value(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        _read(tmp_path, **fields)
    assert str(tmp_path / "config.json") in error.value.message


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere does not exist"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 32, "hidden_size": 64}')
    with pytest.raises(ConfigError, match="the field 'hidden_size' is there twice"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(" " * (16 << 20) + "{}")
    with pytest.raises(ConfigError, match="more than 16777216 bytes"):
        read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path)


def test_a_config_of_several_megabytes(tmp_path: Path) -> None:
    """As of quantized experts, whose matrices are listed one by one. Everything that reads the file takes it."""
    folder = make_checkpoint(tmp_path)
    edit_json(
        folder / "config.json", _left_alone=[f"model.layers.{n}.mlp.experts.{n}.down_proj" for n in range(90_000)]
    )
    assert 3 << 20 < (folder / "config.json").stat().st_size < 6 << 20
    assert load_decoder(folder).config.num_layers == read_config(folder).num_layers
    assert Tokenizer.from_folder(folder).eos_token_ids
    assert ImageProcessor.from_folder(folder) is None
    assert AudioProcessor.from_folder(folder) is None
    assert model_len_of(folder) == read_config(folder).max_position_embeddings


@pytest.mark.parametrize("field", ["max_position_embeddings", "model_max_length"])
def test_the_length_of_a_model_by_each_name(field: str, tmp_path: Path) -> None:
    make_family(tmp_path, "kimi_linear", cases("kimi_linear")[0])
    edit_json(tmp_path / "config.json", **{"model_max_length": ..., field: 200_000})
    assert model_len_of(tmp_path) == read_config(tmp_path).max_position_embeddings == 200_000


def test_the_length_of_a_model_whose_config_cannot_be_read_is_a_guess(tmp_path: Path) -> None:
    assert model_len_of(tmp_path) == 131_072
    os.mkfifo(tmp_path / "config.json")
    # a reader would wait for a writer
    assert model_len_of(tmp_path) == 131_072
    (tmp_path / "config.json").unlink()
    for content in (b"[]", b"\xff", b'{"max_position_embeddings": 8' + b"0" * (17 << 20) + b"}"):
        (tmp_path / "config.json").write_bytes(content)
        assert model_len_of(tmp_path) == 131_072


MODELOPT = [
    ({"quantization": {"quant_algo": "W4A8_AWQ"}}, 'quantization: quant_algo is "W4A8_AWQ"; read is FP8, NVFP4'),
    ({"quantization": {"quant_algo": "NVFP4", "group_size": 32}}, "quantization: group_size is 32; read is 16"),
    ({"quant_algo": "INT4_AWQ"}, 'hf_quant_config.json: quant_algo is "INT4_AWQ"'),
    ({"producer": {"name": "modelopt"}}, "hf_quant_config.json: quant_algo is missing"),
    ({"quantization": []}, "quantization must be an object"),
    ([], "hf_quant_config.json"),
]


@pytest.mark.few(11)
@pytest.mark.parametrize(("content", "message"), MODELOPT)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_forms_of_modelopt_that_are_not_read_are_refused_at_start(
    architecture: str, content: Any, message: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, architecture)
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        read_config(folder)
    if architecture == "llama":
        with pytest.raises(ConfigError, match=message):
            read_transformers_config(folder)


def test_a_folder_that_modelopt_left_in_floats(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    )
    read_config(folder)
    load_decoder(folder)


@pytest.mark.parametrize("field", ["shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"])
def test_a_shared_expert_of_no_size(field: str, tmp_path: Path) -> None:
    """As Qwen3-Coder's config.json has it; the class of transformers does not know the field."""
    folder = make_checkpoint(tmp_path, "qwen3_moe")
    edit_json(folder / "config.json", **{field: 0})
    assert read_config(folder).unknown_fields == ()
    edit_json(folder / "config.json", **{field: 16})
    with pytest.raises(UnsupportedModel, match=f"{field} is 16, .* must be 0 or absent"):
        read_config(folder)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "llama"])
def test_norms_of_queries_and_keys_that_the_family_has_anyway(architecture: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, architecture)
    edit_json(folder / "config.json", use_qk_norm=True)
    if architecture == "llama":
        with pytest.raises(UnsupportedModel, match="use_qk_norm is true"):
            read_config(folder)
        return
    assert read_config(folder).unknown_fields == ()
