"""`pdserve bench` against a real cluster: counts, latencies and files over HTTP and gRPC, and its end by Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from pdserve.cli.app import app
from tests.support.processes.cluster_processes import Cluster, pd_cluster
from tests.support.run.waiting import HANG_S, wait_until

pytestmark = pytest.mark.process

FLAGS = ("--num-blocks=256", "--block-size=8")
APIS = ["completions", "chat", "grpc"]


@pytest.fixture(scope="module")
def model(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("qwen2")


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pd_cluster(tmp_path_factory.mktemp("bench"), model, both=FLAGS) as cluster:
        yield cluster


def target(cluster: Cluster, model: Path, api: str = "completions") -> list[str]:
    url = cluster.router.address if api == "grpc" else f"http://{cluster.router.http}"
    return ["bench", "--api", api, "--url", url, "--tokenizer", str(model)]


def results(cluster: Cluster, model: Path, file: Path, api: str, *options: str) -> dict[str, Any]:
    """Run, and read what was written."""
    done = CliRunner().invoke(app, [*target(cluster, model, api), "--json", str(file), "--save-requests", *options])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("api", APIS)
def test_every_token_is_counted_and_latencies_fit_together(
    cluster: Cluster, model: Path, tmp_path: Path, api: str
) -> None:
    options = "--num 6 --concurrency 2 --input-tokens 20 --output-tokens 8 --goodput ttft:60000 --seed"
    seed = {"completions": 10, "grpc": 11, "chat": 12}[api]
    found = results(cluster, model, tmp_path / "results.json", api, *options.split(), str(seed))
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (6, 0, 48)
    if api != "chat":
        # neither the warm-up nor the run with the seed before had one of these prompts
        assert (found["total_input_tokens"], found["total_cached_tokens"]) == (120, 0)
    assert found["request_goodput"] == found["request_throughput"] == pytest.approx(6 / found["duration"])
    assert 0 < found["median_ttft_ms"] < found["median_e2el_ms"] < found["duration"] * 1e3
    for request in found["requests"]:
        # tokens of an incomplete character come in one chunk
        assert 1 <= len(request["chunk_s"]) <= request["output_tokens"] == 8
        assert request["sent_s"] < request["chunk_s"][0] <= request["chunk_s"][-1] <= request["ended_s"]


@pytest.mark.parametrize("api", APIS)
def test_turns_and_prefixes_are_found_in_the_cache(cluster: Cluster, model: Path, tmp_path: Path, api: str) -> None:
    options = "--num 4 --concurrency 1 --input-tokens 8 --output-tokens 4 --prefix-tokens 48 --num-turns 2"
    seed = str(1 + APIS.index(api))
    found = results(cluster, model, tmp_path / "results.json", api, *options.split(), "--seed", seed)
    assert found["completed"] == 8
    first, *later = found["requests"]
    assert first["cached_tokens"] == 0
    # the prefix; texts may begin with other tokens than the drawn ones where one ends and the next begins
    assert all(request["cached_tokens"] >= 24 for request in later)


def answered(cluster: Cluster) -> float:
    """Prompts that the router has answered."""
    text = httpx.get(f"http://{cluster.router.http}/metrics").text
    return sum(float(count) for count in re.findall(r"^pdserve_requests_total\{.*\} (\S+)", text, re.MULTILINE))


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_what_was_measured(
    cluster: Cluster, model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    file = tmp_path / "results.json"
    options = ["--num", "20000", "--input-tokens", "8", "--output-tokens", "2", "--json", str(file)]
    command = [sys.executable, "-m", "pdserve.cli.main", *target(cluster, model), *options]
    before = answered(cluster)
    # a suite that a shell runs in the background has SIGINT ignored, and its children inherit that
    ignored = signal.signal(signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, ignored)
    try:
        wait_until(lambda: process.poll() is not None or answered(cluster) >= before + 20, "20 answers")
        process.send_signal(number)
        output, errors = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "interrupted: requests in flight and those not yet sent are not counted" in errors
    found = json.loads(file.read_text())
    assert f"{found['completed']} answered, 0 failed" in output
    assert 0 < found["completed"] < 20000
    assert found["total_output_tokens"] == 2 * found["completed"]
    assert found["conditions"]["interrupted"].startswith("yes")
    cluster.check_pools()
