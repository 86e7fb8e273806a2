"""Compose file, Prometheus and the dashboard name things of pdserve that exist."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.cli.app import app
from pdserve.cli.development_certificates import write_certificates
from pdserve.common.errors import PdServeError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from tests.support.run.waiting import HANG_S

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SETTINGS: dict[str, type[Any]] = {"router": RouterSettings, "prefill": PrefillSettings, "decode": DecodeSettings}
OURS = {
    name: service for name, service in COMPOSE["services"].items() if "PDSERVE_HOST" in service.get("environment", {})
}


def interpolated(value: str) -> str:
    """As docker-compose does with nothing set: `${NAME:-default}` and `${NAME-default}`; a required one gets a value."""
    value = re.sub(r"\$\{\w+:\?[^}]*\}", "0123456789abcdef" * 2, value)
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", value)


def environment(service: dict[str, Any]) -> dict[str, str]:
    return {name: interpolated(value) for name, value in service["environment"].items()}


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_service_starts_with_its_environment(name: str, tmp_path: Path) -> None:
    service = OURS[name]
    [role] = service["command"]
    files = {}
    for variable, value in environment(service).items():
        if variable.startswith("PDSERVE_TLS") and variable.endswith("_FILE"):
            files[variable] = Path(value).name
            assert value.startswith("/tls/")
    write_certificates(tmp_path / "tls", ["pdserve.internal"], 1)
    environ = environment(service) | {name: str(tmp_path / "tls" / file) for name, file in files.items()}
    if role != "router":
        # a container's name stands for its address; that of the machine that runs the tests may not
        environ["PDSERVE_ADVERTISE_HOST"] = "172.19.0.3"
    settings = load_settings(SETTINGS[role], environ=environ)
    assert settings.tls() is not None
    assert settings.redis == "redis://pdserve:0123456789abcdef0123456789abcdef@redis:6379/0"
    assert not settings.key()[1], "the public development key"
    if isinstance(settings, RouterSettings):
        assert settings.asks_for_keys
    elif settings.device == "cpu":
        # the grammar compiler's part, the pool and what a worker needs by itself
        needs_mib = settings.limits.grammar_memory_mib + (settings.pool_mib or 0) + 1024
        assert needs_mib < int(interpolated(service["mem_limit"]).removesuffix("g")) << 10


def test_every_secret_is_demanded_and_made_by_one_command(tmp_path: Path) -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    demanded = set(re.findall(r"\$\{(\w+):\?", text))
    made = tmp_path / ".env"
    command = [sys.executable, str(ROOT / "deploy/make_secrets.py"), str(made)]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    pairs = dict(line.split("=") for line in made.read_text().splitlines())
    assert (
        set(pairs) == demanded == {"PDSERVE_DEPLOYMENT_KEY", "REDIS_PASSWORD", "PDSERVE_API_KEYS", "GRAFANA_PASSWORD"}
    )
    assert made.stat().st_mode & 0o777 == 0o600
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in pairs.values())
    assert len(set(pairs.values())) == len(pairs)
    assert not any(value in first.stdout + first.stderr for value in pairs.values())
    before = made.read_text()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode
    assert "is not overwritten" in again.stderr
    assert made.read_text() == before
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert ".env" in ignored
    # of a password that is given nothing stands in a command line, but for what a shell reads from its environment
    for name, service in COMPOSE["services"].items():
        said = "\n".join([*service.get("command", []), *service.get("healthcheck", {}).get("test", [])])
        assert not any(secret in re.sub(r"\$\$\w+", "", said) for secret in demanded), name


def networks(name: str) -> set[str]:
    return set(COMPOSE["services"][name].get("networks", []))


def test_each_network_holds_those_that_must_reach_each_other_and_no_other() -> None:
    members = {
        network: {name for name in COMPOSE["services"] if network in networks(name)} for network in COMPOSE["networks"]
    }
    ours = set(OURS)
    assert members == {
        "control": ours,
        "redis": ours | {"redis"},
        "observe": ours | {"prometheus", "otel-collector"},
        "dashboards": {"prometheus", "otel-collector", "jaeger", "grafana"},
        "front": {"router"},
    }
    assert {name for name, network in COMPOSE["networks"].items() if network.get("internal")} == {
        "control",
        "redis",
        "observe",
    }
    for name in ("grafana", "jaeger"):
        assert not any(networks(name) & networks(other) for other in [*OURS, "redis"]), f"{name} reaches a service"
    assert not networks("certs")
    assert COMPOSE["services"]["certs"]["network_mode"] == "none"


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_every_service_is_hardened_and_limited(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert not service.get("cap_add")
    assert not service.get("privileged")
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert 0 < service["pids_limit"] <= 512
    assert re.fullmatch(r"\d+[mg]", interpolated(service["mem_limit"]))
    assert float(interpolated(str(service["cpus"]))) > 0
    assert service["ulimits"]["nofile"]["hard"] >= 16384
    assert service["ulimits"]["core"] == 0, "a core has prompts and keys in it"
    assert service["restart"] == ("no" if name == "certs" else "unless-stopped")
    assert all(volume.endswith(":ro") for volume in service.get("volumes", []) if volume.startswith((".", "$")))


@pytest.mark.parametrize("name", sorted(OURS))
def test_health_checks_leave_python_time_to_start(name: str) -> None:
    check = COMPOSE["services"][name]["healthcheck"]
    [inner] = re.findall(r"timeout=(\d+)", check["test"][-1])
    interval, timeout = (int(check[key].removesuffix("s")) for key in ("interval", "timeout"))
    assert interval >= timeout > int(inner) >= 5


def test_the_systemd_unit_starts_each_service_and_lets_it_drain() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "deploy/systemd/pdserve@.service")
    service = unit["Service"]
    program, role, *options = service["ExecStart"].split()
    assert (Path(program).name, role, options) == ("pdserve", "%i", ["--config", "/etc/pdserve/pdserve.toml"])
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(SETTINGS) <= commands
    for kind in SETTINGS.values():
        assert int(service["TimeoutStopSec"]) >= kind().drain_s + 15
    # a second signal to the processes of a service would cut its drain short
    assert service["KillMode"] == "mixed"
    assert service["NoNewPrivileges"] == "yes"
    assert service["CapabilityBoundingSet"] == ""
    assert service["LimitCORE"] == "0", "a core has prompts and keys in it"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = tmp_path / ".venv/bin/pdserve"
    program.parent.mkdir(parents=True)
    program.symlink_to("/bin/true")
    text = (ROOT / "deploy/systemd/pdserve@.service").read_text().replace("/opt/pdserve", str(tmp_path))

    def complaints(unit: str) -> str:
        (tmp_path / "pdserve@.service").write_text(unit)
        command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "pdserve@.service")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
        return done.stdout + done.stderr

    assert complaints(text) == ""
    assert "strickt" in complaints(text.replace("ProtectSystem=strict", "ProtectSystem=strickt"))


def test_no_service_has_the_key_of_another() -> None:
    at_tls = {
        name: {volume.split(":")[0] for volume in COMPOSE["services"][name].get("volumes", []) if "tls-" in volume}
        for name in OURS
    }
    assert at_tls == {name: {f"tls-{service['command'][0]}"} for name, service in OURS.items()}
    image = (ROOT / "Dockerfile").read_text()
    for volume in COMPOSE["services"]["certs"]["volumes"]:
        assert volume.split(":")[1] in image, "a new volume would belong to root"


def image_targets() -> dict[str, list[str]]:
    """Name of each stage of the Dockerfile that is no build -> its instructions, after those of the stage that it begins with."""
    targets: dict[str, list[str]] = {}
    for stage in re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]:
        origin, *name = stage.splitlines()[0].split(" AS ")
        joined = stage.replace("\\\n", " ").splitlines()[1:]
        targets[name[0] if name else "default"] = targets.get(origin, []) + joined
    del targets["build"]
    return targets


def test_no_target_of_the_image_ends_as_root() -> None:
    assert set(image_targets()) == {"processor", "gpu", "default"}
    for name, instructions in image_targets().items():
        users = [line.split()[1] for line in instructions if line.startswith("USER ")]
        assert users[-1] == "10001", name
    assert image_targets()["default"] == image_targets()["processor"]


def test_kernels_are_compiled_into_a_volume_of_each_gpu_service() -> None:
    [variables] = [line for line in image_targets()["gpu"] if line.startswith("ENV ") and "TRITON_CACHE_DIR" in line]
    cache = Path(variables.split("TRITON_CACHE_DIR=")[1].split()[0])
    made = "\n".join(line for line in image_targets()["gpu"] if line.startswith("RUN install -d -o 10001"))
    volumes = []
    gpu = {name: service for name, service in OURS.items() if service.get("profiles") == ["gpu"]}
    assert len(gpu) == 2
    for name, service in OURS.items():
        build, mounted = service["build"], dict(volume.split(":")[1::-1] for volume in service["volumes"])
        assert build.get("target") == ("gpu" if name in gpu else None), name
        if name in gpu:
            [place] = [folder for folder in mounted if cache.is_relative_to(folder)]
            assert place in made, "a new volume would belong to root"
            assert not any(cache.is_relative_to(folder) for folder in service["tmpfs"]), "nothing there can be executed"
            volumes.append(mounted[place])
    assert len(set(volumes)) == len(volumes), "a role could choose what another executes"
    assert set(volumes) <= set(COMPOSE["volumes"])


def test_redis_lets_nobody_do_more_than_services_need() -> None:
    script = COMPOSE["services"]["redis"]["command"][-1]
    users = dict(re.findall(r"^user (\w+) (.*)$", script, re.MULTILINE))
    assert users["default"] == "off"
    assert users["health"] == "on nopass resetkeys resetchannels -@all +ping"
    _, rights = (ROOT / "docs/protocol.md").read_text().split("**Rights.**", 1)
    documented = rights.split("```")[1].split()
    assert documented[0] == "~{ns}:*"
    assert "needs no more than this" in rights
    given = users["pdserve"].split()
    assert given[:5] == ["on", ">$$REDIS_PASSWORD", "resetchannels", "~{pdserve}:*", "-@all"]
    assert given[5:] == documented[1:]
    assert "protected-mode no" not in script


def test_the_router_can_do_without_weights() -> None:
    overlay = yaml.safe_load((ROOT / "deploy/compose.router-model.yml").read_text())
    assert set(overlay["services"]) == {"router"}
    [volume] = overlay["services"]["router"]["volumes"]
    assert volume.startswith("${ROUTER_MODEL_FOLDER:?")
    assert volume.endswith(":/models:ro")


def test_only_ports_for_people_are_published_and_only_on_loopback() -> None:
    assert {"router", "prefill", "decode"} <= set(OURS)
    assert {"redis", "otel-collector", "jaeger", "prometheus", "grafana"} <= set(COMPOSE["services"])
    for name, service in COMPOSE["services"].items():
        published = [interpolated(port) for port in service.get("ports", [])]
        assert all(port.startswith("127.0.0.1:") for port in published), f"{name} publishes {published}"
        assert not published or name in ("router", "jaeger", "prometheus", "grafana")


def test_images_of_others_can_be_pinned_by_digest() -> None:
    for name, service in COMPOSE["services"].items():
        if "build" not in service:
            assert re.fullmatch(r"\$\{[A-Z]+_IMAGE:-[\w./-]+:[\w.-]+\}", service["image"]), name
            assert not service["image"].endswith((":latest}", "-latest}"))


def test_prometheus_scrapes_the_ports_that_the_services_serve() -> None:
    jobs = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    for job in jobs:
        [discovery] = job["dns_sd_configs"]
        for name in discovery["names"]:
            role = OURS[name]["command"][0]
            ports = {key: value for key, value in environment(OURS[name]).items() if key.endswith("PORT")}
            settings = load_settings(SETTINGS[role], environ=ports)
            assert discovery["port"] == settings.metrics_port, name


def documented_metrics() -> dict[str, set[str]]:
    """Name -> its labels, from docs/metrics.md."""
    rows = re.findall(r"^\| `(pdserve_\w+)` \| \w+ \| (.+?) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


def family_of(series: str) -> str:
    return series if series in documented_metrics() else re.sub(r"_(bucket|sum|count)$", "", series)


def test_alerts_use_metrics_labels_and_codes_that_exist() -> None:
    metrics, codes = documented_metrics(), {kind.code for kind in kinds_of_errors()}
    [group] = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names) > 10
    for rule in group["rules"]:
        used = re.findall(r"(pdserve_\w+)(?:\{([^}]*)\})?", rule["expr"])
        assert used or rule["expr"].startswith("up{job="), rule["alert"]
        labels = {"instance", "job", "le"}
        for series, selector in used:
            labels |= metrics[family_of(series)]
            for label, values in re.findall(r'(\w+)=~?"([^"]*)"', selector):
                assert label in metrics[family_of(series)], rule["alert"]
                assert label != "code" or set(values.split("|")) <= codes, rule["alert"]
        for by in re.findall(r"(?:by|on) \(([^)]*)\)", rule["expr"]):
            assert {label.strip() for label in by.split(",")} <= labels, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels, rule["alert"]
    table = (ROOT / "docs/observability.md").read_text().split("\n## Alerts\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`(Pdserve\w+)`", table)) == set(names)


def kinds_of_errors() -> set[type[PdServeError]]:
    found, new = set[type[PdServeError]](), {PdServeError}
    while new:
        found |= new
        new = {kind for each in new for kind in each.__subclasses__()}
    return found


def test_prometheus_reads_the_alerts() -> None:
    [file] = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["rule_files"]
    assert f"./deploy/prometheus/alerts.yml:{file}:ro" in COMPOSE["services"]["prometheus"]["volumes"]


ALERTING = {
    'up{job="decode"}': ("1x400", "0x400"),
    'pdserve_workers{role="decode",state="live"}': ("2x400", "0x400"),
    'pdserve_workers{role="prefill",state="refused"}': ("0x400", "1x400"),
    'pdserve_requests_total{outcome="stop"}': ("0+100x400", "0+100x400"),
    'pdserve_errors_total{code="worker_lost"}': ("0+1x400", "0+9x400"),
    'pdserve_errors_total{code="overloaded"}': ("0+1x400", "0+9x400"),
    'pdserve_time_to_first_token_seconds_bucket{le="10"}': ("0+96x400", "0+90x400"),
    'pdserve_time_to_first_token_seconds_bucket{le="30"}': ("0+100x400", "0+100x400"),
    'pdserve_time_to_first_token_seconds_bucket{le="+Inf"}': ("0+100x400", "0+100x400"),
    'pdserve_kv_blocks{state="in_use"}': ("90x400", "96x400"),
    'pdserve_kv_blocks{state="free"}': ("10x400", "4x400"),
    "pdserve_preemptions_total": ("0+1x400", "0+30x400"),
    'pdserve_kv_transfers_total{role="receiver",outcome="failed"}': ("0+1x400", "0+3x400"),
    "pdserve_engine_tick_age_seconds": ("5x400", "11x400"),
    'pdserve_event_loop_lag_seconds_bucket{le="0.25"}': ("0+100x400", "0+90x400"),
    'pdserve_event_loop_lag_seconds_bucket{le="1"}': ("0+100x400", "0+100x400"),
    'pdserve_event_loop_lag_seconds_bucket{le="+Inf"}': ("0+100x400", "0+100x400"),
    'pdserve_background_task_restarts_total{task="watch"}': ("3x400", "0x200 1x200"),
    'pdserve_tls_certificate_expiry_timestamp_seconds{peers="clients"}': (f"{15 * 86400}x400", f"{14 * 86400}x400"),
    "pdserve_redis_up": ("1x400", "0x400"),
    'pdserve_audit_lines_total{outcome="dropped"}': ("3x400", "0+1x400"),
    'pdserve_spans_total{outcome="failed"}': ("3x400", "0+1x400"),
}
"""Series -> its values every 15 s in a cluster without faults and in one with all of them, as Prometheus' unit tests write them."""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
@pytest.mark.parametrize("faulty", [False, True])
def test_prometheus_fires_each_alert_in_a_cluster_with_its_fault_alone(tmp_path: Path, faulty: bool) -> None:
    alerts = ROOT / "deploy/prometheus/alerts.yml"
    names = [rule["alert"] for rule in yaml.safe_load(alerts.read_text())["groups"][0]["rules"]]
    fired = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in names]
    expression = 'count by (alertname) (ALERTS{alertstate="firing"})'
    case = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values[faulty]} for name, values in ALERTING.items()],
        "promql_expr_test": [{"expr": expression, "eval_time": "1h", "exp_samples": fired if faulty else []}],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(alerts)], "evaluation_interval": "15s", "tests": [case]}))
    tested = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=HANG_S)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_the_dashboard_shows_metrics_that_exist() -> None:
    documented = documented_metrics()
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/pdserve.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(expressions) > 20
    for expression in expressions:
        for metric in re.findall(r"pdserve_\w+", expression):
            assert family_of(metric) in documented, metric
