"""Models that several ranks share: the logits of `transformers`, no byte read by two ranks without need, clear refusals."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pdserve.common.errors import ConfigError
from pdserve.models.loading import load_decoder
from pdserve.models.read_config import read_config
from pdserve.models.weights.checkpoint import Checkpoint
from pdserve.models.weights.rank_shard import RankShard
from tests.support.engine.thread_ranks import ThreadRank, on_all_ranks
from tests.support.models.checkpoints import VOCAB_SIZE, edit_json
from tests.support.models.family_checkpoints import cases, make_family

ATOL = 1e-4
OPTIONS: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 2, {}),
    ("llama", 4, {"attention_bias": True, "mlp_bias": True}),
    ("llama", 2, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("mistral", 2, {"sliding_window": 7, "num_key_value_heads": 4}),
    ("qwen2", 2, {}),
    ("qwen2", 4, {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("qwen3", 2, {"attention_bias": True}),
    ("qwen3_moe", 2, {}),
    ("qwen3_moe", 4, {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
]


def shard_of(rank: ThreadRank) -> RankShard:
    return RankShard(rank.rank, rank.size, rank)


@pytest.mark.few(1)
@pytest.mark.parametrize(("architecture", "size", "options"), OPTIONS)
def test_logits_of_all_ranks_together_are_those_of_transformers(
    architecture: str,
    size: int,
    options: dict[str, Any],
    tiny_checkpoints: Any,
    oracle_logits: Any,
    paged_run: Callable[..., Any],
) -> None:
    folder = tiny_checkpoints(architecture, **options)
    tokens = random.Random(0).choices(range(VOCAB_SIZE), k=40)

    def compute(rank: ThreadRank) -> list[torch.Tensor]:
        run = paged_run(load_decoder(folder, shard=shard_of(rank)), shard=shard_of(rank))
        steps = [{"a": tokens[:25]}, {"a": tokens[25:34]}, *({"a": [token]} for token in tokens[34:])]
        return [run.step({}, step)["a"] for step in steps]

    first, *others = on_all_ranks(size, compute)
    torch.testing.assert_close(torch.cat(first), oracle_logits(folder, tokens), atol=ATOL, rtol=0)
    assert all(logits.shape[1] == 0 for other in others for logits in other)


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("lfm2", 2),
        ("qwen3_next", 2),
        ("qwen3_5_text", 2),
        ("granitemoehybrid", 2),
        ("granitemoehybrid", 4),
        ("bamba", 2),
        ("kimi_linear", 2),
        ("kimi_linear", 4),
        ("nemotron_h", 2),
        ("nemotron_h", 4),
        ("falcon_h1", 2),
        ("jamba", 2),
        ("mamba", 4),
        ("falcon_mamba", 2),
        ("mamba2", 4),
    ],
)
def test_states_of_all_ranks_together(family: str, size: int, tmp_path: Path, paged_run: Callable[..., Any]) -> None:
    """Granite's heads are one group, which all ranks share: its norm is over all of them. Four ranks share two of Nemotron-H."""
    model = make_family(tmp_path, family, cases(family)[0])
    tokens = random.Random(0).choices(range(VOCAB_SIZE), k=40)

    def compute(rank: ThreadRank) -> list[torch.Tensor]:
        run = paged_run(load_decoder(tmp_path, shard=shard_of(rank)), shard=shard_of(rank))
        steps = [{"a": tokens[:25]}, {"a": tokens[25:34]}, *({"a": [token]} for token in tokens[34:])]
        return [run.step({}, step)["a"] for step in steps]

    first, *_ = on_all_ranks(size, compute)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(torch.cat(first), expected, atol=3e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "size", "named"),
    [
        ("qwen3_next", 4, r"linear_num_key_heads \(2\)"),
        ("granitemoehybrid", 16, r"num_attention_heads \(4\)"),
        ("nemotron_h", 8, r"num_attention_heads \(4\)"),
        ("kimi_linear", 8, r"num_attention_heads \(4\)"),
        ("mamba2", 16, r"num_heads in runs of 2 \(8\)"),
        ("mamba", 64, r"intermediate_size in parts of 3 of 96 channels \(32\)"),
    ],
)
def test_heads_of_states_are_divided_evenly(family: str, size: int, named: str, tmp_path: Path) -> None:
    make_family(tmp_path, family, cases(family)[0])
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}, which does not divide {named}"):
        read_config(tmp_path, "float32").verify_sharding(size, tmp_path)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("architecture", "options"), [("llama", {}), ("qwen2", {"tie_word_embeddings": True}), ("qwen3_moe", {})]
)
def test_each_rank_reads_its_part_of_each_weight(
    architecture: str, options: dict[str, Any], tiny_checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, size = tiny_checkpoints(architecture, **options), 2
    read_bytes: dict[int, dict[str, int]] = {0: {}, 1: {}}
    pieces = Checkpoint.pieces

    def counted(checkpoint: Any, name: str, *args: Any, **kwargs: Any) -> Iterator[torch.Tensor]:
        loading = read_bytes[checkpoint.rank]
        for piece in pieces(checkpoint, name, *args, **kwargs):
            loading[name] = loading.get(name, 0) + piece.nbytes
            yield piece

    def load(rank: int) -> None:
        monkeypatch.setattr(Checkpoint, "rank", rank, raising=False)
        load_decoder(folder, shard=RankShard(rank, size))

    monkeypatch.setattr(Checkpoint, "pieces", counted)
    for rank in range(size):
        load(rank)
    shared = {
        name: weight.nbytes for name, weight in load_file(folder / "model.safetensors").items() if "norm" not in name
    }
    routers = {name for name in shared if name.endswith("mlp.gate.weight")}
    for rank in range(size):
        for name, whole in shared.items():
            expected = whole if name in routers else whole // size
            assert read_bytes[rank][name] == expected, (rank, name)


def test_a_single_kv_head_is_read_by_every_rank(tiny_checkpoints: Any) -> None:
    config = read_config(tiny_checkpoints("llama", num_key_value_heads=1), "auto")
    layouts = [config.kv_layout(16, "", RankShard(rank, 2)) for rank in range(2)]
    assert [(each.tp_rank, each.tp_size) for each in layouts] == [(0, 2), (1, 2)]
    assert [(each.shapes[0].num_kv_heads, each.shapes[0].total_num_kv_heads) for each in layouts] == [(1, 1), (1, 1)]
    assert [list(RankShard(rank, 4).heads(2)) for rank in range(4)] == [[0], [0], [1], [1]]


@pytest.mark.parametrize(
    ("architecture", "size", "options", "named"),
    [
        ("llama", 3, {}, r"num_attention_heads \(4\)"),
        ("llama", 2, {"intermediate_size": 97}, r"intermediate_size \(97\)"),
        ("llama", 2, {"vocab_size": 321}, r"vocab_size \(321\)"),
        ("llama", 4, {"num_attention_heads": 12, "num_key_value_heads": 3}, r"num_key_value_heads \(3\)"),
        ("qwen3_moe", 4, {"moe_intermediate_size": 50, "intermediate_size": 50}, r"moe_intermediate_size \(50\)"),
    ],
)
def test_a_size_that_does_not_divide_a_dimension_is_refused_by_name(
    architecture: str, size: int, options: dict[str, Any], named: str, tiny_checkpoints: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny_checkpoints(architecture) / "config.json").read_bytes())
    edit_json(folder / "config.json", **options)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}, .* {named}"):
        load_decoder(folder, load_format="dummy", shard=RankShard(0, size))


