"""Options of `pdserve bench`: each bad one is refused by its name, value and limit, before anything is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli.app import app
from pdserve.common.errors import ConfigError

NOBODY = "http://127.0.0.1:9"


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--num", "0"], "--num is 0, at least 1 is needed"),
        (["--num", "10000000"], "--num is 10000000 and needs 2560000000 prompt tokens, at most 134217728"),
        (["--temperature", "-1"], "--temperature is -1.0, 0 or more"),
        (["--warmup", "-1"], "--warmup is -1, at least 0"),
        (["--input-tokens", "0"], "--input-tokens is 0, at least 1"),
        (["--concurrency", "0"], "--concurrency is 0, at least 1"),
        (["--request-rate", "0"], "--request-rate is 0.0, above 0"),
        (["--request-rate", "inf"], "--request-rate is inf, above 0"),
        (["--timeout", "nan"], "--timeout is nan, above 0"),
        (["--trace", "t", "--request-rate", "1"], "--trace and --request-rate are given"),
        (["--trace", "t", "--trace-speed", "0"], "--trace-speed is 0.0, above 0"),
        (["--trace-speed", "2"], "--trace-speed is 2.0, but there is no --trace"),
        (["--trace-scale", "2"], "--trace-scale is 2, but there is no --trace"),
        (["--trace-format", "weka"], "--trace-format is weka, but there is no --trace"),
        (["--max-think", "5"], "--max-think is 5.0, but there is no --trace"),
        (["--trace", "t", "--trace-scale", "0"], "--trace-scale is 0, at least 1"),
        (["--trace", "t", "--max-think", "nan"], "--max-think is nan, 0 or more"),
        (["--save-requests"], "--save-requests is given without --json"),
        (
            ["--api", "grpc", "--url", "127.0.0.1:9", "--extra-body", '{"top_k": 1}'],
            "--extra-body is given with --api grpc",
        ),
        (["--extra-body", "[1]"], "--extra-body is not a JSON object"),
        (["--json", "/nosuch/folder/file"], "--json is /nosuch/folder/file, which cannot be written"),
        (["--goodput", "itl:5"], "--goodput is 'itl:5', ttft, tpot or e2el"),
        ([], "--url: http://127.0.0.1:9/v1/models gives no list of models"),
        (["--url", "127.0.0.1:9"], "--url: 127.0.0.1:9/v1/models gives no list of models"),
        (["--api", "grpc", "--url", "127.0.0.1:9", "--tokenizer", "/nosuch"], "/nosuch"),
        (["--api", "grpc", "--url", "127.0.0.1:9", "--trace", "/nosuch"], "--trace is /nosuch, which cannot be read"),
        (
            ["--api", "grpc", "--url", "127.0.0.1:9", "--trace", "/dev/null"],
            "--trace is /dev/null, which has no requests",
        ),
        (["--api", "grpc", "--url", NOBODY], "--url is http://127.0.0.1:9, host:port is needed"),
    ],
)
def test_a_bad_option_is_refused(options: list[str], cause: str) -> None:
    url = [] if "--url" in options else ["--url", NOBODY]
    result = CliRunner().invoke(app, ["bench", *url, *options])
    assert isinstance(result.exception, ConfigError), result.output
    assert cause in result.exception.message


GRPC = ["bench", "--api", "grpc", "--url", "127.0.0.1:9"]


def test_a_scale_that_does_not_divide_the_blocks_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "record"
    trace.write_text('{"timestamp": 0, "input_length": 20, "output_length": 1, "hash_ids": [0, 1], "block_size": 16}\n')
    result = CliRunner().invoke(app, [*GRPC, "--trace", str(trace), "--trace-scale", "3"])
    assert isinstance(result.exception, ConfigError)
    expected = (
        "--trace-scale is 3: session line 1: blocks of 16 tokens cannot be divided by 3, a divisor of 16 is needed"
    )
    assert result.exception.message == expected


def test_a_trace_that_needs_too_many_tokens_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    trace = tmp_path / "huge"
    trace.write_text('{"timestamp": 0, "input_length": 16000000, "output_length": 1}\n' * 9)
    result = CliRunner().invoke(app, [*GRPC, "--trace", str(trace)])
    assert isinstance(result.exception, ConfigError), result.output
    assert "the prompts have more than 134217728 tokens together" in result.exception.message


def test_failures_are_shown_and_are_the_status(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = ["bench", "--api", "grpc", "--url", "127.0.0.1:9", "--num", "2", "--warmup", "0", "--json", str(file)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1, result.output
    assert "failed: UNAVAILABLE  2" in result.stdout
    assert "UNAVAILABLE: failed to connect" in result.stderr
    figures = json.loads(file.read_text())
    assert (figures["completed"], figures["failed"], figures["median_ttft_ms"]) == (0, 2, None)
