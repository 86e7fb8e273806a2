"""Features of workers by their settings, the pairs of them that are refused, and the sets in which all other pairs run together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
TIERS, SHARED = "`kv_host_mib`, `kv_disk_path`", "`kv_host_mib`, `kv_store`"
SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "TLS": {},
        "`engine_process`": {"engine_process": True},
        "NIXL": {"connector": "nixl"},
        "`tensor_parallel_size`": {"tensor_parallel_size": 2},
        "`kv_cache_dtype`": {"kv_cache_dtype": "int8"},
        "`quantization`": {"quantization": "int8"},
        "`enable_lora`": {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
        "`speculative_config`": {"speculative_config": DRAFTS},
        TIERS: {"kv_host_mib": 1, "kv_disk_path": "disk", "kv_disk_gib": 0.1},
        SHARED: {"kv_host_mib": 1, "kv_store": "mooncake://127.0.0.1:1?segment_mib=0"},
    }
)
"""Feature, as in `docs/features.md` -> settings of prefill and decode workers that switch it on. TLS has files, the disk a folder
of the test, and the store the test's master."""
REFUSED: Mapping[frozenset[str], str] = MappingProxyType(
    {
        frozenset(("TLS", "NIXL")): "connector is 'nixl', which encrypts nothing, and TLS is configured",
        frozenset((TIERS, SHARED)): "kv_store is 'mooncake://127.0.0.1:1?segment_mib=0' and kv_disk_path is 'disk'",
    }
)
"""Two features -> how the error begins with which a worker refuses them at its start."""
IN_ONE_PROCESS = ("`enable_lora`", "`speculative_config`")
TOGETHER: Sequence[tuple[str, ...]] = (
    ("TLS", "`engine_process`", *IN_ONE_PROCESS, TIERS),
    ("NIXL", "`engine_process`", *IN_ONE_PROCESS, TIERS),
    ("NIXL", "`engine_process`", "`kv_cache_dtype`", "`quantization`", *IN_ONE_PROCESS, TIERS),
    ("TLS", "`engine_process`", "`tensor_parallel_size`", "`enable_lora`"),
    ("TLS", "`tensor_parallel_size`", "`kv_cache_dtype`", "`quantization`"),
    ("NIXL", "`engine_process`", "`tensor_parallel_size`", "`speculative_config`", TIERS),
    ("NIXL", "`engine_process`", "`kv_cache_dtype`", "`quantization`", *IN_ONE_PROCESS, SHARED),
    ("TLS", "`tensor_parallel_size`", SHARED),
)
"""Sets of features that `tests/cluster/test_features_together.py` switches on at once."""

GROUPS = "KV cache groups"
"""Switched on by a model with windows in some layers."""
WITH_GROUPS: Sequence[tuple[str, ...]] = (
    (GROUPS, "NIXL", "`engine_process`", "`kv_cache_dtype`", "`quantization`", *IN_ONE_PROCESS, TIERS),
    (GROUPS, "TLS", "`engine_process`", "`tensor_parallel_size`", "`enable_lora`"),
)
"""Further such sets, with every feature in one of them."""


def pairs() -> list[frozenset[str]]:
    """All pairs of features."""
    return [frozenset(pair) for pair in combinations(SETTINGS, 2)]


def settings_of(features: Sequence[str]) -> dict[str, Any]:
    """Settings of workers with these features, without the files of TLS."""
    return {name: value for feature in features if feature != GROUPS for name, value in SETTINGS[feature].items()}
