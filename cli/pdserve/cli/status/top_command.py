"""`pdserve top`: a router's status in the terminal, live."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.cli.status.status_client import StatusClient, plain
from pdserve.cli.status.status_text import by_source, count, legend, meter, one_line_waterfall, outcome, seconds
from pdserve.common.errors import ConfigError, PeerError
from pdserve.router.telemetry.status_view import MovesView, StatusView, WorkerView

MIN_INTERVAL_S = 0.2
MAX_INTERVAL_S = 3600.0
_NARROW = 100
"""Terminal width, in columns, below which tables leave out less important columns."""
_UNCUT = 1 << 12
"""Width of output that goes to a file or another program."""
_STATES = {"live": "green", "draining": "yellow"}


def run_top(client: StatusClient, interval_s: float, *, once: bool) -> None:
    """Show frames until `q`, Ctrl-C or end of input; with `once`, print one.

    Raises: ConfigError for an interval out of range; NotReached if no router answers at the start (later, the frame says so).
    """
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise ConfigError(f"--interval is {interval_s:g}, {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} s are allowed")
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # a file or another program gets whole lines
        console.width = _UNCUT
    with contextlib.suppress(KeyboardInterrupt):
        status = client.status()
        if once:
            console.print(frame(status, console.width))
            return
        _follow(client, status, interval_s, console)


def _follow(client: StatusClient, status: StatusView, interval_s: float, console: Console) -> None:
    first = frame(status, console.width, height=console.height)
    live = Live(first, console=console, screen=console.is_terminal, auto_refresh=False)
    with _keys() as pressed_q, live:
        while not pressed_q(interval_s):
            error = ""
            try:
                status = client.status()
            except PeerError as failure:
                error = failure.message
            live.update(frame(status, console.width, error, console.height), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """A function that waits the given seconds for a key and returns True for `q`. Without a terminal it only waits."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def pressed_q(wait_s: float) -> bool:
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0:
            if select.select([descriptor], [], [], left)[0] and os.read(descriptor, 1) in (b"q", b"Q", b""):
                return True
        return False

    try:
        yield pressed_q
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _sleep(wait_s: float) -> bool:
    time.sleep(wait_s)
    return False


