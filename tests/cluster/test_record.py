"""A cluster that records its traffic, and `pdserve bench`, which replays the record, and sessions with their think times."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdserve.cli.app import app
from tests.support.processes.cluster_processes import Cluster, pd_cluster
from tests.support.run.waiting import wait_until

pytestmark = pytest.mark.process

BLOCK = 8
FLAGS = ("--num-blocks=512", f"--block-size={BLOCK}")


@pytest.fixture(scope="module")
def model(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("qwen2")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record") / "record.jsonl"


@pytest.fixture(scope="module")
def cluster(model: Path, record: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # what decode has computed of an answer is then cached where the next prompt is computed
    with pd_cluster(
        tmp_path_factory.mktemp("cluster"), model, both=FLAGS, router=["--local-prefill=always", f"--record={record}"]
    ) as cluster:
        yield cluster


def bench(cluster: Cluster, model: Path, file: Path, *options: str, api: str = "completions") -> dict[str, Any]:
    """Run, and read what was written."""
    url = cluster.router.address if api == "grpc" else f"http://{cluster.router.http}"
    command = ["bench", "--api", api, "--url", url, "--tokenizer", str(model), "--warmup", "0"]
    done = CliRunner().invoke(app, [*command, "--json", str(file), "--save-requests", *options])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def lines(record: Path, first: int, count: int) -> list[dict[str, Any]]:
    """Lines of a record from number `first` on, once they are there."""
    wait_until(lambda: len(record.read_text().splitlines()) >= first + count, "the record")
    found = record.read_text().splitlines()
    assert len(found) == first + count
    return [json.loads(line) for line in found[first:]]


def blocks_of(told: list[dict[str, Any]]) -> Counter[int]:
    """How often each full block is in a prompt; a block that has other numbers in another record has its counts here."""
    each = Counter(number for line in told for number in line["hash_ids"][: line["input_length"] // BLOCK])
    return Counter(each.values())


def test_a_record_is_replayed_with_its_lengths_times_and_shared_blocks(
    cluster: Cluster, model: Path, record: Path, tmp_path: Path
) -> None:
    file, copy = tmp_path / "results.json", tmp_path / "copy.jsonl"
    shape = (
        "--num 5 --concurrency 1 --input-tokens 12 --output-tokens 6 --prefix-tokens 40 --num-prefixes 2 --num-turns 2"
    )
    asked = bench(cluster, model, file, *shape.split(), "--seed", "3")
    told = lines(record, 0, 10)
    copy.write_text(record.read_text())
    # two prefixes, which three and two sessions, or four and one, have twice; and each first turn is in the second
    assert sum(line["input_length"] for line in told) == asked["total_input_tokens"]
    assert {(line["outcome"], line["output_length"], line["block_size"]) for line in told} == {("length", 6, BLOCK)}
    # the client saw the same request; the router's share of the time is a part of the client's
    assert all(
        0 < line["ttft_ms"] < (request["ended_s"] - request["sent_s"]) * 1e3
        for line, request in zip(told, asked["requests"], strict=True)
    )
    replayed = bench(cluster, model, file, "--trace", str(copy), "--seed", "4")
    again = lines(record, 10, 10)
    assert replayed["completed"] == 10
    for name in ("total_input_tokens", "total_output_tokens"):
        assert replayed[name] == asked[name]
    assert Counter(line["input_length"] for line in again) == Counter(line["input_length"] for line in told)
    assert blocks_of(again) == blocks_of(told)
    assert max(blocks_of(told)) >= 4, "prefixes are shared"
    start_s = min(line["timestamp"] for line in told) / 1e3
    planned = sorted(request["scheduled_s"] for request in replayed["requests"])
    assert planned == pytest.approx(sorted(line["timestamp"] / 1e3 - start_s for line in told))
    # half as long, in blocks of half as many tokens: blocks of the workers that have two of them are shared, too
    scaled = bench(
        cluster, model, file, "--trace", str(copy), "--seed", "5", "--trace-scale", "2", "--trace-speed", "50"
    )
    shorter = lines(record, 20, 10)
    assert sorted(line["input_length"] for line in shorter) == sorted(line["input_length"] // 2 for line in told)
    assert {line["output_length"] for line in shorter} == {3}
    assert scaled["completed"] == 10
    assert max(blocks_of(shorter)) >= 4
    cluster.check_pools()


WEKA = {
    "id": "t",
    "block_size": 16,
    "requests": [
        {"t": 0.0, "in": 70, "out": 5, "hash_ids": [0, 1, 2, 3], "api_time": 1.0},
        {"t": 1.1, "type": "subagent", "agent_id": "a", "duration_ms": 1000, "requests": [
            {"t": 1.1, "in": 40, "out": 4, "hash_ids": [0, 1], "api_time": 0.5},
            {"t": 1.7, "in": 60, "out": 4, "hash_ids": [0, 1, 9], "api_time": 0.3, "think_time": 0.1},
        ]},
        {"t": 2.4, "in": 100, "out": 6, "hash_ids": [0, 1, 2, 3, 4, 5], "api_time": 1.0, "think_time": 1.4},
        {"t": 600.0, "in": 120, "out": 3, "hash_ids": [0, 1, 2, 3, 4, 5, 6], "api_time": 1.0, "think_time": 500.0},
    ],
}  # fmt: skip
"""The sub-agent ends 0.3 s before the second request, which the record's think time contains."""


@pytest.mark.parametrize("api", ["completions", "grpc", "chat"])
def test_a_session_is_played_with_its_think_times_sub_agents_and_answers(
    cluster: Cluster, model: Path, tmp_path: Path, api: str
) -> None:
    trace = tmp_path / "session.json"
    trace.write_text(json.dumps(WEKA))
    seed = str(10 + ["completions", "grpc", "chat"].index(api))
    found = bench(
        cluster, model, tmp_path / "results.json", "--trace", str(trace), "--max-think", "0.4", "--seed", seed, api=api
    )
    assert (found["completed"], found["total_output_tokens"]) == (5, 22)
    requests = {request["name"]: request for request in found["requests"]}
    first, agent, agent_end, second, last = (requests[name] for name in ("t 0", "t 1 a 0", "t 1 a 1", "t 2", "t 3"))
    for before, after, wait_s in (
        (first, agent, 0.1),
        (agent, agent_end, 0.1),
        (agent_end, second, 0.3),
        (second, last, 0.4),
    ):
        assert after["sent_s"] >= before["ended_s"] + wait_s - 1e-3
    if api != "chat":  # whose prompts are texts, in a template
        assert found["total_input_tokens"] == 70 + 40 + 60 + 100 + 120
        # prompt and answer of the first request but for its last token, in full blocks of 8
        assert second["cached_tokens"] >= 72
        assert agent["cached_tokens"] == 32
        assert last["cached_tokens"] >= 104
    cluster.check_pools()
