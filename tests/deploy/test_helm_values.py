"""The chart's values, schema and templates agree with each other and with the services. Nothing is rendered here."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pdserve.common.settings.catalogue import SERVICES, settings_of
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.worker_settings import PrefillSettings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/pdserve"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = {path.name: path.read_text() for path in (CHART / "templates").iterdir()}
SETS = sorted((CHART / "ci").glob("*-values.yaml"))
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SETTINGS = set(settings_of(*SERVICES))
OPEN_MAP = re.compile(r"\.(settings|requests|limits|strategy)\.")


def objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, schema) of the whole and of every value in it; a reference is replaced by its definition."""
    yield path, schema
    for reference in schema.get("allOf", ()):
        yield from objects(SCHEMA["definitions"][reference["$ref"].rpartition("/")[2]], path)
    for name, value in schema.get("properties", {}).items():
        yield from objects(value, f"{path}.{name}")


def leaves(values: Any, path: str = "") -> Iterator[str]:
    yield path
    if isinstance(values, dict):
        for name, value in values.items():
            yield from leaves(value, f"{path}.{name}")


def merged(default: Any, given: Any) -> Any:
    """As Helm merges values: maps by their entries, all else as a whole."""
    if not (isinstance(default, dict) and isinstance(given, dict)):
        return copy.deepcopy(given)
    return default | {name: merged(default.get(name), value) for name, value in given.items()}


def test_the_schema_is_one_and_every_value_is_described() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    for path, schema in objects(SCHEMA):
        assert schema.get("description", "").endswith("."), path
        if "properties" in schema:
            assert schema["additionalProperties"] is False, path


def test_values_and_schema_name_the_same() -> None:
    # values need not have every entry of these maps, nor the schema
    described = {path for path, schema in objects(SCHEMA) if path if not OPEN_MAP.search(path)}
    given = {path for path in leaves(VALUES) if path if not OPEN_MAP.search(path)}
    assert described - given == {".global"}
    assert given - described <= {path for path in given if path.startswith(".networkPolicy.")}


@pytest.mark.parametrize("path", [None, *SETS], ids=lambda path: path.stem if path else "defaults")
def test_values_keep_to_the_schema(path: Path | None) -> None:
    given = yaml.safe_load(path.read_text()) if path else {}
    jsonschema.Draft7Validator(SCHEMA).validate(merged(VALUES, given))


@pytest.mark.parametrize(
    "given",
    [
        {"replicas": 3},
        {"router": {"replica": 3}},
        {"settings": {"deployment_key": "0123456789abcdef"}},
        {"router": {"settings": {"api_keys": ["0123456789abcdef"]}}},
        {"decode": {"settings": {"port": 1}}},
        {"decode": {"settings": {"num-threads": 1}}},
        {"decode": {"settings": {"num_threads": [1]}}},
        {"decode": {"settings": {"kernels": "fortran"}}},
        {"decode": {"autoscaling": {"kind": "HPA"}}},
        {"prefill": {"podDisruptionBudget": {"maxUnavailable": "half"}}},
        {"image": {"digest": "sha256:short"}},
        {"ports": {"http": 0}},
        {"drainSeconds": 1.5},
        {"otlpEndpoint": "collector:4317"},
        {"networkPolicy": {"dnsTo": []}},
    ],
    ids=json.dumps,
)
def test_wrong_values_are_refused(given: dict[str, Any]) -> None:
    validator = jsonschema.Draft7Validator(SCHEMA)
    assert list(validator.iter_errors(merged(VALUES, given)))


