"""Rotary scalings up to the end of their documented lengths, against rotary modules and tiny models of `transformers`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, PreTrainedConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.runner.loading.loaded_model import load_model
from pdserve.kernels.layers.rotary import rotary_phases
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.config.rope_parameters import RopeParameters
from pdserve.models.loading import load_decoder
from pdserve.models.read_config import read_config
from tests.support.kernels.paged_run import PagedRun
from tests.support.models.checkpoints import VOCAB_SIZE, edit_json, make_checkpoint
from tests.support.models.family_checkpoints import make_family

HEAD_DIM = 64
_SHORT = [1.0 + 0.05 * index for index in range(HEAD_DIM // 2)]
_LONG = [1.0 + 0.9 * index for index in range(HEAD_DIM // 2)]
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": _SHORT, "long_factor": _LONG}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "yarn, as Qwen's cards say": (_YARN, 131072),
    "yarn, factor alone": ({**_YARN, "original_max_position_embeddings": 40960, "factor": 2.5}, 102400),
    "yarn, betas": ({**_YARN, "beta_fast": 20.0, "beta_slow": 3.0}, 131072),
    "yarn, not truncated": ({**_YARN, "truncate": False}, 131072),
    "yarn, truncate null": ({**_YARN, "truncate": None}, 131072),
    "yarn, attention factor": ({**_YARN, "attention_factor": 0.75}, 131072),
    "yarn, both mscales": ({**_YARN, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3}, 1310720),
    "yarn, one mscale": ({**_YARN, "factor": 16.0, "mscale": 0.7}, 524288),
    "yarn, a short original": ({**_YARN, "original_max_position_embeddings": 2, "factor": 3.0}, 32768),
    "llama3": (_LLAMA3, 131072),
    "llama3, other factors": ({**_LLAMA3, "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 7.0}, 131072),
    "llama3, equal factors": ({**_LLAMA3, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}, 131072),
    "proportional": ({"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}, 32768),
    "proportional, factor": (
        {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.7, "factor": 3.0},
        32768,
    ),
    "longrope": ({**_LONGROPE, "original_max_position_embeddings": 4096}, 131072),
    "longrope, factor": ({**_LONGROPE, "original_max_position_embeddings": 8192, "factor": 3.0}, 131072),
    "longrope, attention factor": (
        {**_LONGROPE, "original_max_position_embeddings": 8192, "attention_factor": 1.25},
        131072,
    ),
    "longrope, its original length": ({**_LONGROPE, "original_max_position_embeddings": 4096}, 4096),
    "linear": ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, 131072),
    "dynamic, within its length": ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, 32768),
}
"""Rope parameters, and the longest sequence."""


def _write(folder: Path, config: PreTrainedConfig, architecture: str, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(config.to_diff_dict() | {"architectures": [architecture], **fields}, default=list)
    )
    return folder


def _llama(folder: Path, rope: dict[str, Any], max_positions: int) -> tuple[LlamaConfig, Path]:
    fields: dict[str, Any] = {
        "hidden_size": 2 * HEAD_DIM, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": HEAD_DIM,
        "max_position_embeddings": max_positions, "rope_parameters": rope,
    }  # fmt: skip
    return LlamaConfig(**json.loads(json.dumps(fields))), _write(folder, LlamaConfig(), "LlamaForCausalLM", **fields)


def _check(
    rope: RopeParameters | None, head_dim: int, length: int, theirs: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> None:
    """theirs: `[1, T]` positions -> cosines and sines `[1, T, D']`."""
    assert rope is not None
    positions = torch.cat((torch.arange(3), torch.arange(length - 40, length)))
    phases = rotary_phases(positions, rope.inverse_frequencies(head_dim), rope.magnitudes(head_dim))[:, 0]
    cosines, sines = (each[0] for each in theirs(positions[None]))
    half = cosines.shape[-1] // 2
    torch.testing.assert_close(phases.real[:, :half], cosines[:, :half], atol=1e-6, rtol=0)
    torch.testing.assert_close(phases.imag[:, :half], sines[:, :half], atol=1e-6, rtol=0)
    assert torch.equal(phases[:, half:], torch.ones_like(phases[:, half:]))


@pytest.mark.parametrize("name", CASES)
def test_angles_are_those_of_transformers_up_to_the_last_position(name: str, tmp_path: Path) -> None:
    rope, length = CASES[name]
    max_positions = length if rope["rope_type"] in ("longrope", "llama3") else 32768
    if name == "longrope, its original length":
        max_positions = 131072
    theirs, folder = _llama(tmp_path / "model", rope, max_positions)
    config = read_config(folder, max_model_len=length)
    assert config.derived_max_model_len >= length
    module = LlamaRotaryEmbedding(theirs)
    _check(config.rope, HEAD_DIM, length, lambda positions: module(torch.zeros(()), positions))


@pytest.mark.parametrize("beside", [None, 2048])
@pytest.mark.parametrize("length", [2048, 65536])
def test_phi3_has_its_original_length_beside_the_rope_parameters(
    beside: int | None, length: int, tmp_path: Path
) -> None:
    rotated = HEAD_DIM // 2
    rope = {
        "rope_type": "longrope", "short_factor": _SHORT[: rotated // 2], "long_factor": _LONG[: rotated // 2],
        "partial_rotary_factor": 0.5, "original_max_position_embeddings": 1024,
    }  # fmt: skip
    fields: dict[str, Any] = {
        "hidden_size": 2 * HEAD_DIM, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 65536, "rope_parameters": rope,
    } | ({} if beside is None else {"original_max_position_embeddings": beside})  # fmt: skip
    folder = _write(tmp_path / "model", Phi3Config(), "Phi3ForCausalLM", **fields)
    if beside is None:
        edit_json(folder / "config.json", original_max_position_embeddings=...)
    module = Phi3RotaryEmbedding(Phi3Config(**json.loads(json.dumps(fields))))
    config = read_config(folder, max_model_len=length)
    assert config.max_position_embeddings == (beside or 4096)
    _check(config.rope, HEAD_DIM, length, lambda positions: module(torch.zeros(()), positions))


def test_gemma3_scales_by_layer_type(tmp_path: Path) -> None:
    ropes = {
        "full_attention": {**_YARN, "truncate": False},
        "sliding_attention": {**_LONGROPE, "original_max_position_embeddings": 1024},
    }
    fields: dict[str, Any] = {
        "head_dim": HEAD_DIM, "max_position_embeddings": 32768, "rope_parameters": ropes, "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    folder = _write(tmp_path / "model", Gemma3TextConfig(), "Gemma3ForCausalLM", **fields)
    module = Gemma3RotaryEmbedding(Gemma3TextConfig(**json.loads(json.dumps(fields))))

    def theirs(layer_type: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        return lambda positions: module(torch.zeros(()), positions, layer_type)

    config = read_config(folder, max_model_len=32768)
    _check(config.layer_rope(1), HEAD_DIM, 32768, theirs("full_attention"))
    _check(config.layer_rope(0), HEAD_DIM, 32768, theirs("sliding_attention"))
    assert read_config(folder).max_position_embeddings == 1024, "the shorter of both"
    _check(read_config(folder).layer_rope(0), HEAD_DIM, 1024, theirs("sliding_attention"))


_TINY_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
    "long_factor": [2.0, 2.1, 2.2, 2.3, 3.5, 4.7, 5.0, 6.5],
    "original_max_position_embeddings": 48,
}
_TINY_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48, "rope_theta": 100.0}


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Longrope, extended from 48 to 192 positions."""
    folder = tmp_path_factory.mktemp("longrope")
    return make_checkpoint(folder, rope_parameters=_TINY_LONGROPE, max_position_embeddings=192)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama", "llama yarn", "phi3"])
