"""`docs/metrics.md` lists each metric of each service, with its type and labels, and nothing else."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from pdserve.common.net.loop_lag import LoopLag
from pdserve.common.registry.circuit_breaker import CircuitBreaker
from pdserve.common.request.engine_types import ModelRunnerStats, SchedulerStats
from pdserve.common.telemetry.metrics import Families, make_registry, redis_families, tls_families
from pdserve.common.timeline import CRITICAL_PATH
from pdserve.common.worker_identity import WorkerRole
from pdserve.kv_transfer.control.transfer_view import TransferLog
from pdserve.router.telemetry.router_metrics import RouterMetrics
from pdserve.router.telemetry.router_telemetry import line_families
from pdserve.router.tenants.key_metrics import KeyMetrics
from pdserve.worker.step_totals import StepTotals
from pdserve.worker.telemetry.worker_metrics import WorkerMetrics
from pdserve.worker.transfers.transfer_messages import TransferCounts
from pdserve.worker.worker_roles import WorkerRoles

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/metrics.md"


def described(heading: str) -> dict[str, tuple[str, tuple[str, ...], str]]:
    """name -> type, labels, meaning, from the table below a heading."""
    section = DOCUMENT.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(pdserve_\w+)` \| (\w+) \| (.*?) \| (.+?) \|$", section, re.MULTILINE)
    assert len({name for name, *_ in rows}) == len(rows)
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels)), meaning) for name, kind, labels, meaning in rows}


def offered(registry: CollectorRegistry) -> dict[str, tuple[str, tuple[str, ...], str]]:
    """The same, from a registry whose metrics have no values yet."""
    found: dict[str, tuple[str, tuple[str, ...], str]] = {}
    for collector in list(registry._collector_to_names):
        if isinstance(collector, MetricWrapperBase):
            found |= {
                name_of(family.name, family.type): (family.type, tuple(collector._labelnames), family.documentation)
                for family in collector.collect()
            }
        else:
            for family in collector.collect():
                if family.name.startswith("pdserve_"):
                    # `le` is every histogram's own
                    labels = tuple(label for label in family.samples[0].labels if label != "le")
                    found[name_of(family.name, family.type)] = (family.type, labels, family.documentation)
    return found


def name_of(family: str, kind: str) -> str:
    """As Prometheus knows it."""
    return f"{family}_total" if kind == "counter" else family


def redis_collector() -> Families:
    breaker = CircuitBreaker("Redis", "", logging.getLogger(__name__))
    return Families(lambda: redis_families(breaker, {"conflict": 0}))


def router_registry() -> CollectorRegistry:
    registry = make_registry(None)
    RouterMetrics(registry, lambda: 0, lambda: {"prefill": {"live": 1}}, lambda: 0)
    LoopLag(registry)
    registry.register(Families(lambda: line_families({"written": 0}, {"written": 0})))
    registry.register(Families(lambda: tls_families({"services": 0.0})))
    registry.register(redis_collector())
    return registry


def key_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    KeyMetrics(registry)
    return registry


ROLES = WorkerRoles(WorkerRole.DECODE, {}, "it has one", lambda: None)


def worker_registry() -> CollectorRegistry:
    registry = make_registry(None)
    layout = SimpleNamespace(mean_block_bytes=1, shapes=[SimpleNamespace(block_bytes=1)], model_fingerprint="f")
    identity = SimpleNamespace(worker_id="w", role_name="decode", layout=layout, connectors=("tcp",))
    totals = StepTotals()
    totals.add(ModelRunnerStats(layer_s=[0.0]))
    transfers = TransferCounts(num_ended=TransferLog().num_ended)
    engine = SimpleNamespace(
        stats=SchedulerStats(),
        step_totals=totals,
        tick=0,
        tick_age_s=0.0,
        draining=False,
        transfer_counts=transfers,
        known_adapters={},
    )
    WorkerMetrics(registry, identity, engine, ROLES)  # type: ignore[arg-type]
    LoopLag(registry)
    registry.register(Families(lambda: tls_families({"services": 0.0})))
    registry.register(redis_collector())
    return registry


@pytest.mark.parametrize(("heading", "registry"), [("Router", router_registry()), ("Workers", worker_registry())])
def test_every_metric_is_described_as_it_is(heading: str, registry: CollectorRegistry) -> None:
    everywhere = described("Every service")
    assert offered(registry) == everywhere | described(heading)


def test_metrics_that_name_keys_are_described() -> None:
    assert offered(key_registry()) == described("Router, for operators")


@pytest.mark.parametrize("registry", [router_registry(), key_registry(), worker_registry()])
def test_names_carry_units_and_labels_are_bounded(registry: CollectorRegistry) -> None:
    allowed = {"outcome", "code", "phase", "policy", "kind", "role", "state", "worker", "call", "connector", "task"}
    allowed |= {"key", "tenant", "peers", "stage", "layer", "position", "adapter", "source"}
    for name, (kind, labels, _) in offered(registry).items():
        assert set(labels) <= allowed | {"model_fingerprint"}, name
        if kind == "histogram":
            assert name.endswith("_seconds"), name
        if kind == "counter":
            assert name.endswith("_total"), name


def test_every_phase_is_described() -> None:
    section = DOCUMENT.read_text().split("\n## Phases\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.+?) \|$", section, re.MULTILINE)
    assert [tuple(row) for row in rows] == [(phase, moment, meaning) for moment, phase, meaning in CRITICAL_PATH]
