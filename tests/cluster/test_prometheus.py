"""A real Prometheus scrapes a cluster: the dashboard's expressions return series, and alert rules are evaluated."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.processes.cluster_processes import Cluster, pd_cluster
from tests.support.run.waiting import HANG_S, wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed"),
]
DEPLOY = Path(__file__).parents[2] / "deploy"


@contextmanager
def prometheus(folder: Path, cluster: Cluster) -> Iterator[httpx.Client]:
    """A client of a Prometheus that scrapes each service under its job's name, with the alert rules."""
    ports = {role: cluster.metrics_url(service).removeprefix("http://") for role, service in cluster.services.items()}
    jobs = [{"job_name": role, "static_configs": [{"targets": [address]}]} for role, address in ports.items()]
    settings = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(DEPLOY / "prometheus/alerts.yml")],
        "scrape_configs": jobs,
    }
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    config.write_text(yaml.safe_dump(settings))
    flags = (f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", "--web.listen-address=127.0.0.1:0")
    with log.open("wb") as output, subprocess.Popen(["prometheus", *flags], stderr=output) as process:
        try:
            found = wait_until(
                lambda: re.search(r'"Listening on" address=(\S+)', log.read_text()), lambda: log.read_text()
            )
            with httpx.Client(base_url=f"http://{found[1]}/api/v1", timeout=HANG_S, trust_env=False) as client:
                yield client
        finally:
            process.terminate()


def test_prometheus_reads_metrics_dashboard_and_alerts(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    dashboard = json.loads((DEPLOY / "grafana/dashboards/pdserve.json").read_text())
    expressions = {target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])}
    with pd_cluster(
        tmp_path, tiny_checkpoints("llama"), router=["--local-prefill", "never"], both=["--num-blocks=256"]
    ) as cluster:
        asked = 0

        def ask(client: httpx.Client) -> None:
            nonlocal asked
            asked += 1
            body = {"prompt": f"{asked} and {asked}" * 9, "max_tokens": 4}
            assert client.post("/v1/completions", json=body).status_code == 200
            assert client.post("/v1/completions", json={**body, "max_tokens": 0}).status_code == 400

        with (
            httpx.Client(base_url=f"http://{cluster.router.http}", timeout=HANG_S, trust_env=False) as router,
            prometheus(tmp_path, cluster) as database,
        ):

            def result(path: str, **query: str) -> dict[str, Any]:
                answer = database.get(path, params=query).json()
                assert answer["status"] == "success", answer
                data: dict[str, Any] = answer["data"]
                return data

            def missing() -> list[str]:
                queries = {expression: expression.replace("$__rate_interval", "1m") for expression in expressions}
                return [each for each, query in queries.items() if not result("/query", query=query)["result"]]

            def complete() -> bool:
                ask(router)
                return not missing()

            wait_until(complete, lambda: f"every expression returns series: {missing()}")
            [group] = result("/rules")["groups"]
            assert len(group["rules"]) > 10
            assert {(rule["health"], rule.get("lastError", "")) for rule in group["rules"]} == {("ok", "")}
            assert {rule["name"] for rule in group["rules"] if rule["state"] == "firing"} == set()
        for service in cluster.services.values():
            text = httpx.get(f"{cluster.metrics_url(service)}/metrics", timeout=HANG_S, trust_env=False).content
            checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=HANG_S)
            assert (checked.returncode, checked.stderr) == (0, b""), service.name
