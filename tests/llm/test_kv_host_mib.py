"""`kv_host_mib` and `kv_disk_path` in `LLM`: prompts that left the pool come back from a tier, with the same texts."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.llm import LLM
from tests.support.engine.llm_requests import core_of, greedy, prompts_of

TINY: dict[str, Any] = {"num_blocks": 12, "max_model_len": 190, "max_num_seqs": 2}


def ask(llm: LLM) -> list[list[int]]:
    """Three prompts of 100 tokens, twice; two do not fit into the pool."""
    prompts = prompts_of([100, 101, 102])
    answers = [llm.generate(prompt, greedy(), use_tqdm=False)[0] for prompt in prompts * 2]
    return [answer.outputs[0].token_ids for answer in answers]


@pytest.mark.slow
def test_texts_are_those_without_it() -> None:
    found = []
    for kv_host_mib in (0, 2):
        with LLM("demo", dtype="float32", kv_host_mib=kv_host_mib, **TINY) as llm:
            found.append(ask(llm))
            stats = llm.llm_engine.client.utility("get_stats")
            core_of(llm).scheduler.check(idle=True)
    assert found[0] == found[1]
    # 6 full blocks of 16 tokens each
    assert stats["num_host_blocks_loaded"] >= 3 * 6 - 12
    assert stats["external_prefix_cache_hits"] == 16 * stats["num_host_blocks_loaded"]
    assert stats["num_host_blocks_stored"] >= sum(stats["num_host_blocks_used"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_texts_come_back_from_a_disk_after_a_restart(tmp_path: Path, ranks: int) -> None:
    disk: dict[str, Any] = {
        "kv_host_mib": 1,
        "kv_disk_path": str(tmp_path),
        "kv_disk_gib": 0.01,
        "tensor_parallel_size": ranks,
    }
    with LLM("demo", dtype="float32", **TINY) as llm:
        expected = ask(llm)
    for life in range(2):
        with LLM("demo", dtype="float32", **TINY, **disk) as llm:
            assert ask(llm) == expected
            stats = llm.llm_engine.client.utility("get_stats")
            core_of(llm).scheduler.check(idle=not core_of(llm).has_work)
        # the first prompts of the second life are those of the first
        assert stats["num_store_blocks_read"] >= 6 * life
        assert stats["num_store_blocks_failed"] == 0
        assert stats["num_store_blocks_written"] > 0 or life > 0
    [folder] = [path for path in tmp_path.rglob("*") if (path / "lock").exists()]
    assert {path.name for path in folder.iterdir()} == {"lock", *(f"rank{rank}" for rank in range(ranks))}


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    disk: dict[str, Any] = {"kv_host_mib": 1, "kv_disk_path": str(tmp_path), "kv_disk_gib": 0.01}
    with LLM("demo", **TINY, **disk), LLM("demo", **TINY, **disk):
        assert len([*tmp_path.rglob("lock")]) == 2
    with LLM("demo", **TINY, **disk):
        assert len([*tmp_path.rglob("lock")]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_disk_gib": -1.0}, "kv_disk_gib is -1.0, at least 0 is needed"),
        ({"kv_disk_gib": math.nan}, "kv_disk_gib is nan, at least 0 is needed"),
        ({"kv_disk_gib": 1.0}, "kv_disk_gib is 1.0, and kv_disk_path is missing"),
        ({"kv_disk_path": " ", "kv_disk_gib": 1.0}, "kv_disk_path is given, but blank"),
        ({"kv_disk_path": "/tmp"}, "kv_disk_path is '/tmp', and kv_disk_gib is missing"),
        ({"kv_disk_path": "/tmp", "kv_disk_gib": 1.0}, "kv_disk_path is '/tmp', and kv_host_mib is 0"),
        (
            {"kv_disk_path": "/proc/nothing", "kv_disk_gib": 1.0, "kv_host_mib": 1},
            "kv_disk_path /proc/nothing: No such file or directory",
        ),
        (
            {"kv_disk_path": str(Path(tempfile.gettempdir()) / "pdserve-disk"), "kv_disk_gib": 1e6, "kv_host_mib": 1},
            "kv_disk_gib is 1000000.0, which takes 1024000000 MiB, and .* has room for",
        ),
        ({"kv_host_mib": -1}, "kv_host_mib is -1"),
        ({"kv_host_mib": 1, "enable_prefix_caching": False}, "kv_host_mib is 1 and enable_prefix_caching is false"),
        (
            {"kv_host_mib": 1, "block_size": 4096, "num_blocks": 2},
            "kv_host_mib is 1, and one block of each shape takes",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("demo", **options)
