"""Clients of Alibaba's ServeGen: no requests, but what arrivals and lengths of each client are like in windows of ten minutes.

A client N has two files in one folder: `chunk-N-trace.csv`, a row per window, and `chunk-N-dataset.json`, its lengths:

    0,1.5,0.8,Gamma,1.5,0.44       start of the window (s), requests per s, their gaps' coefficient of variation, and the
                                   distribution of the gaps with its shape and scale (s); the last three may be left out
    {"0": {"input_tokens": "{120: 0.5, 300: 0.5}", "output_tokens": "{20: 1.0}"}}       start -> length -> its probability

Requests are drawn from that: gaps have the shape of the window's distribution and the mean of its rate, and both lengths are drawn
independently. A window without lengths has no requests. Source: the data of ServeGen (NSDI '26).
"""

from __future__ import annotations

import heapq
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import msgspec

from pdserve.cli.bench.traces.trace import TraceRequest, TraceSession, verify_length, verify_time
from pdserve.cli.bench.traces.trace_file import decoded, rows_of, unreadable, whole_file
from pdserve.common.errors import ConfigError

WINDOW_S = 600.0
"""Length of a client's last window; any other one lasts until the next begins."""
MAX_RATE = 1e6
MAX_CLIENTS = 10_000
CV_LIMITS = (1e-3, 1e3)
SHAPE_LIMITS = (6e-3, 1e6)
"""Beyond them the mean of a distribution is no number."""
_TRACE = re.compile(r"chunk-(\d+)-trace\.csv")
_LENGTH = re.compile(r"\s*(\d+)(?:\.0*)?\s*:\s*([0-9][0-9.eE+-]*)\s*")
_NUM_FIELDS = (4, 6)
_MAX_SHOWN_CHARS = 64


class _Lengths(msgspec.Struct):
    """Of one window: dictionaries as Python writes them."""

    input_tokens: str = ""
    output_tokens: str = ""


@dataclass(frozen=True, slots=True)
class _Window:
    """One row."""

    start_s: float
    rate: float
    cv: float = 0.0
    pattern: str = ""
    shape: float = 0.0
    """0 if it is not given."""

    def gaps(self, draw: random.Random) -> Callable[[], float]:
        """Draws seconds between two arrivals, with the mean of the window's rate."""
        shape = self.shape or (1 / self.cv**2 if self.cv else 0.0)
        if not shape:
            return lambda: 1 / self.rate
        if self.pattern == "weibull" and self.shape:
            scale = 1 / (self.rate * math.gamma(1 + 1 / shape))
            return lambda: draw.weibullvariate(scale, shape)
        return lambda: draw.gammavariate(shape, 1 / (self.rate * shape))


def is_servegen(path: Path) -> bool:
    """True for a client's CSV file, and for a folder that has one."""
    if path.is_dir():
        return next(_clients(path), None) is not None
    return _TRACE.fullmatch(path.name) is not None


def read_servegen(path: Path, seed: int) -> Iterator[TraceSession]:
    """Drawn sessions of one request each, by arrival, of all clients of a folder, or of the one whose CSV file it is.

    Raises: ConfigError naming file, line or window, field and value; as far as the sessions are read.
    """
    clients = sorted(_clients(path)) if path.is_dir() else [path]
    if not 0 < len(clients) <= MAX_CLIENTS:
        raise ConfigError(
            f"--trace is {path}, which has {len(clients)} files chunk-N-trace.csv, 1 to {MAX_CLIENTS} are possible"
        )
    yield from heapq.merge(*(_requests(client, seed) for client in clients), key=lambda session: session.start_s)


def _clients(folder: Path) -> Iterator[Path]:
    try:
        yield from (path for path in folder.iterdir() if _TRACE.fullmatch(path.name))
    except OSError as error:
        raise unreadable(folder, error) from error