def frame(status: StatusView, width: int, error: str = "", height: int | None = None) -> RenderableType:
    """One frame. width: columns of the terminal. error: why the status was not updated. height: lines; None: no limit."""
    narrow = width < _NARROW
    parts: list[RenderableType] = [_headline(status)]
    if error:
        parts.append(Text(f"not updated: {plain(error)}", style="bold red"))
    parts += [*_numbers(status), Text("")]
    if status.sees_all:
        room = None if height is None else max(3, height // 2 - len(parts))
        parts += [_workers(status.workers[:room], narrow=narrow)]
        if (hidden := status.num_workers - len(status.workers[:room])) > 0:
            parts.append(Text(f"{hidden} more", style="dim"))
        parts.append(Text(""))
    parts += [_slowest(status, width, narrow=narrow), legend()]
    if status.errors:
        most = sorted(status.errors.items(), key=lambda pair: -pair[1])
        parts += [Text(""), Text("errors  " + ", ".join(f"{plain(code)} {count(number)}" for code, number in most))]
    return Group(*parts)


def _headline(status: StatusView) -> Text:
    line = Text("pdserve ", style="bold") + Text(plain(status.model), style="bold cyan") + Text("  ")
    line += Text("serving", style="green") if status.healthy else Text("cannot serve", style="red")
    who = "" if status.sees_all else f"  tenant {plain(status.tenant)}"
    return line + Text(f"  up {seconds(status.uptime_s)}  version {plain(status.version)}{who}", style="dim")


def _numbers(status: StatusView) -> list[Text]:
    queue, recent = status.queue, status.recent
    places = "" if queue.num_places is None else f" of {count(queue.num_places)}"
    lines = [
        f"running {count(queue.num_running)}{places}, waiting {count(queue.num_queued)}, "
        f"in the router {count(queue.num_requests)}, sessions {count(queue.num_sessions)}",
        f"last {recent.window_s:.0f} s: {count(recent.requests_per_s)} requests/s, {count(recent.failed_per_s)} failed/s, "
        f"{count(recent.prompt_tokens_per_s)} prompt and {count(recent.output_tokens_per_s)} output tokens/s",
        f"first token p50 {seconds(recent.ttft_p50_s)}, p95 {seconds(recent.ttft_p95_s)}; "
        f"request p50 {seconds(recent.duration_p50_s)}, p95 {seconds(recent.duration_p95_s)}",
    ]
    if status.sees_all:
        hits = "-" if recent.cached_fraction is None else f"{recent.cached_fraction:.0%}"
        sources = by_source(recent.cached_tokens)
        transfers = sum(worker.num_remote_kv for worker in status.workers)
        lines.append(
            f"prefix cache {hits} of prompt tokens{f' ({sources})' if sources else ''}, "
            f"{count(status.num_indexed_blocks)} blocks indexed; "
            f"transfers {count(transfers)}, bandwidth estimate {count(status.transfer_bytes_per_s)}B/s"
        )
        lines.append(_moves(status.moves))
    return [Text(line) for line in lines]


def _moves(moves: MovesView) -> str:
    blocks, requests = (
        ", ".join(f"{plain(outcome)} {count(number)}" for outcome, number in counts.items()) or "0"
        for counts in (moves.blocks, moves.requests)
    )
    return (
        f"moves of blocks: {blocks}, {count(moves.block_bytes)}B; of running requests: {requests}, "
        f"pause p50 {seconds(moves.pause_p50_s)}"
    )


def _workers(workers: list[WorkerView], *, narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("worker", overflow="fold")
    table.add_column("role", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("run", "wait", "kv"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("blocks", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    if not narrow:
        for name in ("tokens", "tokens/s", "calls"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("address", overflow="fold")
        table.add_column("versions", no_wrap=True)
    for worker in workers:
        worker_id, role = Text(plain(worker.worker_id)), Text(plain(worker.role))
        state = Text(plain(worker.state), style=_STATES.get(worker.state, "red"))
        if worker.state == "absent":
            # in the column of the address, the last but one
            cells: list[str | Text] = [""] * 5 if narrow else [*[""] * 8, Text(plain(worker.cause))]
            table.add_row(worker_id, role, state, *cells)
            continue
        more: list[str | Text] = [
            count(worker.num_waiting_tokens),
            count(worker.prefill_tokens_per_s) if worker.prefill_tokens_per_s else "-",
            count(worker.num_calls),
            Text(plain(worker.address)),
            f"{worker.protocol_version}/{worker.sampler_version}",
        ]
        table.add_row(
            worker_id, role, state, f"{worker.num_running}/{worker.max_num_seqs}", str(worker.num_waiting),
            str(worker.num_remote_kv), f"{count(worker.blocks_in_use)}/{count(worker.blocks_total)}",
            meter(worker.blocks_in_use, worker.blocks_total, 6 if narrow else 12), *([] if narrow else more),
        )  # fmt: skip
    return table


def _slowest(status: StatusView, width: int, *, narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("slowest", justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("first token", justify="right", no_wrap=True)
    if not narrow:
        table.add_column("in", justify="right", no_wrap=True)
        table.add_column("out", justify="right", no_wrap=True)
    table.add_column("request", overflow="fold")
    columns = max(0, min(40, width - (90 if not narrow else 66)))
    table.add_column("waterfall" if columns >= 10 else "", no_wrap=True)
    for request in status.slowest:
        tokens = [] if narrow else [count(request.num_prompt_tokens), count(request.num_output_tokens)]
        table.add_row(
            seconds(request.duration_s), outcome(request), seconds(request.ttft_s), *tokens, Text(plain(request.request_id)),
            one_line_waterfall(request, columns) if columns >= 10 else Text(""),
        )  # fmt: skip
    return table
