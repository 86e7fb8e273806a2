"""Every model family against the same weights in `transformers`, in odd shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.models.loading import load_decoder
from pdserve.models.registry import FAMILIES
from tests.support.checkpoints import edit_json
from tests.support.family_checkpoints import OPTIONS, cases, make_family
from tests.support.family_exactness import RECORD, bfloat16_errors, float32_logits

ATOL = 3e-4
"""Largest difference of a logit in float32; the largest logits are near 80."""
NEW = [family for family in OPTIONS if family not in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")]
"""Families whose plain case `test_decoder_oracle.py` does not have."""
CASES = [
    pytest.param(family, fields, marks=() if index == 0 and family in NEW else pytest.mark.slow, id=f"{family}-{index}")
    for family in OPTIONS
    for index, fields in enumerate(cases(family))
]


@pytest.fixture(scope="module")
def plain_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`plain_checkpoint(family)`: its plain case, made once."""

    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        make_family(folder, family, cases(family)[0])
        return folder

    return make


@pytest.mark.parametrize(("family", "fields"), CASES)
def test_prefill_and_decode_in_float32(family: str, fields: Mapping[str, Any], tmp_path: Path) -> None:
    logits = float32_logits(tmp_path, family, fields)
    assert logits.difference < ATOL
    is_tie = logits.theirs.topk(2).values.diff(dim=-1).abs().flatten() < 2 * ATOL
    best, expected = logits.ours.argmax(-1), logits.theirs.argmax(-1)
    assert ((best == expected) | is_tie).all()
    assert len(set(best.tolist())) > 5, "the answers are degenerate and test nothing"


@pytest.mark.slow
@pytest.mark.parametrize("family", OPTIONS)
def test_bfloat16_is_about_as_close_to_the_truth_as_transformers(family: str, tmp_path: Path) -> None:
    ours, theirs = bfloat16_errors(tmp_path, family, cases(family)[0])
    print(f"{family}: {ours:.4f} beside {theirs:.4f} of transformers")
    assert 0 < ours < 1.5 * theirs


def test_every_family_has_cases_and_a_record() -> None:
    families = {family.model_type: name for name, family in FAMILIES.items()}
    assert set(OPTIONS) == set(families)
    record = json.loads(RECORD.read_text())
    assert {family: row["architecture"] for family, row in record.items()} == families
    for family, row in record.items():
        assert row["cases"] == len(cases(family)), f"{family}: run python -m tests.support.family_exactness"
        assert row["float32"] < ATOL


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"num_local_experts": 0}, "num_local_experts must be at least 1, not 0"),
    ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok must be at most num_experts .5., not 6"),
    ("mixtral", {"num_local_experts": 4}, r"gate\.weight has shape \[5, 64\], config\.json says \[4, 64\]"),
    (
        "mixtral",
        {"intermediate_size": 95},
        r"experts\.0\.w1\.weight has shape \[96, 64\], config\.json says \[95, 64\]",
    ),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier must be a positive number, not 0"),
    ("granite", {"logits_scaling": "8"}, 'logits_scaling must be a positive number, not "8"'),
    ("granite", {"rope_parameters": {"rope_type": "spiral"}}, "rope type 'spiral'; supported: default"),
    ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers must be a 0 or 1 for each of 4 layers"),
    ("smollm3", {"no_rope_layers": [1, 1, True, 0]}, "no_rope_layers must be a 0 or 1 for each"),
    (
        "smollm3",
        {"no_rope_layers": None, "no_rope_layer_interval": 0},
        "no_rope_layer_interval must be an integer of at least 1",
    ),
    ("seed_oss", {"hidden_act": "gelu"}, "hidden_act 'gelu'; supported for SeedOssForCausalLM: silu"),
    ("seed_oss", {"attention_bias": False}, "12 weights have no place: .*k_proj.bias"),
    ("seed_oss", {"attention_out_bias": True}, r"o_proj\.bias is in none of model\.safetensors"),
    ("ministral", {"layer_types": ["full_attention"] * 3}, "layer_types must be 4 times"),
    ("ministral", {"layer_types": ["chunked_attention"] * 4}, "layer_types must be 4 times"),
    ("ministral", {"sliding_window": None}, "layer_types has sliding_attention, but sliding_window is null"),
]
"""Family, fields that its configuration is changed to, and the message."""


@pytest.mark.parametrize(("family", "changes", "message"), BROKEN)
def test_broken_checkpoints_are_refused_by_name(
    family: str, changes: dict[str, Any], message: str, plain_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = plain_checkpoint(family)
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ConfigError, match=message) as error:
        load_decoder(tmp_path)
    assert str(tmp_path) in error.value.message
