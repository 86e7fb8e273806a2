"""Shapes, sides and ratios of the offline comparison; the engines beside pdserve are not installed in tests."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import pytest
from floor import Workload
from offline_engine import ENGINES
from offline_side_by_side import Start, starts_of, summary, workload_of


def test_a_shape_is_requests_prompt_and_output() -> None:
    assert workload_of("8x256+64") == Workload(num_requests=8, prompt_tokens=256, output_tokens=64)


@pytest.mark.parametrize("text", ["8x256", "x256+64", "8x256+64+1", ""])
def test_a_wrong_shape_is_named(text: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(f"--shapes: {text!r}")):
        workload_of(text)


def test_each_given_model_is_a_side_of_its_own() -> None:
    given = Namespace(
        model=Path("m"), options='{"quantization": "int8"}', vllm_python=None, vllm_options="{}",
        llama_cpp=[["l/python", "m-bf16.gguf"], ["l/python", "m-q8_0.gguf"]],
        openvino=[["o/python", "ir/int8", '{"KV_CACHE_PRECISION": "u8"}']],
    )  # fmt: skip
    starts = starts_of(given)
    assert list(starts) == ["pdserve", "llama.cpp m-bf16", "llama.cpp m-q8_0", "OpenVINO int8"]
    assert starts["pdserve"].options == '{"quantization": "int8"}'
    assert starts["llama.cpp m-q8_0"] == Start("llama.cpp", Path("l/python"), Path("m-q8_0.gguf"))
    assert starts["OpenVINO int8"].options == '{"KV_CACHE_PRECISION": "u8"}'
    assert {start.engine for start in starts.values()} <= set(ENGINES)


def test_ratios_are_of_medians_with_the_lowest_and_highest_round() -> None:
    result = summary({"pdserve": [2.0, 4.0, 3.0], "OpenVINO int8": [3.0, 3.0, 6.0], "floor": [1.5, 1.0, 2.0]})
    assert result["seconds"] == {"pdserve": 3.0, "OpenVINO int8": 3.0, "floor": 1.5}
    assert result["speed over OpenVINO int8's: medians, lowest, highest"] == [1.0, 0.75, 2.0]
    assert result["share of the floor"] == {"pdserve": 0.5, "OpenVINO int8": 0.5}
    assert not any("floor's" in name or "pdserve's" in name for name in result)
