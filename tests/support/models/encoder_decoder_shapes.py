"""Odd shapes of families with an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bart_one_head": (
        "bart",
        {
            "d_model": 36, "encoder_attention_heads": 1, "decoder_attention_heads": 1, "encoder_layers": 1,
            "decoder_layers": 4, "vocab_size": 333, "encoder_ffn_dim": 21, "decoder_ffn_dim": 77,
        },
    ),
    "bart_small_heads_sharded": (
        "bart",
        {
            "d_model": 48, "encoder_attention_heads": 3, "decoder_attention_heads": 12, "encoder_layers": 3,
            "decoder_layers": 1, "tie_word_embeddings": True, "activation_function": "relu", "max_shard_size": "20KB",
        },
    ),
    "mbart_odd_length": (
        "mbart",
        {"d_model": 40, "encoder_attention_heads": 5, "decoder_attention_heads": 2, "max_position_embeddings": 61},
    ),
    "t5_wide_heads": (
        "t5",
        {
            "d_model": 20, "d_kv": 32, "num_heads": 3, "d_ff": 13, "num_layers": 1, "num_decoder_layers": 4,
            "relative_attention_num_buckets": 4, "relative_attention_max_distance": 3, "vocab_size": 347,
        },
    ),
    "t5_odd_heads_sharded": (
        "t5",
        {
            "d_model": 28, "d_kv": 6, "num_heads": 7, "num_layers": 4, "num_decoder_layers": 1, "max_shard_size": "20KB",
            "relative_attention_num_buckets": 64, "relative_attention_max_distance": 500,
        },
    ),
    "flan_t5_one_head": (
        "flan_t5",
        {"d_model": 33, "d_kv": 24, "num_heads": 1, "d_ff": 50, "num_layers": 2, "num_decoder_layers": 2},
    ),
}  # fmt: skip
"""Name -> family of `encoder_decoder_checkpoints`, and fields of its configuration, with the size of shards."""
