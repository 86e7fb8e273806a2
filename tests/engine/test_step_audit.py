"""Operations of a decode step on a device, counted on the pretended one.

One upload, one wait and no shape that depends on data, whatever is sampled. A step whose rules or grammar are known only after its
launch has a second upload, and so has one with LoRA adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine.engine_harness import Answer, Harness
from tests.support.engine.pretend_device import DEVICE, pretended_device
from tests.support.engine.step_audit import StepAudit, StepCounts
from tests.support.models.lora_adapters import make_adapter

STEPS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "greedy": ({"temperature": 0.0}, (1, 1, 0)),
    "random": ({"temperature": 0.8, "seed": 1}, (1, 1, 0)),
    "top_p": ({"temperature": 0.8, "seed": 1, "top_p": 0.9, "top_k": 50}, (1, 1, 0)),
    "rules": (
        {"temperature": 0.8, "seed": 1, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "logit_bias": {5: 1.0}},
        (1, 1, 0),
    ),
    "log-probabilities": ({"temperature": 0.0, "logprobs": 2}, (1, 1, 0)),
}
"""Parameters, and copies to the device, waits for it, and shapes that depend on data."""


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with pretended_device():
        yield


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", STEPS)
def test_a_decode_step(
    kind: str,
    make_real_engine: Callable[..., Harness],
    tiny_checkpoints: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params, expected = STEPS[kind]
    engine = make_real_engine(tiny_checkpoints("llama"), device=str(DEVICE))
    for size in (20, 33):
        engine.add([(7 * i + size) % 300 for i in range(size)], params={"max_tokens": 6} | params)
    engine.step()
    with StepAudit(monkeypatch) as audit:
        engine.step()
    counts = audit.counts
    assert (counts.uploads.total(), counts.waits.total(), counts.shapes.total()) == expected, counts
    engine.run()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        pytest.param(
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one spec", "two windows"],
)
def test_a_step_of_prompts_and_a_decode_step_with_triton(
    family: str,
    options: dict[str, Any],
    make_real_engine: Callable[..., Harness],
    tiny_checkpoints: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All kernels, and attention's lists: one, or one per window."""
    pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")
    from tests.support.engine.pretend_launches import interpreted_on_device

    folder, counts = tiny_checkpoints(family, **options), list[StepCounts]()

    def answers(**kernels: str) -> list[Answer]:
        engine = make_real_engine(folder, device=str(DEVICE), max_num_seqs=4, **kernels)
        ids = [engine.add([(7 * i + size) % 300 for i in range(size)]) for size in (5, 18)]
        for _ in range(2):
            with monkeypatch.context() as patch, StepAudit(patch) as audit:
                engine.step()
            counts.append(audit.counts)
        found = engine.run()
        return [found[name] for name in ids]

    expected = answers()
    with interpreted_on_device():
        assert answers(kernels="triton", attention_backend="triton") == expected
    for step in counts[-2:]:
        assert (step.uploads.total(), step.waits.total(), step.shapes.total()) == (1, 1, 0), step


@pytest.mark.slow
def test_a_decode_step_with_adapters_copies_their_tokens_and_waits_for_nothing_more(
    make_real_engine: Callable[..., Harness],
    tiny_checkpoints: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")
    from tests.support.engine.pretend_launches import interpreted_on_device

    folder = tiny_checkpoints("llama")
    adapters = [make_adapter(tmp_path / str(seed), folder, seed=seed, spread=0.3) for seed in (1, 2)]
    with interpreted_on_device():
        engine = make_real_engine(
            folder, device=str(DEVICE), adapters=adapters, max_loras=2, max_num_seqs=3, kernels="triton",
            attention_backend="triton",
        )  # fmt: skip
        store = engine.core.adapters
        assert store is not None
        for size, adapter in zip((5, 18, 7), [*adapters, None], strict=True):
            fields = {} if adapter is None else {"lora_name": "x", "lora_fingerprint": store.add(adapter)}
            engine.add([(7 * i + size) % 300 for i in range(size)], **fields)
        engine.step()
        with StepAudit(monkeypatch) as audit:
            engine.step()
        counts = audit.counts
        assert (counts.uploads.total(), counts.waits.total(), counts.shapes.total()) == (2, 1, 0), counts
        engine.run()


def test_the_audit_sees_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    there = torch.arange(4.0).to(DEVICE)
    with StepAudit(monkeypatch) as audit:
        torch.ones(3).to(DEVICE)
        assert there.sum().item() == 6
        assert there.tolist() == there.cpu().tolist()
        there[there > 1], there.nonzero()
        there.view(2, 2).t()
    # the tests themselves asked: no line of the product did
    found = {name: getattr(audit.counts, name).total() for name in ("uploads", "waits", "shapes", "launches")}
    assert found == {"uploads": 1, "waits": 3, "shapes": 2, "launches": 2}
