"""`pdserve top` and `pdserve trace` against an HTTP server that answers what a router answers."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from typer.testing import CliRunner

from pdserve.cli.app import app
from pdserve.cli.main import main
from pdserve.cli.status.status_client import StatusClient
from pdserve.cli.status.status_text import count, one_line_waterfall, seconds
from pdserve.common.errors import ConfigError, NotFound, PdServeError, PeerError
from pdserve.common.request.cached_tokens import CachedTokens
from pdserve.router.telemetry.status_view import (
    MovesView,
    PhaseView,
    QueueView,
    RecentView,
    RequestView,
    StatusView,
    WorkerView,
)

PHASES = [
    PhaseView(name="tokenize", service="router", start_s=0.0, duration_s=0.5),
    PhaseView(name="prefill", service="prefill", start_s=0.5, duration_s=0.5),
    PhaseView(name="decode", service="decode", start_s=1.0, duration_s=1.0),
    PhaseView(name="kv_transfer", service="decode", start_s=0.75, duration_s=0.25, overlaps=True),
]
REQUEST = RequestView(
    request_id="0123456789abcdef0123456789abcdef", tenant="alice", operation="chat", outcome="stop", duration_s=2.0,
    ttft_s=1.0, num_prompts=1, num_prompt_tokens=40, num_cached_tokens=8,
    cached_tokens=CachedTokens(pool=6, peer=2), num_output_tokens=7, num_attempts=2,
    prefill="p0", decode="d0\x1b[2J", phases=PHASES,
)  # fmt: skip
STATUS = StatusView(
    unix_s=1.0, version="9.9", model="small", healthy=True, uptime_s=7200, sees_all=True,
    queue=QueueView(num_requests=5, num_running=3, num_queued=2, num_places=64),
    recent=RecentView(window_s=30, num_requests=60, requests_per_s=2, cached_fraction=0.25, ttft_p50_s=0.2,
                      cached_tokens=CachedTokens(pool=20_000, store=7)),
    moves=MovesView(blocks={"faster": 3, "failed": 1}, block_bytes=2_000_000, requests={"moved": 2}, pause_p50_s=0.05),
    slowest=[REQUEST], num_workers=2,
    workers=[
        WorkerView(role="prefill", worker_id="p0", state="live", address="10.0.0.1:1", num_running=3, max_num_seqs=64,
                   blocks_in_use=50, blocks_total=100, num_remote_kv=4),
        WorkerView(role="decode", worker_id="10.0.0.2:1", state="absent", cause="dead, or not reached yet"),
    ],
    errors={"overloaded": 12},
)  # fmt: skip


@pytest.fixture
def serve() -> Iterator[Callable[[int, bytes], str]]:
    """Starts a server that gives one answer to all requests; returns its URL."""
    servers = []

    def start(status: int, body: bytes) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.headers["authorization"] == "Bearer a-good-key"
                self.send_response(status if known else 401)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None: ...

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, columns: int = 140) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("PDSERVE_API_KEY", "a-good-key")
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("columns", [40, 80, 140])
def test_a_frame_shows_workers_queues_and_the_slowest_request(
    serve: Callable[[int, bytes], str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    url = serve(200, msgspec.json.encode(STATUS))
    output = run(monkeypatch, "top", "--once", "--url", url, columns=columns)
    assert max(map(len, output.splitlines())) <= columns
    words = " ".join(output.split())
    for part in (
        "small serving up 2.0 h",
        "running 3 of 64, waiting 2",
        "2 requests/s",
        "p50 200 ms",
        "overloaded 12",
        "2.00 s",
    ):
        assert part in words
    if columns >= 80:
        assert "live 3/64 0 4 50/100" in words
        assert "prefix cache 25% of prompt tokens (20.0k pool, 7 store)" in words
        assert "moves of blocks: faster 3, failed 1, 2.0MB; of running requests: moved 2, pause p50 50 ms" in words
    if columns == 140:
        assert "dead, or not reached yet" in output
        assert REQUEST.request_id in output


def test_a_pipe_gets_whole_columns(serve: Callable[[int, bytes], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("PDSERVE_API_KEY", "a-good-key")
    long = msgspec.structs.replace(STATUS.workers[0], worker_id="w" * 90, address="host-" + "x" * 90 + ":1")
    status = msgspec.structs.replace(STATUS, workers=[long, *STATUS.workers[1:]])
    result = CliRunner().invoke(app, ["top", "--once", "--url", serve(200, msgspec.json.encode(status))])
    assert result.exit_code == 0, result.output
    [line] = [line for line in result.output.splitlines() if long.worker_id in line]
    assert long.address in line
    assert max(map(len, (line.rstrip() for line in result.output.splitlines()))) < 400


def test_a_user_has_no_table_of_workers(serve: Callable[[int, bytes], str], monkeypatch: pytest.MonkeyPatch) -> None:
    own = StatusView(unix_s=1.0, model="small", tenant="alice", slowest=[REQUEST])
    output = run(monkeypatch, "top", "--once", "--url", serve(200, msgspec.json.encode(own)))
    assert "tenant alice" in output
    assert "blocks" not in output


@pytest.mark.parametrize("columns", [40, 100])
def test_a_trace_has_each_phase_and_no_control_characters(
    serve: Callable[[int, bytes], str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    url = serve(200, msgspec.json.encode(REQUEST))
    output = run(monkeypatch, "trace", REQUEST.request_id, "--url", url, columns=columns)
    words = " ".join(output.split())
    assert "prefill prefill 500 ms 25%" in words
    assert "kv transfer decode 250 ms overlaps" in words
    assert "40 prompt tokens (8 cached: 6 pool, 2 peer), 7 new" in words
    assert "2 attempts" in words
    assert "decode d0?[2J" in words
    assert "\x1b" not in output
    if columns == 100:
        [bar] = [line for line in output.splitlines() if line.startswith("decode ")]
        assert bar.count("█") == 25


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (404, b'{"error":{"message":"no request \'x\' is known to this router: it keeps the last 1024"}}', "keeps the last"),
        (404, b"no", "answers with status 404"),
        (500, b'{"error":{"message":"internal\\u001b error"}}', "500: internal? error"),
        (200, b"<html>", "did not answer like a pdserve router"),
        (200, b'{"unix_s":"now"}', "did not answer like a pdserve router"),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_shown_is_one_error(
    serve: Callable[[int, bytes], str], status: int, body: bytes, told: str
) -> None:
    with StatusClient(serve(status, body), "a-good-key") as client, pytest.raises(PdServeError) as failure:
        client.request("x")
    assert told in failure.value.message
    assert isinstance(failure.value, NotFound) == ("keeps" in told)


def test_a_refused_key_and_a_router_that_is_not_there_are_failures(serve: Callable[[int, bytes], str]) -> None:
    url = serve(200, b"{}")
    with (
        StatusClient(url, "another-key") as client,
        pytest.raises(PeerError, match=r"status 401 \(PDSERVE_API_KEY\)"),
    ):
        client.status()
    with (
        StatusClient("127.0.0.1:1", None) as client,
        pytest.raises(PeerError, match="no router answers at http://127"),
    ):
        client.status()


@pytest.mark.parametrize("command", [["top", "--once"], ["trace", "x"]])
@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://127.0.0.1:x", "no-such-host.invalid:80"])
def test_the_exit_status_is_that_of_the_document(
    command: list[str], url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 for an address that cannot be used (docs/command_line.md)."""
    monkeypatch.setattr(sys, "argv", ["pdserve", *command, "--url", url])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("interval", ["0", "nan", "1e9"])
def test_an_interval_out_of_range_is_refused(interval: str) -> None:
    result = CliRunner().invoke(app, ["top", "--interval", interval])
    assert isinstance(result.exception, ConfigError)
    assert "--interval is" in str(result.exception)


def test_numbers_and_times_have_units() -> None:
    assert [count(value) for value in (0, 0.25, 12, 12_345, 2e6, 3e9)] == ["0", "0.2", "12", "12.3k", "2.0M", "3.0G"]
    assert [seconds(value) for value in (None, 0.0012, 0.5, 2, 120, 7200)] == [
        "-", "1.20 ms", "500 ms", "2.00 s", "2.0 min", "2.0 h"
    ]  # fmt: skip
    assert str(one_line_waterfall(REQUEST, 40)) == "░" * 10 + "▓" * 10 + "█" * 20