def _requests(path: Path, seed: int) -> Iterator[TraceSession]:
    match = _TRACE.fullmatch(path.name)
    if match is None:
        raise ConfigError(f"--trace is {path}: the file of a client is named chunk-N-trace.csv")
    client = match[1]
    draw = random.Random(f"{seed} {client}")
    windows = _windows(path)
    lengths_path = path.with_name(f"chunk-{client}-dataset.json")
    lengths = _lengths(lengths_path) if windows else {}
    number = 0
    for place, window in enumerate(windows):
        end_s = windows[place + 1].start_s if place + 1 < len(windows) else window.start_s + WINDOW_S
        found = lengths.get(window.start_s)
        if not window.rate or found is None or found.input_tokens in ("", "{}") or found.output_tokens in ("", "{}"):
            continue
        label = f"{lengths_path}, window {window.start_s:g}"
        draw_input = _draw_length(f"{label}: input_tokens", found.input_tokens, draw)
        draw_output = _draw_length(f"{label}: output_tokens", found.output_tokens, draw)
        gap = window.gaps(draw)
        # a window begins somewhere between two requests
        at_s = window.start_s + draw.random() * gap()
        while at_s < end_s:
            name = f"client {client} request {number}"
            yield TraceSession(name, str(path), 0, (TraceRequest(name, max(1, draw_input()), draw_output()),), at_s)
            number += 1
            at_s += gap()


def _windows(path: Path) -> list[_Window]:
    windows: list[_Window] = []
    for label, row in rows_of(path):
        if len(row) not in _NUM_FIELDS:
            raise ConfigError(f"{label}: {len(row)} fields, 4 or 6 are needed")
        window = _window(label, row)
        verify_time(label, "start", window.start_s, least=0.0)
        if windows and window.start_s <= windows[-1].start_s:
            raise ConfigError(
                f"{label}: start is {window.start_s:g}, above {windows[-1].start_s:g} of the row before is needed"
            )
        windows.append(window)
    return windows


def _window(label: str, row: list[str]) -> _Window:
    start_s, rate = _number(label, "start", row[0]), _number(label, "rate", row[1])
    if not rate:
        return _Window(start_s, 0.0)  # without requests the other fields have no meaning
    if rate > MAX_RATE:
        raise ConfigError(f"{label}: rate is {rate:g}, at most {MAX_RATE:g} is possible")
    pattern = row[3].lower()
    if pattern not in ("", "gamma", "weibull"):
        raise ConfigError(f"{label}: pattern is {row[3][:_MAX_SHOWN_CHARS]!r}, Gamma or Weibull is needed")
    cv = _number(label, "cv", row[2]) if row[2] else 0.0
    shape = _number(label, "shape", row[4]) if len(row) > 4 and pattern else 0.0
    for name, value, (least, most) in (("cv", cv, CV_LIMITS), ("shape", shape, SHAPE_LIMITS)):
        if value and not least <= value <= most:
            raise ConfigError(f"{label}: {name} is {value:g}, 0 or {least:g} to {most:g} is possible")
    return _Window(start_s, rate, cv, pattern, shape)


def _number(label: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"{label}: {name} is {text[:_MAX_SHOWN_CHARS]!r}, a number from 0 on is needed")
    return value


def _lengths(path: Path) -> Mapping[float, _Lengths]:
    windows = decoded(str(path), whole_file(path), msgspec.json.Decoder(dict[str, _Lengths]).decode)
    return {_number(str(path), "a window's start", start): lengths for start, lengths in windows.items()}


def _draw_length(label: str, histogram: str, draw: random.Random) -> Callable[[], int]:
    """Draws by a dictionary of lengths and probabilities."""
    lengths: list[int] = []
    weights: list[float] = []
    if not (histogram.startswith("{") and histogram.endswith("}")):
        raise ConfigError(f"{label} is {histogram[:_MAX_SHOWN_CHARS]!r}, {{length: probability}} is needed")
    for part in histogram[1:-1].removesuffix(",").split(","):
        match = _LENGTH.fullmatch(part)
        try:
            weight = float(match[2]) if match is not None else math.nan
        except ValueError:
            weight = math.nan
        if match is None or len(match[1]) > 15 or not 0 <= weight < math.inf:
            raise ConfigError(f"{label} has {part[:_MAX_SHOWN_CHARS]!r}, a length and its probability are needed")
        verify_length(label, "a length", int(match[1]), least=0)
        lengths.append(int(match[1]))
        weights.append(weight)
    totals = [*accumulate(weights)]
    if not 0 < totals[-1] < math.inf:
        raise ConfigError(f"{label} has probabilities of {totals[-1]:g} together, above 0 is needed")
    return lambda: draw.choices(lengths, cum_weights=totals)[0]
