"""Logits of 16-bit models are float32 sums that were never rounded to the model's dtype, whatever computes the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.models.loading import load_decoder
from pdserve.models.model_impl import load_model_decoder
from pdserve.models.weights.rank_shard import RankShard
from tests.support.engine.thread_ranks import ThreadRank, on_all_ranks
from tests.support.models.any_family import make_any_family
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.encoder_decoder_checkpoints import make_encoder_decoder
from tests.support.models.whisper_checkpoints import make_whisper

DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def assert_unrounded(logits: Tensor, dtype: str) -> None:
    """At most a few of the logits may be numbers of the 16-bit dtype by chance."""
    assert logits.dtype is torch.float32
    kept = (logits.to(getattr(torch, dtype)).float() == logits).float().mean()
    assert kept < 0.2


def hidden_states(size: int, dtype: str, rows: int = 3) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))


def _logits(folder: Path, dtype: str, **options: Any) -> Tensor:
    decoder = load_model_decoder(folder, dtype=dtype, **options)
    with torch.inference_mode():
        return decoder.compute_logits(hidden_states(decoder.hidden_size, dtype))


@DTYPES
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_decoder(is_tied: bool, dtype: str, tmp_path: Path) -> None:
    assert_unrounded(_logits(make_checkpoint(tmp_path, tie_word_embeddings=is_tied), dtype), dtype)


@pytest.mark.few(2)
@DTYPES
@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_a_decoder_whose_logits_are_capped_or_scaled(family: str, dtype: str, tmp_path: Path) -> None:
    make_any_family(tmp_path, family)
    assert_unrounded(_logits(tmp_path, dtype), dtype)


@pytest.mark.few(1)
@DTYPES
@pytest.mark.parametrize("family", ["starcoder2", "cohere2", "qwen3"])
def test_a_decoder_that_transformers_computes(family: str, dtype: str, tmp_path: Path) -> None:
    make_any_family(tmp_path, family)
    assert_unrounded(_logits(tmp_path, dtype, model_impl="transformers"), dtype)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["bart", "mbart", "t5", "flan_t5"])
def test_a_decoder_with_an_encoder(name: str, tmp_path: Path) -> None:
    make_encoder_decoder(tmp_path, name)
    assert_unrounded(_logits(tmp_path, "bfloat16"), "bfloat16")


def test_whisper(tmp_path: Path) -> None:
    make_whisper(tmp_path)
    assert_unrounded(_logits(tmp_path, "bfloat16"), "bfloat16")


@DTYPES
def test_a_head_that_ranks_share(dtype: str, tiny_checkpoints: Callable[..., Path]) -> None:
    folder = tiny_checkpoints("llama")

    def compute(rank: ThreadRank) -> Tensor:
        shard = RankShard(rank.rank, rank.size, rank)
        decoder = load_decoder(folder, dtype=dtype, shard=shard)
        return decoder.compute_logits(hidden_states(decoder.hidden_size, dtype))

    first, second = on_all_ranks(2, compute)
    assert_unrounded(first, dtype)
    assert second.shape == (3, 0)


@DTYPES
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_head_on_a_gpu(dtype: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    decoder = load_model_decoder(folder, dtype=dtype, device="cuda")
    hidden = hidden_states(decoder.hidden_size, dtype)
    with torch.inference_mode():
        found = decoder.compute_logits(hidden.cuda()).cpu()
        expected = load_model_decoder(folder, dtype=dtype).compute_logits(hidden)
    assert_unrounded(found, dtype)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
