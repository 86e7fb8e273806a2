"""One run of `pdserve bench`: its workload, its end point and its reports."""

from __future__ import annotations

import asyncio
import platform
import signal
import sys
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdserve.cli.bench.endpoints import Endpoint, GrpcEndpoint, OpenAIEndpoint, tls_options
from pdserve.cli.bench.report import tables
from pdserve.cli.bench.report_files import ReportFiles
from pdserve.cli.bench.run_load import LoadPlan, LoadRun, RequestRecord
from pdserve.cli.bench.summary import Summary, parse_targets
from pdserve.cli.bench.trace_options import TraceFormat
from pdserve.cli.bench.traces.read_trace import fitted, read_trace
from pdserve.cli.bench.traces.trace import TraceSession
from pdserve.cli.bench.traces.trace_text import MAX_DRAWN_TOKENS, DrawTokens, TraceTexts
from pdserve.cli.bench.workload import Shape, random_sessions
from pdserve.cli.exit_status import EXIT_FAILED, EXIT_INTERRUPTED
from pdserve.common.errors import ConfigError
from pdserve.common.security.tls import ClientTls
from pdserve.models.model_folder import BUNDLED, model_folder
from pdserve.text.tokenization.tokenizer import Tokenizer

Api = Literal["completions", "chat", "grpc"]
MAX_SHOWN_ERRORS = 3
WARM_UP_SEED = 1 << 32
"""Added to the seed, so that no run repeats another's warm-up and finds it in a prefix cache."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of one run."""

    api: Api
    url: str
    model: str | None
    tokenizer: str | None
    api_key: str | None
    tls: ClientTls | None
    timeout_s: float
    extra_body: dict[str, Any]
    shape: Shape
    num_sessions: int
    trace: Path | None
    trace_format: TraceFormat | None
    """None: by the content."""
    trace_speed: float
    trace_scale: int
    max_think_s: float
    plan: LoadPlan
    warm_up: int
    ignore_eos: bool
    temperature: float
    goodput: list[str]
    json_file: Path | None
    html_file: Path | None
    plots_folder: Path | None
    save_requests: bool
    shown: dict[str, Any] = field(default_factory=dict)
    """Options for the reports, name -> text."""

    def verify(self) -> None:
        """Raises: ConfigError naming the option, its value and its limit."""
        self.shape.verify()
        if self.num_sessions < 1:
            raise ConfigError(f"--num is {self.num_sessions}, at least 1 is needed")
        tokens = self.num_sessions * (self.shape.prefix_tokens + self.shape.num_turns * self.shape.input_tokens)
        if self.trace is None and tokens > MAX_DRAWN_TOKENS:
            raise ConfigError(
                f"--num is {self.num_sessions} and needs {tokens} prompt tokens, at most {MAX_DRAWN_TOKENS} are possible"
            )
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"--temperature is {self.temperature}, 0 or more is needed")
        if self.warm_up < 0:
            raise ConfigError(f"--warmup is {self.warm_up}, at least 0 is needed")
        if (rate := self.plan.requests_per_s) is not None and not 0 < rate < float("inf"):
            raise ConfigError(f"--request-rate is {rate}, above 0 is needed; for all at once use --concurrency")
        if (concurrency := self.plan.concurrency) is not None and concurrency < 1:
            raise ConfigError(f"--concurrency is {concurrency}, at least 1 is needed")
        if not 0 < self.trace_speed < float("inf"):
            raise ConfigError(f"--trace-speed is {self.trace_speed}, above 0 is needed")
        if not 0 < self.timeout_s < float("inf"):
            raise ConfigError(f"--timeout is {self.timeout_s}, above 0 seconds are needed")
        if self.trace is not None and self.plan.requests_per_s is not None:
            raise ConfigError("--trace and --request-rate are given: a trace has arrival times of its own")
        if self.trace_scale < 1:
            raise ConfigError(f"--trace-scale is {self.trace_scale}, at least 1 is needed")
        if not self.max_think_s >= 0:
            raise ConfigError(f"--max-think is {self.max_think_s}, 0 or more seconds are needed")
        for name, value, default in (
            ("--trace-speed", self.trace_speed, 1.0),
            ("--trace-scale", self.trace_scale, 1),
            ("--trace-format", self.trace_format, None),
            ("--max-think", self.max_think_s, float("inf")),
        ):
            if self.trace is None and value != default:
                raise ConfigError(f"{name} is {value}, but there is no --trace")
        if self.save_requests and self.json_file is None:
            raise ConfigError("--save-requests is given without --json")
        if self.api == "grpc" and "://" in self.url:
            raise ConfigError(f"--url is {self.url}, host:port is needed with --api grpc")
        if self.extra_body and self.api == "grpc":
            raise ConfigError("--extra-body is given with --api grpc, whose requests are not JSON")


def run_bench(options: BenchOptions) -> int:
    """Run, show and write. Returns the exit status: 1 if a request failed, 130 after Ctrl-C or SIGTERM. Raises: ConfigError."""
    options.verify()
    targets = parse_targets(options.goodput)
    files = ReportFiles(options.json_file, options.html_file, options.plots_folder)
    files.prepare()
    model, root = (options.model, None) if options.api == "grpc" else _served_model(options)
    tokenizer = _load_tokenizer(options, model, root)
    with progress_bar() as progress:
        try:
            records, completed = asyncio.run(_run(options, model or "", tokenizer, progress))
        except asyncio.CancelledError:
            # by SIGTERM, before anything was measured
            raise KeyboardInterrupt from None
    summary = Summary.of(records, targets)
    conditions = {**_conditions(), **options.shown}
    if not completed:
        conditions["interrupted"] = "yes; requests in flight and those not yet sent are not counted"
        sys.stderr.write("interrupted: requests in flight and those not yet sent are not counted\n")
    for table in tables(summary):
        Console().print(table)
    show_errors(records)
    files.write(summary, conditions, records, saves_requests=options.save_requests)
    if not completed:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if summary.failures else 0


