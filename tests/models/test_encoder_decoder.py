"""Folders of models with an encoder: what is read from them, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.t5.modeling_t5 import T5Attention

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.models.encoder_decoder.distance_buckets import DistanceBuckets
from pdserve.models.encoder_decoder.encoder_decoder import EncoderDecoder
from pdserve.models.model_impl import load_model_decoder, read_model_config
from tests.support.models.checkpoints import edit_json
from tests.support.models.encoder_decoder_checkpoints import EOS, FORCED, START, make_encoder_decoder


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, **overrides: Any) -> Path:
        make_encoder_decoder(tmp_path, name, **overrides)
        return tmp_path

    return make


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


@pytest.mark.few(3)
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (12, 20), (4, 3), (64, 1000)])
def test_buckets_are_those_of_transformers(buckets: int, most: int) -> None:
    ours, weight = DistanceBuckets(buckets, most), torch.arange(float(buckets)).unsqueeze(1)
    places = torch.arange(2 * most + 5)
    relative = places[None, :] - places[:, None]
    expected = T5Attention._relative_position_bucket(relative, True, buckets, most)
    assert torch.equal(ours.table(weight, len(places))[0].long(), expected)
    before = T5Attention._relative_position_bucket(-places, False, buckets, most)
    assert torch.equal(ours.causal_table(weight)[0].long()[places.clamp(max=most)], before)


def test_the_decoder_begins_as_the_configuration_says(folder_of: Callable[..., Path]) -> None:
    folder = folder_of("bart_scaled")
    assert read_model_config(folder).decoder_prompt_token_ids == (START, FORCED)  # type: ignore[attr-defined]
    edit_json(folder / "generation_config.json", forced_bos_token_id=None, decoder_start_token_id=EOS)
    edit_json(folder / "config.json", forced_bos_token_id=None)
    assert read_model_config(folder).decoder_prompt_token_ids == (EOS,)  # type: ignore[attr-defined]


def test_published_names_of_bodies(folder_of: Callable[..., Path]) -> None:
    folder = folder_of("bart")
    head = load_model_decoder(folder).compute_logits(torch.ones(1, 32))
    edit_json(folder / "config.json", architectures=["BartModel"])

    def without_prefix(weights: dict[str, torch.Tensor]) -> None:
        bias = weights.pop("final_logits_bias")
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name)
        weights.pop("lm_head.weight", None)
        head.sub_(bias)

    change_weights(folder, without_prefix)
    decoder = load_model_decoder(folder)
    assert isinstance(decoder, EncoderDecoder)
    torch.testing.assert_close(decoder.compute_logits(torch.ones(1, 32)), head)


def test_dummy_weights_have_every_name(folder_of: Callable[..., Path]) -> None:
    for name in ("bart", "flan_t5"):
        decoder = load_model_decoder(folder_of(name), load_format="dummy")
        assert decoder.compute_logits(torch.ones(2, 32)).shape == (2, 320)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "bart",
        {"normalize_before": True},
        "normalize_before is true, and BartForConditionalGeneration is computed with False",
    ),
    ("bart", {"activation_function": "swiglu"}, "activation_function is 'swiglu'; supported: relu, gelu"),
    ("bart", {"decoder_attention_heads": 5}, r"decoder_attention_heads must be a divisor of d_model \(32\), not 5"),
    ("bart", {"model_type": "mbart"}, "model_type 'mbart' is not that of BartForConditionalGeneration"),
    (
        "bart",
        {"rope_scaling": {"factor": 2}, "alibi": True},
        "alibi is true, which BartForConditionalGeneration does not",
    ),
    ("bart", {"quantization_config": {"quant_method": "quark"}}, "weights are quantized by quark"),
    ("t5", {"feed_forward_proj": "gated-swish-2"}, "feed_forward_proj is 'gated-swish-2'; supported"),
    ("t5", {"relative_attention_num_buckets": 7}, "relative_attention_num_buckets must be even"),
    ("t5", {"relative_attention_max_distance": 6}, "relative_attention_max_distance must be above 6"),
    ("t5", {"dtype": "float16"}, "dtype is float16, whose range the hidden states of T5ForConditionalGeneration leave"),
    ("t5", {"d_kv": 8}, "config.json says"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_refused_configurations(
    name: str, change: dict[str, Any], message: str, folder_of: Callable[..., Path]
) -> None:
    folder = folder_of(name)
    edit_json(folder / "config.json", **change)
    with pytest.raises((ConfigError, UnsupportedModel), match=message):
        load_model_decoder(folder)


def test_an_encoder_with_an_embedding_of_its_own_is_refused(folder_of: Callable[..., Path]) -> None:
    folder = folder_of("t5")
    change_weights(
        folder, lambda weights: weights.update({"encoder.embed_tokens.weight": weights["shared.weight"] + 1})
    )
    with pytest.raises(UnsupportedModel, match=r"encoder\.embed_tokens\.weight has other numbers than shared\.weight"):
        load_model_decoder(folder)
