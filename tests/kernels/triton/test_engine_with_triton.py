"""Engines whose attention is computed by the Triton kernels, against `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from pdserve.common.request.encoder_prompt import EncoderDecoderPrompts
from pdserve.kernels.cpu import linear
from pdserve.kernels.layers.grouped_matrix import GroupedMatrix
from pdserve.kernels.layers.packed_groups import PackedGroups
from pdserve.kernels.triton import grouped_linear
from pdserve.kernels.triton.attention.attention_configs import Prefill
from pdserve.kernels.triton.attention.triton_attention import TritonAttentionBackend
from pdserve.kernels.triton.grouped_linear import TritonGroupedLinear
from pdserve.kernels.triton.layer_ops import TritonLayerOps
from pdserve.models.kv_cache import make_kv_cache
from pdserve.models.loading import load_decoder
from pdserve.models.weights import weight_loader
from tests.support.engine.engine_harness import Harness, harnesses, make_real_engine  # noqa: F401
from tests.support.engine.engine_pair import Pair
from tests.support.kernels.attention_batches import model_inputs, packed_batch
from tests.support.models.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.models.encoder_decoder_checkpoints import PAD, START, GreedyAnswers, make_encoder_decoder
from tests.support.models.family_checkpoints import OPTIONS, cases, make_family
from tests.support.models.oracle import Oracle
from tests.support.models.quantized_checkpoints import FORMS, quantize_folder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
MORE_SIZES = {"llama": {}, "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 64}}
MakeRealEngine = Callable[..., Harness]


def prompt_of(num_tokens: int) -> list[int]:
    return [(31 * i + 7 * num_tokens) % VOCAB_SIZE for i in range(num_tokens)]


def test_a_prompt_in_two_chunks_and_its_answer(
    make_real_engine: MakeRealEngine,  # noqa: F811
    tiny_checkpoints: Callable[..., Path],
) -> None:
    folder = tiny_checkpoints("llama")
    engine = make_real_engine(folder, DEVICE, attention_backend="triton", max_num_batched_tokens=16)
    answer = engine.ask(prompt_of(20), params={"max_tokens": 3})
    Oracle(folder).check(prompt_of(20), answer.token_ids)


@pytest.mark.parametrize(
    ("family", "case"),
    [("deepseek_v3", 0), pytest.param("deepseek_v3", 2, marks=pytest.mark.slow)],
    ids=["20 + 8", "33 + 8"],
)
def test_latent_rows_through_prefill_and_decode(
    make_real_engine: MakeRealEngine,  # noqa: F811
    tmp_path: Path,
    family: str,
    case: int,
) -> None:
    """A prompt in two chunks; rows that the prefill engine's kernels wrote are read by those of the decode engine."""
    make_family(tmp_path, family, cases(family)[case])
    options = {"attention_backend": "triton", "max_num_batched_tokens": 21}
    pair = Pair(make_real_engine(tmp_path, DEVICE, **options), make_real_engine(tmp_path, DEVICE, **options))
    prompt = [token % 200 for token in prompt_of(30)]
    pair.add(prompt, "r30", params={"max_tokens": 5})
    pair.run()
    Oracle(tmp_path).check(prompt, pair.answer("r30").token_ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"), [("qwen3", {}), ("mistral", {"sliding_window": 24}), ("llama", {"num_key_value_heads": 1})]
)
def test_steps_of_decode_rows_and_chunks_equal_transformers(
    make_real_engine: MakeRealEngine,  # noqa: F811
    tiny_checkpoints: Callable[..., Path],
    family: str,
    options: dict[str, int],
) -> None:
    folder = tiny_checkpoints(family, **options)
    engine, oracle = (
        make_real_engine(folder, DEVICE, attention_backend="triton", max_num_batched_tokens=24),
        Oracle(folder),
    )
    prompts = [prompt_of(size) for size in (1, 15, 16, 60)]
    names = [engine.add(prompt, params={"max_tokens": 9}) for prompt in prompts]
    answers = engine.run()
    for name, prompt in zip(names, prompts, strict=True):
        oracle.check(prompt, answers[name].token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention_backend", ["triton", "sdpa"])
def test_prefill_and_decode_equal_transformers(
    make_real_engine: MakeRealEngine,  # noqa: F811
    tiny_checkpoints: Callable[..., Path],
    family: str,
    attention_backend: str,
) -> None:
    """All kernels. KV that the prefill engine's kernels wrote is read by those of the decode engine."""
    folder = tiny_checkpoints(family)
    oracle = Oracle(folder)
    options = {"attention_backend": attention_backend, "kernels": "triton"}
    pair = Pair(
        make_real_engine(folder, DEVICE, max_num_batched_tokens=21, **options),
        make_real_engine(folder, DEVICE, **options),
    )
    prompts = {f"r{size}": prompt_of(size) for size in (3, 16, 41)}
    for request_id, prompt in prompts.items():
        pair.add(prompt, request_id, params={"max_tokens": 6})
    pair.run()
    for request_id, prompt in prompts.items():
        oracle.check(prompt, pair.answer(request_id).token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefill", ["triton", "sdpa"])
def test_bfloat16_is_near_transformers_in_float32(
    tiny_checkpoints: Callable[..., Path], family: str, prefill: Prefill
) -> None:
    """Two chunks, then a decode step. Logits have a standard deviation near 2.5; a mistake shows as an error of that size."""
    folder, tokens = tiny_checkpoints(family), prompt_of(34)
    decoder = load_decoder(folder, dtype="bfloat16", device=DEVICE)
    kv_cache = torch.full_like(make_kv_cache(decoder.config.kv_layout(16, "test").shapes[0], 4, DEVICE), torch.nan)
    backend, ops = TritonAttentionBackend(kv_cache, prefill), TritonLayerOps(torch.device(DEVICE))
    found = []
    with torch.inference_mode():
        for start, stop in ((0, 21), (21, 33), (33, 34)):
            batch = packed_batch(
                range(start, stop), [16 + i for i in range(start, stop)], [stop - start], [stop], [[1, 2, 3]],
                torch.device(DEVICE),
            )  # fmt: skip
            inputs = model_inputs(decoder, backend, batch, tokens[start:stop])
            found.append(decoder.compute_logits(decoder.forward(replace(inputs, ops=ops))))
    errors = torch.cat(found).cpu() - Oracle(folder).logits(tokens)
    assert errors.square().mean().sqrt() < 0.15
    # llama's largest error and that of qwen3_moe, where rounding may choose another expert, lie between 0.6 and 0.9
    assert errors.abs().max() < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in OPTIONS if family not in FAMILIES])
