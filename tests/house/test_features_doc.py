"""`docs/features.md`: its table says of each pair of features what a worker's settings do, and each pair that works is tested."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import msgspec
import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.settings import with_limits
from pdserve.common.settings.worker_settings import DecodeSettings
from tests.support.models.features import REFUSED, SETTINGS, TOGETHER, pairs, settings_of
from tests.support.processes.tls_authority import Authority

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/features.md"


def table() -> dict[frozenset[str], str]:
    """Two features -> their cell."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines() if "|" in line
    ]
    head = rows[0][1:]
    cells: dict[frozenset[str], str] = {}
    for name, *given in rows[2 : 2 + len(SETTINGS)]:
        assert len(given) == len(head)
        cells |= {frozenset((name, other)): cell for other, cell in zip(head, given, strict=True) if cell}
    return cells


def test_each_pair_is_accepted_or_refused_as_the_table_says(tmp_path: Path) -> None:
    cells, files = table(), Authority(tmp_path / "ca").issue().settings()
    assert set(cells) == set(pairs())
    for pair, cell in cells.items():
        given = settings_of(sorted(pair)) | (files if "TLS" in pair else {})
        if cell == "works":
            assert pair not in REFUSED
            msgspec.convert(with_limits(DecodeSettings, given), DecodeSettings).verify()
            continue
        assert cell == "refused", cell
        with pytest.raises(ConfigError) as caught:
            msgspec.convert(with_limits(DecodeSettings, given), DecodeSettings).verify()
        assert caught.value.message.startswith(REFUSED[pair])
        reason = caught.value.message.partition(": ")[2]
        assert reason in " ".join(PAGE.read_text().split()), f"the page lacks: {reason}"


def test_the_tier_needs_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="kv_host_mib is 1 and enable_prefix_caching is false: ") as caught:
        msgspec.convert({"kv_host_mib": 1, "enable_prefix_caching": False}, DecodeSettings).verify()
    reason = caught.value.message.rpartition(": ")[2]
    assert f"| `kv_host_mib` and `enable_prefix_caching` false | {reason} |" in PAGE.read_text()


def test_each_pair_that_works_runs_in_a_cluster() -> None:
    covered = {frozenset(pair) for features in TOGETHER for pair in combinations(features, 2)}
    assert covered == set(pairs()) - set(REFUSED)


def test_each_feature_is_tested_under_faults() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().partition("## Under faults")[2].splitlines()
        if line.startswith("|")
    ]
    assert {name for name, *_ in rows[2:]} == {"none", *SETTINGS} - {"TLS"}
    chaos = (ROOT / "tests/faults/test_chaos.py").read_text()
    for _, lives, matrix, runs in rows[2:]:
        for cell in (lives, matrix):
            assert (ROOT / cell.strip("`")).is_file(), cell
        for run in runs.split(", "):
            assert run.replace("`", '"') in chaos, run
