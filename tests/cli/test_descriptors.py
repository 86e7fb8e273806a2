"""Descriptors: the soft limit is raised, and front ends leave some to everything else."""

from __future__ import annotations

import resource

import pytest

from pdserve.cli.doctor.finding import Verdict
from pdserve.cli.doctor.port_check import check_descriptors
from pdserve.common.address.descriptors import KEPT_BACK, default_max_connections, raise_descriptor_limit
from pdserve.common.settings.router_settings import RouterSettings
from tests.support.engine.settings_with import settings_with


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The process's limits of open files; the last entry holds."""
    limits = [(1024, 4096)]
    monkeypatch.setattr("pdserve.common.address.descriptors.resource.getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr("pdserve.common.address.descriptors.resource.setrlimit", lambda kind, new: limits.append(new))
    return limits


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), 4096),
        ((256, 256), 256),
        ((1024, 1 << 30), 65_536),
        ((1024, resource.RLIM_INFINITY), 65_536),
        ((100_000, 1 << 30), 100_000),
    ],
)
def test_the_soft_limit_is_raised_to_the_hard_one(
    limit: list[tuple[int, int]], before: tuple[int, int], after: int
) -> None:
    limit.append(before)
    assert raise_descriptor_limit() == after
    assert limit[-1][1] == before[1]


@pytest.mark.parametrize(("soft", "each"), [(256, 64), (1024, 448), (65_536, 8192), (64, 16)])
def test_front_ends_leave_descriptors_to_others(limit: list[tuple[int, int]], soft: int, each: int) -> None:
    limit.append((soft, soft))
    assert default_max_connections(num_servers=2) == each
    assert soft < 256 or 2 * each + KEPT_BACK <= soft


def test_the_doctor_looks_at_it(limit: list[tuple[int, int]]) -> None:
    for hard, max_connections, verdict in (
        (65_536, None, Verdict.OK),
        (1024, None, Verdict.WARNING),
        (65_536, 40_000, Verdict.FAILED),
    ):
        limit.append((256, hard))
        (finding,) = list(check_descriptors(settings_with(RouterSettings, max_connections=max_connections)))
        assert finding.verdict is verdict
