"""An engine with Triton's kernels gives the answers of one with torch operations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch

from pdserve.kernels.triton.layer_ops import TritonLayerOps
from tests.support.engine.engine_harness import Answer, Harness, harnesses, make_real_engine  # noqa: F401

PROMPTS = [[(7 * i + n) % 300 for i in range(n)] for n in (3, 17, 40)]
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 7, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    {"temperature": 1.2, "seed": 8, "repetition_penalty": 1.3, "allowed_token_ids": tuple(range(3, 200))},
]


def answers(engine: Harness) -> list[Answer]:
    """Prompts in chunks beside decodes, then a prompt whose sequences copy its last block."""
    ids = [
        engine.add(prompt, params={"max_tokens": 5} | params)
        for prompt, params in zip(PROMPTS, PARAMETERS, strict=True)
    ]
    found = engine.run()
    return [
        *(found[request_id] for request_id in ids),
        *engine.ask_many(PROMPTS[1], 2, params={"max_tokens": 3, "temperature": 1.0, "seed": 11}),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3_moe"))]
)
def test_answers_do_not_depend_on_the_kernels(
    tiny_checkpoints: Callable[..., Path],
    make_real_engine: Callable[..., Harness],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
) -> None:
    folder, limits = tiny_checkpoints(architecture), {"max_num_batched_tokens": 48, "num_blocks": 24}
    called = {"move_blocks": 0}
    move_blocks = TritonLayerOps.move_blocks

    def counted(*args: Any) -> None:
        called["move_blocks"] += 1
        move_blocks(*args)

    monkeypatch.setattr(TritonLayerOps, "move_blocks", counted)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    expected, found = (
        answers(make_real_engine(folder, device=device, kernels=kernels, attention_backend=kernels, **limits))
        for kernels in ("torch", "triton")
    )
    assert found == expected
    assert called["move_blocks"] > 0
