"""`pdserve doctor` as a whole: exit status, both ways of showing, deadlines, and that nothing is left behind."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pdserve.cli.app import app
from pdserve.cli.doctor.examination import examine
from pdserve.cli.doctor.finding import Check, Examined, Finding, Verdict, failed, ok, warning
from pdserve.cli.doctor.report import make_report, show, show_summary

WITHOUT_NIXL = ["--connector=tcp"]


def test_a_check_that_hangs_or_breaks_is_a_finding_and_costs_no_other() -> None:
    gate = threading.Event()

    def hangs() -> Iterator[Finding]:
        gate.wait()
        yield ok("late")

    def breaks() -> Iterator[Finding]:
        yield ok("so far")
        raise KeyError("x")

    checks = [
        Check("first", lambda: [ok("fine")]),
        Check("hangs", hangs, deadline_s=0.05),
        Check("breaks", breaks),
        Check("last", lambda: [warning("so so", "do")]),
    ]
    examined = {one.check: one.findings for one in examine(checks)}
    gate.set()
    assert list(examined) == ["first", "hangs", "breaks", "last"]
    assert (examined["first"], examined["last"]) == ([ok("fine")], [warning("so so", "do")])
    assert examined["hangs"][0].verdict is Verdict.FAILED
    assert "0.05 s" in examined["hangs"][0].what
    assert "KeyError" in examined["breaks"][0].what


def test_findings_are_shown_whole_and_counted() -> None:
    console = Console(width=60, record=True)
    one = Examined("model", [ok("a [bold]path[/] that is kept as it stands"), failed("no", "do this")])
    show(console, one)
    report = make_report("decode", [one])
    show_summary(console, report)
    lines = console.export_text().splitlines()
    assert lines[0].split()[:2] == ["model", "ok"]
    assert "[bold]path[/]" in lines[0]
    assert any("-> do this" in line for line in lines)
    assert lines[-1].strip() == "decode: 1 ok, 0 warning, 1 failed"
    assert report.verdict is Verdict.FAILED
    assert make_report("decode", [Examined("a", [ok("x"), warning("y", "z")])]).verdict is Verdict.WARNING
    assert make_report("decode", []).verdict is Verdict.OK


def test_a_worker_that_would_run_exits_with_0() -> None:
    result = CliRunner().invoke(app, ["doctor", "--role", "decode", *WITHOUT_NIXL], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    names = [line.split()[0] for line in result.output.splitlines() if line and not line.startswith(" ")]
    assert names == [
        "model",
        "adapters",
        "memory",
        "native",
        "gpu",
        "key",
        "tls",
        "ports",
        "addresses",
        "files",
        "redis",
        "nixl",
        "decode:",
    ]


def test_a_router_in_json_and_a_port_in_use_exits_with_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = ["doctor", "--role", "router", "--json", f"--grpc-port={port}", "--port=0"]
        result = CliRunner().invoke(app, [*arguments, "--decode", "127.0.0.1:1"], env={"COLUMNS": "40"})
    assert result.exit_code == 1, result.output
    report = json.loads(result.output)
    assert (report["role"], report["verdict"]) == ("router", "failed")
    verdicts = {one["check"]: [finding["verdict"] for finding in one["findings"]] for one in report["checks"]}
    assert list(verdicts) == ["model", "key", "tls", "ports", "addresses", "files", "redis", "clients"]
    assert verdicts["ports"] == ["ok", "failed", "ok"]
    assert verdicts["addresses"] == ["warning"]


def test_no_line_is_broken_where_the_output_is_no_terminal() -> None:
    arguments = ["doctor", "--role", "router", "--port=0", "--grpc-port=0", "--decode", "127.0.0.1:1"]
    lines = CliRunner().invoke(app, arguments, env={"COLUMNS": None}).output.splitlines()
    advice = "-> start it (the order does not matter), or look at the address and at firewalls"
    assert [line.strip() for line in lines].count(advice) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--block-size=0"], "block_size"),
        (["--host=0.0.0.0"], "--insecure"),
        (["--config", "/no/such/file"], "/no/such/file"),
    ],
)
def test_settings_that_no_service_would_take_are_a_finding(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert named in result.output
    assert "settings" in result.output