def progress_bar() -> Progress:
    """Of requests; it vanishes at the end."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True)


def parse_extra_body(text: str | None) -> dict[str, Any]:
    """Raises: ConfigError."""
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--extra-body is not a JSON object: {error}") from error


async def _run(
    options: BenchOptions, model: str, tokenizer: Tokenizer, progress: Progress
) -> tuple[list[RequestRecord], bool]:
    """Return the requests that ended, and False if Ctrl-C or SIGTERM, which cancel this task, ended the run."""
    task = asyncio.current_task()
    if task is not None and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    draw_tokens = make_draw_tokens(tokenizer)
    sessions = _sessions(options)
    num_requests = sum(len(list(session.requests)) for session in sessions)
    texts = TraceTexts(options.plan.seed, draw_tokens)
    texts.prepare(sessions)
    endpoint = make_endpoint(options, model, returns_ids=num_requests > len(sessions))

    def decode(token_ids: list[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=True)

    def load_run(label: str, texts: TraceTexts, total: int) -> LoadRun:
        task = progress.add_task(label, total=total)
        return LoadRun(
            endpoint, texts, decode, as_text=options.api == "chat", timeout_s=options.timeout_s,
            on_end=lambda record: progress.advance(task),
        )  # fmt: skip

    try:
        if options.warm_up:
            shape = Shape(input_tokens=options.shape.input_tokens, output_tokens=options.shape.output_tokens)
            seed = options.plan.seed + WARM_UP_SEED
            warm_up = random_sessions(shape, options.warm_up, seed)
            run = load_run("warm-up", TraceTexts(seed, draw_tokens), options.warm_up)
            await run.run(warm_up, LoadPlan(concurrency=1))
        run = load_run("requests", texts, num_requests)
        try:
            await run.run(sessions, options.plan)
        except asyncio.CancelledError:
            return [record for record in run.records if record.ended_s is not None], False
    finally:
        await endpoint.close()
    return run.records, True


def _sessions(options: BenchOptions) -> list[TraceSession]:
    """Raises: ConfigError for a trace that cannot be read, or has no requests."""
    if options.trace is None:
        return list(random_sessions(options.shape, options.num_sessions, options.plan.seed))
    sessions = read_trace(
        options.trace, options.num_sessions, trace_format=options.trace_format, seed=options.plan.seed
    )
    if not sessions:
        raise ConfigError(f"--trace is {options.trace}, which has no requests")
    return fitted(sessions, options.trace_scale, options.trace_speed, options.max_think_s)


def make_draw_tokens(tokenizer: Tokenizer) -> DrawTokens:
    """Draw from a vocabulary without its special tokens."""
    allowed = [token_id for token_id in range(tokenizer.vocab_size) if token_id not in tokenizer.special_token_ids]
    return lambda draw, num: draw.choices(allowed, k=num)


def make_endpoint(options: BenchOptions, model: str, *, returns_ids: bool = False) -> Endpoint:
    """Make the client of the chosen API. returns_ids: ask for token ids of answers, which next prompts contain."""
    sampling: dict[str, Any] = {"temperature": options.temperature, "ignore_eos": options.ignore_eos}
    if options.api == "grpc":
        return GrpcEndpoint(options.url, api_key=options.api_key, tls=options.tls, sampling=sampling)
    if not options.ignore_eos:
        del sampling["ignore_eos"]  # a field that OpenAI's own servers refuse, as they do the next one
    elif returns_ids and options.api == "completions":
        sampling["return_token_ids"] = True
    return OpenAIEndpoint(
        options.url, model, chat=options.api == "chat", api_key=options.api_key,
        extra_body=sampling | options.extra_body, tls=options.tls,
    )  # fmt: skip


def _served_model(options: BenchOptions) -> tuple[str, str | None]:
    """Name of the model and, if the server reports it, its folder. Raises: ConfigError."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        reply = httpx.get(
            f"{options.url}/v1/models", headers=headers, timeout=10, trust_env=False, **tls_options(options.tls)
        )
        cards = reply.raise_for_status().json()["data"]
        card = next((card for card in cards if options.model in (None, card["id"])), None)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--url: {options.url}/v1/models gives no list of models: {error}") from error
    if card is None:
        raise ConfigError(f"--model is {options.model!r}, served are: {', '.join(card['id'] for card in cards)}")
    return str(card["id"]), card.get("root")


def _load_tokenizer(options: BenchOptions, model: str | None, root: str | None) -> Tokenizer:
    """Raises: ConfigError if no folder is known."""
    if options.tokenizer is not None:
        return Tokenizer.from_folder(model_folder(options.tokenizer))
    for name in (root, model, "demo" if options.api == "grpc" and model is None else None):
        if name is not None and (name in BUNDLED or Path(name).is_dir()):
            return Tokenizer.from_folder(model_folder(name))
    raise ConfigError(f"the server names no folder of {model!r} on this machine: --tokenizer is needed")


def show_errors(records: list[RequestRecord]) -> None:
    """Print the first errors that differ."""
    messages = (f"{record.error}: {record.error_message}" for record in records if record.error is not None)
    for message in islice(dict.fromkeys(messages), MAX_SHOWN_ERRORS):
        sys.stderr.write(f"{message}\n")


def _conditions() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "pdserve": version("pdserve"),
        "client": f"{platform.machine()}, Python {platform.python_version()}",
    }