def test_logits_to_the_last_position(family: str, tmp_path: Path, long_folder: Path) -> None:
    """In chunks, the first of which is shorter than the original length, then by single tokens."""
    from transformers import AutoModelForCausalLM

    folder = long_folder
    if family == "phi3":
        folder, beside = tmp_path, {"original_max_position_embeddings": 48}
        make_family(folder, family, {"max_position_embeddings": 192, "rope_parameters": _TINY_LONGROPE, **beside})
    if family == "llama yarn":
        folder = make_checkpoint(tmp_path, rope_parameters=_TINY_YARN, max_position_embeddings=48)
    tokens = random.Random(1).choices(range(VOCAB_SIZE), k=192)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    run = PagedRun(load_decoder(folder, max_model_len=192))
    logits = [run.step({}, {"a": tokens[:30]})["a"], run.step({}, {"a": tokens[30:180]})["a"]]
    logits += [run.step({"a": token}, {})["a"] for token in tokens[180:]]
    torch.testing.assert_close(torch.cat(logits), expected, atol=3e-4, rtol=0)
    if family != "llama yarn":
        short = PagedRun(load_decoder(folder, max_model_len=48)).step({}, {"a": tokens[:48]})["a"]
        with torch.inference_mode():
            torch.testing.assert_close(short, model(torch.tensor([tokens[:48]])).logits[0], atol=3e-4, rtol=0)
        assert (short - expected[:48]).abs().max() > 0.1, "both factors give the same"


def _config(folder: Path, max_model_len: int | None) -> ModelConfig:
    return read_config(folder, max_model_len=max_model_len)


def test_long_factors_are_chosen_by_max_model_len_alone(long_folder: Path) -> None:
    assert [_config(long_folder, length).uses_long_factor for length in (None, 47, 48, 49, 192)] == [False] * 3 + [
        True
    ] * 2
    config = _config(long_folder, None)
    assert (config.max_position_embeddings, config.derived_max_model_len) == (48, 192)


def test_workers_with_other_factors_share_no_blocks(long_folder: Path) -> None:
    """Blocks of one would be read with the frequencies of the other."""
    loaded = [
        load_model(long_folder, WorkerSettings(model=str(long_folder), num_blocks=16, max_model_len=length))
        for length in (None, 40, 100, 192)
    ]
    default, short, long, longest = (each.layout for each in loaded)
    assert [each.max_model_len for each in loaded] == [48, 40, 100, 192]
    assert default.differences(short) == long.differences(longest) == []
    [line] = short.differences(long)
    assert line == f"model_fingerprint: {short.model_fingerprint} != {long.model_fingerprint}"
    with pytest.raises(ConfigError, match=r"max_model_len is 193, the model supports at most 192$"):
        load_model(long_folder, WorkerSettings(model=str(long_folder), num_blocks=16, max_model_len=193))


def test_dynamic_scaling_beyond_its_length_is_refused_by_name(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    folder = make_checkpoint(tmp_path, rope_parameters=rope, max_position_embeddings=64)
    with pytest.raises(
        ConfigError, match="max_model_len is 65, the model supports at most 64: beyond it the rope type 'dynamic'"
    ):
        load_model(folder, WorkerSettings(model=str(folder), num_blocks=16, max_model_len=65))
    load_model(folder, WorkerSettings(model=str(folder), num_blocks=16, max_model_len=64))


def test_both_lists_of_factors_are_checked(long_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((long_folder / "config.json").read_text())
    edit_json(tmp_path / "config.json", rope_parameters=_TINY_LONGROPE | {"long_factor": [1.0] * 7})
    with pytest.raises(ConfigError, match="long_factor must be a list of 8 positive numbers"):
        read_config(tmp_path)
