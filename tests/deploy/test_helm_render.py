"""The chart as Helm renders it: objects that Kubernetes accepts, pods that start. Needs the extra `helm`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.cli.development_certificates import write_certificates
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings

REASON = "needs the extra `helm`, which `make test-all` installs"
helm = pytest.importorskip("helm_python", reason=REASON)
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=REASON)

pytestmark = pytest.mark.slow

CHART = Path(__file__).parents[2] / "deploy/helm/pdserve"
SETS = ("minimal", "gpu", "everything")
KINDS: dict[str, Any] = {"router": RouterSettings, "prefill": PrefillSettings, "decode": DecodeSettings}
VERSIONS = ("1.30", "1.37")
"""The oldest Kubernetes that Chart.yaml allows, and the newest whose schemas are installed."""
OF_OTHERS = ("keda.sh/v1alpha1", "monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1")
"""Groups of custom resources, for which Kubernetes has no schema."""
SECRETS = {
    "PDSERVE_DEPLOYMENT_KEY": "0123456789abcdef",
    "PDSERVE_API_KEYS": "fedcba9876543210",
    "REDIS_PASSWORD": "abcdef",
}
SECRETS |= {"PDSERVE_REDIS": "rediss://user:secret@redis.example.com:6380/0", "HF_TOKEN": "hub", "headers": "a=b"}


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name="release", namespace="llm")
    documents = [one for name, text in texts.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text)]
    return [one for one in documents if one]


@cache
def rendered(name: str) -> tuple[dict[str, Any], ...]:
    return tuple(render(yaml.safe_load((CHART / f"ci/{name}-values.yaml").read_text())))


def of_kind(name: str, kind: str) -> dict[str, dict[str, Any]]:
    """Component -> object."""
    found = [one for one in rendered(name) if one["kind"] == kind]
    return {one["metadata"]["labels"].get("app.kubernetes.io/component", ""): one for one in found}


def pods(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in ("Deployment", "StatefulSet"):
        for component, one in of_kind(name, kind).items():
            yield component, one["spec"]["template"]


def environment(container: dict[str, Any]) -> dict[str, str]:
    """As the kubelet makes it."""
    made: dict[str, str] = {}
    for entry in container["env"]:
        value = entry.get("value")
        if value is None:
            source = entry["valueFrom"]
            field = {"status.podIP": "10.1.2.3", "metadata.name": "release-pdserve-prefill-7c9f-x2x"}
            value = (
                field[source["fieldRef"]["fieldPath"]]
                if "fieldRef" in source
                else SECRETS[source["secretKeyRef"]["key"]]
            )
        for earlier, text in made.items():
            value = value.replace(f"$({earlier})", text)
        assert entry["name"] not in made
        made[entry["name"]] = value
    return made


def test_helm_finds_no_fault() -> None:
    for name in SETS:
        report = helm.lint(CHART, yaml.safe_load((CHART / f"ci/{name}-values.yaml").read_text()), strict=True)
        assert not report["errors"]
        assert {message["error"] for message in report["messages"]} <= {"icon is recommended"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", SETS)
def test_kubernetes_accepts_every_object(name: str, version: str) -> None:
    known = [one for one in rendered(name) if one["apiVersion"] not in OF_OTHERS]
    assert len(known) > 10
    for one in known:
        kubernetes_validate.validate(one, version, strict=True)
    identities = [(one["kind"], one["metadata"]["name"]) for one in rendered(name)]
    assert len(set(identities)) == len(identities)
    assert all(len(one["metadata"]["name"]) < 64 and one["metadata"]["namespace"] == "llm" for one in rendered(name))


def test_a_wrong_object_is_refused() -> None:
    [deployment, *_] = [one for one in render({"router": {"strategy": {"kind": "x"}}}) if one["kind"] == "Deployment"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("name", SETS)
def test_every_service_starts_with_its_environment(name: str, tmp_path: Path) -> None:
    write_certificates(tmp_path / "made", ["pdserve.internal"], 1)
    for component, pod in pods(name):
        if component == "redis":
            continue
        [container] = pod["spec"]["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        folder = tmp_path / component
        for volume in pod["spec"]["volumes"]:
            write_secret(volume, folder / mounted[volume["name"]].lstrip("/"), component, tmp_path / "made")
        environ = {
            key: str(folder / value.lstrip("/")) if key.endswith("_FILE") else value
            for key, value in environment(container).items()
        }
        settings = load_settings(KINDS[container["args"][0]], environ=environ)
        assert container["args"] == [component], "no secret in a command line"
        assert settings.metrics_at == "0.0.0.0"
        assert not settings.key()[1], "the public development key"
        assert (settings.tls() is not None) == (name != "minimal")
        assert settings.insecure == (name != "gpu"), "all of it has TLS, and only then"
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        waits = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert grace >= waits + settings.drain_s + 15
        assert {port["name"]: port["containerPort"] for port in container["ports"]}["metrics"] == settings.metrics_port
        if component == "router":
            assert settings.asks_for_keys == (name != "everything")
        else:
            assert settings.peers_host == "10.1.2.3"
            assert settings.name(settings.port) == "release-pdserve-prefill-7c9f-x2x"
            gpu = container["resources"]["limits"].get("nvidia.com/gpu", 0)
            assert (settings.device, gpu) in (("cpu", 0), ("cuda", 1))


def write_secret(volume: dict[str, Any], folder: Path, role: str, made: Path) -> None:
    """The files that the volume has in a pod."""
    if "secret" not in volume:
        return
    folder.mkdir(parents=True, exist_ok=True)
    names = [item["path"] for item in volume["secret"].get("items", [])]
    pair = "front" if volume["name"] == "front-tls" else role
    authority = "clients-ca" if volume["name"] == "front-tls" else "services-ca"
    files = {"tls.crt": f"{pair}.pem", "tls.key": f"{pair}.key", "ca.crt": f"{authority}.pem"}
    for name in names or files:
        if name == "deployment_key":
            (folder / name).write_text(SECRETS["PDSERVE_DEPLOYMENT_KEY"])
        elif name == "api_keys.toml":
            digest = "0" * 64
            (folder / name).write_text(f'[[keys]]\nname = "one"\nsha256 = "{digest}"\n')
        else:
            (folder / name).write_bytes((made / files[name]).read_bytes())


@pytest.mark.parametrize("name", SETS)
def test_pods_are_hardened_and_limited(name: str) -> None:
    for component, pod in pods(name):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, "PDSERVE_ROUTER_PORT of a Service is no setting"
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        [container] = spec["containers"]
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
        assert {"livenessProbe", "readinessProbe"} <= container.keys()
        text = yaml.safe_dump([container.get("command", []), container["args"]])
        assert not any(secret in text for secret in ("$(", "PDSERVE_")), component


def test_probes_are_served_where_they_look() -> None:
    for name in SETS:
        for component, pod in pods(name):
            [container] = pod["spec"]["containers"]
            if component == "redis":
                continue
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            for probe, path in (("startupProbe", "live"), ("livenessProbe", "live"), ("readinessProbe", "ready")):
                if component == "router" and name == "everything":
                    # clients must show a certificate, which the kubelet has not
                    assert container[probe]["tcpSocket"] == {"port": ports["http"]}
                    continue
                scheme = "HTTPS" if component == "router" and name == "gpu" else "HTTP"
                port = ports["http" if component == "router" else "metrics"]
                assert container[probe]["httpGet"] == {"path": f"/{path}", "port": port, "scheme": scheme}


def test_grpc_probes_need_services_without_tls() -> None:
    clear = {"probes": {"protocol": "grpc"}, "tls": {"enabled": False}}
    [router, *_] = [one for one in render(clear) if one["kind"] == "Deployment"]
    [container] = router["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["grpc"] == {"port": 50051, "service": "ready"}
    more: tuple[dict[str, Any], ...] = ({"tls": {"enabled": True}}, {"front": {"tls": {"enabled": True}}}, {"tls": {}})
    for encrypted in more:
        with pytest.raises(helm.HelmError, match="without TLS"):
            render({**clear, **encrypted})


def test_without_values_services_speak_tls_with_each_other() -> None:
    """A deployment in which prompts travel in the clear says so itself."""
    settings: dict[str, set[str]] = {}
    for one in render({}):
        if one["kind"] in ("Deployment", "StatefulSet"):
            component = one["metadata"]["labels"]["app.kubernetes.io/component"]
            [container, *_] = one["spec"]["template"]["spec"]["containers"]
            settings[component] = {entry["name"] for entry in container.get("env", ())}
    for component in ("router", "prefill", "decode"):
        assert {"PDSERVE_TLS_CERT_FILE", "PDSERVE_TLS_KEY_FILE", "PDSERVE_TLS_CA_FILE"} <= settings[component]


def reached(name: str) -> set[tuple[str, str, int]]:
    """(from, to, port) that both ends' policies allow, among the chart's own pods."""
    policies = of_kind(name, "NetworkPolicy")

    def sides(side: str, peers: str) -> set[tuple[str, str, int]]:
        return {
            (component, peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"], port["port"])
            for component, policy in policies.items()
            for rule in policy["spec"][side]
            for peer in rule.get(peers, [])
            if "podSelector" in peer
            for port in rule.get("ports", [{"port": 0}])
        }

    into = {(peer, component, port) for component, peer, port in sides("ingress", "from")}
    assert into == sides("egress", "to"), "one end allows what the other refuses"
    return into


def test_each_pod_reaches_those_that_it_works_with_and_no_other() -> None:
    calls = {("router", "prefill", 50052), ("router", "decode", 50052)}
    workers = [(one, other) for one in ("prefill", "decode") for other in ("prefill", "decode")]
    blocks = {(*pair, port) for pair in workers for port in (50052, 50053, 50054)}
    redis = {(component, "redis", 6379) for component in ("router", "prefill", "decode")}
    assert reached("minimal") == calls | blocks | redis
    assert reached("gpu") == calls | blocks
    # 0 is any port: NIXL draws its own
    assert reached("everything") == calls | redis | {(*pair, 0) for pair in workers}


def test_selectors_choose_the_pods_of_their_component() -> None:
    for name in SETS:
        labels = {component: pod["metadata"]["labels"] for component, pod in pods(name)}
        for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "ServiceMonitor"):
            for component, one in of_kind(name, kind).items():
                selector = one["spec"].get("selector") or one["spec"]["podSelector"]
                wanted = selector.get("matchLabels", selector).items()
                chosen = {other for other, had in labels.items() if wanted <= had.items()}
                expected = {component} if component else {"router", "prefill", "decode"}
                # a ServiceMonitor chooses a Service, by the labels of that
                assert chosen == expected, f"{name} {kind} {component}"


def test_rules_are_the_alerts_for_the_pods_of_the_release() -> None:
    [rule] = of_kind("everything", "PrometheusRule").values()
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    [group] = rule["spec"]["groups"]
    [source] = yaml.safe_load((CHART.parents[1] / "prometheus/alerts.yml").read_text())["groups"]
    changed = [(made, given) for made, given in zip(group["rules"], source["rules"], strict=True) if made != given]
    [(down, _)] = changed
    # jobs have other names under the operator; labels are those that the monitor copies
    assert down["expr"] == (
        'up{app_kubernetes_io_instance="release",app_kubernetes_io_component=~"router|prefill|decode"} == 0'
    )
    [monitor] = of_kind("everything", "ServiceMonitor").values()
    copied = {re.sub(r"[^a-z]", "_", label) for label in monitor["spec"]["podTargetLabels"]}
    assert copied == set(re.findall(r"app_\w+", down["expr"]))
    assert not of_kind("minimal", "PrometheusRule")
    with pytest.raises(Exception, match=r"monitoring\.rules\.enabled needs monitoring\.kind"):
        render({"monitoring": {"rules": {"enabled": True}}})


def test_what_scales_scales_a_deployment_without_replicas() -> None:
    for name in SETS:
        deployments = of_kind(name, "Deployment")
        scaled = {**of_kind(name, "HorizontalPodAutoscaler"), **of_kind(name, "ScaledObject")}
        for component, deployment in deployments.items():
            assert ("replicas" in deployment["spec"]) == (component not in scaled)
            if component in scaled:
                assert scaled[component]["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


def test_numbers_have_no_exponent_and_lists_have_commas() -> None:
    for component, pod in pods("everything"):
        if component != "redis":
            environ = environment(pod["spec"]["containers"][0])
            assert environ["PDSERVE_MAX_MODEL_LEN"] == "1048576"
    environ = environment(dict(pods("everything"))["router"]["spec"]["containers"][0])
    assert environ["PDSERVE_SERVED_MODEL_NAME"] == "qwen3,qwen3-small"
    assert environ["PDSERVE_QUEUE_TIMEOUT_S"] == "12.5"