def test_dummy_weights_are_the_same_for_any_number_of_ranks(
    tiny_checkpoints: Any, paged_run: Callable[..., Any]
) -> None:
    folder = tiny_checkpoints("qwen2")

    def compute(rank: ThreadRank) -> torch.Tensor:
        decoder = load_decoder(folder, load_format="dummy", shard=shard_of(rank))
        logits: torch.Tensor = paged_run(decoder, shard=shard_of(rank)).step({}, {"a": [1, 2, 3]})["a"]
        return logits

    whole = paged_run(load_decoder(folder, load_format="dummy")).step({}, {"a": [1, 2, 3]})["a"]
    torch.testing.assert_close(on_all_ranks(2, compute)[0], whole, atol=1e-5, rtol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_int8_weights_are_rounded_per_rank(
    architecture: str, tiny_checkpoints: Any, paged_run: Callable[..., Any]
) -> None:
    """Columns of a rank have scales of their own, so rounding changes the logits no more than with one rank."""
    folder, tokens = tiny_checkpoints(architecture), [3, 14, 15, 92, 65, 35, 89, 79]

    def compute(rank: ThreadRank) -> torch.Tensor:
        decoder = load_decoder(folder, quantization="int8", shard=shard_of(rank))
        logits: torch.Tensor = paged_run(decoder, shard=shard_of(rank)).step({}, {"a": tokens})["a"]
        return logits

    exact, one = (
        paged_run(load_decoder(folder, quantization=each)).step({}, {"a": tokens})["a"] for each in (None, "int8")
    )
    both = on_all_ranks(2, compute)[0]
    assert 0 < (both - exact).norm() < 1.2 * (one - exact).norm() < 0.12 * exact.norm()
