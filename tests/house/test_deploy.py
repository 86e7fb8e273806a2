"""What the compose file, Prometheus and the dashboard say about pdserve is true of pdserve."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.common.router_settings import RouterSettings
from pdserve.common.settings import load_settings
from pdserve.common.worker_settings import DecodeSettings, PrefillSettings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SETTINGS = {"router": RouterSettings, "prefill": PrefillSettings, "decode": DecodeSettings}
OURS = {
    name: service for name, service in COMPOSE["services"].items() if "PDSERVE_HOST" in service.get("environment", {})
}


def interpolated(value: str) -> str:
    """As docker-compose does with nothing set: `${NAME:-default}` and `${NAME-default}`; a required one gets a value."""
    value = re.sub(r"\$\{\w+:\?[^}]*\}", "0123456789abcdef", value)
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", value)


def environment(service: dict[str, Any]) -> dict[str, str]:
    return {name: interpolated(value) for name, value in service["environment"].items()}


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_service_starts_with_its_environment(name: str) -> None:
    service = OURS[name]
    [role] = service["command"]
    settings = load_settings(SETTINGS[role], environ=environment(service))
    assert settings.insecure
    assert settings.redis == "redis://redis:6379/0"


def test_only_ports_for_people_are_published_and_only_on_loopback() -> None:
    assert {"router", "prefill", "decode"} <= set(OURS)
    assert {"redis", "otel-collector", "jaeger", "prometheus", "grafana"} <= set(COMPOSE["services"])
    for name, service in COMPOSE["services"].items():
        published = [interpolated(port) for port in service.get("ports", [])]
        assert all(port.startswith("127.0.0.1:") for port in published), f"{name} publishes {published}"
        assert not published or name in ("router", "jaeger", "prometheus", "grafana")


def test_prometheus_scrapes_the_ports_that_the_services_serve() -> None:
    jobs = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    for job in jobs:
        [discovery] = job["dns_sd_configs"]
        for name in discovery["names"]:
            role = OURS[name]["command"][0]
            settings = load_settings(SETTINGS[role], environ=environment(OURS[name]))
            assert discovery["port"] == settings.metrics_port, name


def test_the_dashboard_shows_metrics_that_exist() -> None:
    documented = set(re.findall(r"`(pdserve_\w+)`", (ROOT / "docs/metrics.md").read_text()))
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/pdserve.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(expressions) > 20
    for expression in expressions:
        for metric in re.findall(r"pdserve_\w+", expression):
            assert metric in documented or re.sub(r"_(bucket|sum|count)$", "", metric) in documented, metric