def test_templates_name_values_settings_and_metrics_that_exist() -> None:
    text = "\n".join(TEMPLATES.values())
    variables = set(re.findall(r"PDSERVE_([A-Z_]+\b)", text))
    assert len(variables) > 20
    assert {name.lower() for name in variables} <= SETTINGS
    metrics = set(re.findall(r"\bpdserve_\w+", TEMPLATES["autoscaling.yaml"]))
    assert metrics == {"pdserve_requests_in_flight", "pdserve_engine_requests", "pdserve_kv_blocks"}
    documented = set(re.findall(r"^\| `(pdserve_\w+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    assert metrics <= documented
    source = (ROOT / "worker/pdserve/worker/telemetry/worker_metrics.py").read_text()
    states = set(re.findall(r'"(\w+)": stats\.', source))
    assert {"waiting", "waiting_for_kv", "in_use"} <= states
    known = {path for path, _ in objects(SCHEMA)}
    for path in re.findall(r"(?:\.Values|\$values|\.root\.Values)((?:\.[a-zA-Z]+)+)", text):
        assert re.sub(r"\.settings\.connector$", ".settings", path) in known, path


def test_the_chart_takes_every_setting_but_its_own_and_secrets() -> None:
    known = SCHEMA["definitions"]["settings"]["properties"].keys()
    owned = SETTINGS - known
    assert known < SETTINGS
    assert {"deployment_key", "api_keys", "redis", "port", "model", "device"} <= owned
    assert {"max_num_seqs", "max_connections", "log_format", "lora_modules"} <= known
    set_by_templates = {
        name.lower() for name in re.findall(r"name: PDSERVE_([A-Z_]+)\n", "\n".join(TEMPLATES.values()))
    }
    assert set_by_templates <= owned
    for part in ("", "router", "prefill", "decode"):
        assert (VALUES[part] if part else VALUES)["settings"].keys() <= known


def test_ports_are_those_of_the_services_and_of_compose() -> None:
    ports = VALUES["ports"]
    defaults = RouterSettings()
    assert (ports["http"], ports["grpc"]) == (defaults.port, defaults.grpc_port)
    worker = COMPOSE["services"]["prefill"]["environment"]
    assert (str(ports["worker"]), str(ports["metrics"])) == (worker["PDSERVE_PORT"], worker["PDSERVE_METRICS_PORT"])
    assert len(set(ports.values())) == len(ports)


def test_redis_lets_nobody_do_more_than_in_compose() -> None:
    def users(script: str) -> dict[str, str]:
        return dict(re.findall(r"^ *user (\w+) (.*)$", script, re.MULTILINE))

    ours = users(TEMPLATES["redis.yaml"])
    compose = users(COMPOSE["services"]["redis"]["command"][-1])
    pattern = '~{{ printf "{%s}" .Values.redis.namespace }}:*'
    assert ours == {name: rule.replace("$$", "$").replace("~{pdserve}:*", pattern) for name, rule in compose.items()}
    assert VALUES["redis"]["namespace"] == RouterSettings().redis_namespace


def test_secrets_are_those_that_one_command_makes() -> None:
    made = set(
        re.findall(r'"([A-Z_]+)"', (ROOT / "deploy/make_secrets.py").read_text().split("NAMES = ")[1].split(")")[0])
    )
    keys = set(re.findall(r"key: ([A-Z_]+|api_keys\.toml)\b", "\n".join(TEMPLATES.values())))
    assert keys - {"PDSERVE_REDIS", "HF_TOKEN", "api_keys.toml"} == made - {"GRAFANA_PASSWORD"}


def test_pods_are_of_the_image_and_of_the_release() -> None:
    image = (ROOT / "Dockerfile").read_text()
    # root for a step of the target `gpu`; tests/house/test_deploy.py checks that no target ends as root
    [user] = {*re.findall(r"^USER (\d+)$", image, re.MULTILINE)} - {"0"}
    assert f"runAsUser: {user}\n" in TEMPLATES["_helpers.tpl"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    [version] = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert chart["version"] == chart["appVersion"] == version
    assert VALUES["drainSeconds"] == RouterSettings().drain_s == PrefillSettings().drain_s


def test_the_chart_has_the_alerts_of_the_repository() -> None:
    """A chart contains its files, so that these are a copy."""
    assert (CHART / "files/alerts.yml").read_bytes() == (ROOT / "deploy/prometheus/alerts.yml").read_bytes()