def test_families_of_odd_layers_equal_transformers(
    make_real_engine: MakeRealEngine,  # noqa: F811
    tmp_path: Path,
    family: str,
) -> None:
    """Soft caps, sinks, windows in some layers, unrotated numbers and norms around 0, in all kernels."""
    make_family(tmp_path, family, cases(family)[0])
    engine = make_real_engine(tmp_path, DEVICE, max_num_batched_tokens=21, attention_backend="triton", kernels="triton")
    oracle, prompts = Oracle(tmp_path), [prompt_of(size) for size in (3, 30)]
    names = [engine.add(prompt, params={"max_tokens": 4}) for prompt in prompts]
    answers = engine.run()
    for name, prompt in zip(names, prompts, strict=True):
        oracle.check(prompt, answers[name].token_ids)


@pytest.mark.slow
def test_the_position_bias_of_t5_through_prefill_and_decode(
    make_real_engine: MakeRealEngine,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The answers are longer than the table of distances; the first tokens of one are given, and computed in a chunk."""
    theirs = GreedyAnswers(make_encoder_decoder(tmp_path, "t5"))
    layout = EncoderDecoderPrompts((START,), PAD, 96)
    options = {
        "block_size": 8, "num_blocks": 64, "max_model_len": layout.max_sequence_len(8), "max_num_batched_tokens": 128,
        "max_num_seqs": 8, "enable_prompt_embeds": False, "encoder_decoder": layout, "attention_backend": "triton",
    }  # fmt: skip
    pair = Pair(make_real_engine(tmp_path, DEVICE, **options), make_real_engine(tmp_path, DEVICE, **options))
    prompts = {f"r{size}": [3 + token for token in prompt_of(size)] for size in (1, 17)}
    for request_id, prompt in prompts.items():
        pair.add(prompt, request_id, params={"max_tokens": 30})
    pair.run()
    whole = {request_id: theirs.answer(prompt, 30) for request_id, prompt in prompts.items()}
    assert max(map(len, whole.values())) > 20
    for request_id, expected in whole.items():
        assert pair.answer(request_id).token_ids == expected
    longest = max(whole, key=lambda name: len(whole[name]))
    resumed = make_real_engine(tmp_path, DEVICE, **options)
    answer = resumed.ask(prompts[longest], output=whole[longest][:24], params={"max_tokens": 30})
    assert answer.token_ids == whole[longest][24:]


@pytest.mark.parametrize("name", ["fp8 in blocks", "W4A16 asymmetric", "NVFP4 of ModelOpt"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_matrices_that_a_gpu_keeps_small(
    make_real_engine: MakeRealEngine,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    family: str,
    name: str,
) -> None:
    """Without a GPU the interpreter computes, where a CPU would widen or call C++."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128} | MORE_SIZES[family]
    folder = make_checkpoint(tmp_path / "model", family, **sizes)
    plain = make_checkpoint(tmp_path / "plain", family, **sizes)
    save_file(quantize_folder(folder, FORMS[name]), plain / "model.safetensors", metadata={"format": "pt"})
    made = []

    class Noted(TritonGroupedLinear):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    if DEVICE == "cpu":
        monkeypatch.setattr(linear, "GroupedLinear", Noted)
        monkeypatch.setattr(weight_loader, "multiplies_groups", lambda *_, **__: True)
    else:
        monkeypatch.setattr(grouped_linear, "TritonGroupedLinear", Noted)
    engine = make_real_engine(folder, DEVICE, kernels="triton", quantization="stored")
    answer = engine.ask(prompt_of(9), params={"max_tokens": 4})
    Oracle(plain).check(prompt_of(9), answer.token_ids)
    assert made


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "rounded"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_matrices_and_inputs_in_float8(
    make_real_engine: MakeRealEngine,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    family: str,
    stored: bool,
) -> None:
    """The answer is that of the same rounding in torch."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128} | MORE_SIZES[family]
    folder = make_checkpoint(tmp_path / "model", family, **sizes)
    if stored:
        quantize_folder(folder, FORMS["fp8 in blocks"])
    monkeypatch.setattr(weight_loader, "multiplies_float8", lambda *_: True)
    monkeypatch.setattr(weight_loader, "multiplies_groups", lambda *_, **__: True)
    prompt, params = prompt_of(5), {"max_tokens": 4, "logprobs": 1}
    answers = []
    for product in (TritonGroupedLinear, RoundedLinear):
        monkeypatch.setattr(linear, "GroupedLinear", product)
        monkeypatch.setattr(grouped_linear, "TritonGroupedLinear", product)
        answers.append(
            make_real_engine(folder, DEVICE, kernels="triton", quantization="fp8").ask(prompt, params=params)
        )
    monkeypatch.undo()
    exact = make_real_engine(folder, DEVICE).ask(prompt, params=params)
    found, expected, unrounded = (answer.logprobs for answer in (*answers, exact))
    assert found is not None
    assert expected is not None
    assert unrounded is not None
    assert found.logprob_token_ids == expected.logprob_token_ids
    # sums in another order turn the rounding of a few numbers
    [own, other] = (abs(found.logprobs[0][0] - answer.logprobs[0][0]) for answer in (expected, unrounded))
    assert own < other / 4


class RoundedLinear:
    """A product in float8 as torch computes it."""

    def __init__(self, matrix: GroupedMatrix, bias: Tensor | None) -> None:
        self._packed, self._bias = PackedGroups.of(matrix), bias
        assert self._packed.rounds_inputs

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(self._packed.rounded(x), self._packed.widened(), self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual.add_(self(x))
