"""The decoder against `transformers` on the same weights, in float32."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pdserve.models.loading import load_decoder
from tests.support.models.checkpoints import ARCHITECTURES, VOCAB_SIZE, edit_json, make_checkpoint

ATOL = 1e-4

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 24}),
    ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "hidden_size": 36}),
    ("mistral", {}),
    ("mistral", {"sliding_window": 7}),
    ("mistral", {"sliding_window": 1}),
    ("mistral", {"sliding_window": 37, "head_dim": None}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0, "tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 32}),
    (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1, "attention_bias": True, "head_dim": 24}),
    ("qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 2, "tie_word_embeddings": True}),
    ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9, "num_experts": 40, "num_experts_per_tok": 8}),
]

ROPE_PARAMETERS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 0.8,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 100,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
    },
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
        "long_factor": [2.0, 2.1, 2.2, 2.3, 3.5, 4.7, 5.0, 6.5],
    },
]


def _text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


@pytest.mark.few(1)
@pytest.mark.parametrize(("architecture", "options"), OPTIONS)
def test_prefill_and_decode_match_transformers(
    architecture: str, options: dict[str, Any], tiny_checkpoints: Any, oracle_logits: Any, paged_run: Any
) -> None:
    folder = tiny_checkpoints(architecture, **options)
    tokens = _text(75)
    expected = oracle_logits(folder, tokens)
    run = paged_run(load_decoder(folder))

    torch.testing.assert_close(run.step({}, {"a": tokens[:50]})["a"], expected[:50], atol=ATOL, rtol=0)
    torch.testing.assert_close(run.step({}, {"a": tokens[50:61]})["a"], expected[50:61], atol=ATOL, rtol=0)
    for position in range(61, 75):
        logits = run.step({"a": tokens[position]}, {})["a"]
        torch.testing.assert_close(logits[0], expected[position], atol=ATOL, rtol=0)


@pytest.mark.few(4)
@pytest.mark.diagonal
@pytest.mark.parametrize("rope", ROPE_PARAMETERS, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_rope_types_match_transformers(
    architecture: str, rope: dict[str, Any], tiny_checkpoints: Any, oracle_logits: Any, paged_run: Any
) -> None:
    folder = tiny_checkpoints(architecture, rope_parameters=rope, max_position_embeddings=1024)
    tokens = _text(200)
    logits = paged_run(load_decoder(folder)).step({}, {"a": tokens})["a"]
    torch.testing.assert_close(logits, oracle_logits(folder, tokens), atol=2 * ATOL, rtol=0)


def test_older_config_means_the_same(tmp_path: Any, paged_run: Any) -> None:
    """`rope_theta`, `rope_scaling` with `type`, and `torch_dtype`, as transformers 4 wrote them."""
    rope = {"rope_type": "linear", "rope_theta": 777.0, "factor": 3.0}
    folder = make_checkpoint(tmp_path, rope_parameters=rope)
    new = load_decoder(folder)
    edit_json(
        folder / "config.json",
        rope_parameters=...,
        dtype=...,
        rope_theta=777.0,
        rope_scaling={"type": "linear", "factor": 3.0},
        torch_dtype="float32",
    )
    old = load_decoder(folder)
    assert old.config == new.config
    tokens = _text(30)
    torch.testing.assert_close(
        paged_run(old).step({}, {"a": tokens})["a"], paged_run(new).step({}, {"a": tokens})["a"], atol=0, rtol=0
    )


@pytest.mark.few(2)
@pytest.mark.diagonal
@pytest.mark.parametrize("theta", [None, 500000.0, 777])
@pytest.mark.parametrize("beside", [None, 333.0])
def test_rope_scaling_added_by_hand_takes_the_place_of_rope_parameters(
    theta: float | None, beside: float | None, tmp_path: Any, oracle_logits: Any, paged_run: Any, caplog: Any
) -> None:
    """Model cards say to add `rope_scaling` to a config.json that transformers 5 saved with `rope_parameters`."""
    folder = make_checkpoint(
        tmp_path / "qwen3", "qwen3", rope_parameters={"rope_type": "default", "rope_theta": 500000.0}
    )
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    if theta is not None:
        scaling["rope_theta"] = theta
    edit_json(folder / "config.json", rope_scaling=scaling, **({} if beside is None else {"rope_theta": beside}))
    tokens = _text(150)
    logits = paged_run(load_decoder(folder)).step({}, {"a": tokens})["a"]
    torch.testing.assert_close(logits, oracle_logits(folder, tokens), atol=2 * ATOL, rtol=0)
    assert ("rope_scaling takes the place of rope_parameters" in caplog.text) == (theta != 500000.0)


def test_an_empty_rope_scaling_changes_nothing(tmp_path: Any, oracle_logits: Any, paged_run: Any) -> None:
    folder = make_checkpoint(tmp_path / "qwen3", "qwen3", rope_parameters={"rope_type": "default", "rope_theta": 777.0})
    edit_json(folder / "config.json", rope_scaling={})
    tokens = _text(50)
    logits = paged_run(load_decoder(folder)).step({}, {"a": tokens})["a"]
    torch.testing.assert_close(logits, oracle_logits(folder, tokens), atol=ATOL, rtol=0)


def test_yarn_beyond_a_length_that_was_left_alone(tmp_path: Any, oracle_logits: Any, paged_run: Any) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    folder = make_checkpoint(tmp_path / "qwen3", "qwen3", max_position_embeddings=160, rope_parameters=rope)
    tokens = _text(512)
    logits = paged_run(load_decoder(folder)).step({}, {"a": tokens})["a"]
    torch.testing.assert_close(logits, oracle_logits(folder, tokens), atol=2 * ATOL, rtol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_answers_equal_transformers(
    architecture: str, tiny_checkpoints: Any, oracle_logits: Any, paged_run: Any
) -> None:
    """I1, for the decoder alone: token for token, except where the two best candidates lie within 1e-4."""
    folder = tiny_checkpoints(architecture)
    run = paged_run(load_decoder(folder))
    tokens = _text(23, seed=5)
    logits = run.step({}, {"a": tokens})["a"][-1]
    for _ in range(40):
        best = oracle_logits(folder, tokens)[-1].topk(2)
        token = int(logits.argmax())
        if token != best.indices[0]:
            print(f"{architecture}: token {len(tokens)} is {token}, oracle {best}")
            assert token == best.indices[1]
            assert best.values[0] - best.values[1] < 1e-4
        tokens.append(token)
        logits = run.step({"a": token}, {})["a"][0]
    assert len(set(tokens[23:])) > 5, "the answer is degenerate and tests nothing"


@pytest.mark.few(2)
@pytest.mark.diagonal
@pytest.mark.parametrize("chunks", [[1] * 12, [3, 1, 5, 2, 1], [4, 8], [12]])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_chunks_do_not_matter(
    chunks: list[int], block_size: int, tiny_checkpoints: Any, oracle_logits: Any, paged_run: Any
) -> None:
    folder = tiny_checkpoints("qwen2")
    tokens = _text(12)
    run = paged_run(load_decoder(folder), block_size=block_size)
    pieces, start = [], 0
    for length in chunks:
        pieces.append(run.step({}, {"a": tokens[start : start + length]})["a"])
        start += length
    torch.testing.assert_close(torch.cat(pieces), oracle_logits(folder, tokens), atol=ATOL, rtol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 21}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    ],
)
def test_mixed_batches(
    architecture: str, options: dict[str, Any], tiny_checkpoints: Any, oracle_logits: Any, paged_run: Any
) -> None:
    """Sequences of very different lengths, some decoding while others are prefilled with and without context."""
    folder = tiny_checkpoints(architecture, **options)
    run = paged_run(load_decoder(folder), num_blocks=400, block_size=8)
    chooser = random.Random(1)
    lengths = {"long": 1500, "short": 30, "tiny": 9, "middle": 300, "late": 170, "last": 5}
    texts = {name: _text(length, seed) for seed, (name, length) in enumerate(lengths.items())}
    expected = {name: oracle_logits(folder, tokens) for name, tokens in texts.items()}
    done = dict.fromkeys(texts, 0)

    while any(done[name] < len(texts[name]) for name in texts):
        decodes: dict[str, int] = {}
        prefills: dict[str, list[int]] = {}
        for name in chooser.sample(sorted(texts), k=chooser.randint(1, len(texts))):
            rest = texts[name][done[name] :]
            if rest and done[name] and (len(rest) < 6 or chooser.random() < 0.5):
                decodes[name] = rest[0]
            elif rest:
                prefills[name] = rest[: min(chooser.choice([1, 7, 130, 400]), max(1, len(rest) - 4))]
        if not decodes and not prefills:
            continue
        for name, logits in run.step(decodes, prefills).items():
            end = done[name] + len(logits)
            torch.testing.assert_close(logits, expected[name][done[name] : end], atol=2 * ATOL, rtol=0)
            done[name] = end
