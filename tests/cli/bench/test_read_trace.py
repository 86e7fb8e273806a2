"""Readers of traces: files of each format, told by their content, and files that are wrong or hostile."""

from __future__ import annotations

import json
import random
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.bench.trace_options import TraceFormat
from pdserve.cli.bench.traces import trace_file
from pdserve.cli.bench.traces.read_trace import format_of, read_trace
from pdserve.cli.bench.traces.trace import TraceRequest, TraceSession
from pdserve.cli.bench.traces.trace_text import TraceText
from pdserve.common.errors import ConfigError

EVERYTHING = 1 << 30
MOONCAKE = {"timestamp": 0, "input_length": 5, "output_length": 1}
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
WEKA = {"id": "t", "block_size": 64, "requests": [{"in": 64, "out": 2, "hash_ids": [1]}]}


def jsonl(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def client(folder: Path, number: int, rows: str, lengths: dict[str, Any] | None = None) -> Path:
    """Files of a client of ServeGen."""
    found = (
        {"0": {"input_tokens": "{100: 0.5, 300: 0.5,}", "output_tokens": "{20.0: 1e-1}"}}
        if lengths is None
        else lengths
    )
    write(folder / f"chunk-{number}-dataset.json", json.dumps(found))
    return write(folder / f"chunk-{number}-trace.csv", rows)


def only(session: TraceSession) -> TraceRequest:
    [request] = session.requests
    return request


# ---- Mooncake


def test_mooncakes_lines_keep_arrivals_lengths_and_shared_blocks(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "trace.jsonl",
        {"timestamp": 1000, "input_length": 1030, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1500, "output_length": 6, "hash_ids": [1, 2, 4]},
        {"timestamp": 9000, "input_length": 512, "output_length": 7, "hash_ids": [5]},
    )
    sessions = read_trace(path, EVERYTHING)
    assert [session.start_s for session in sessions] == [0.0, 2.0, 8.0]
    assert {(session.scope, session.block_tokens) for session in sessions} == {(f"{path} 512", 512)}
    assert [only(session) for session in sessions] == [
        TraceRequest("line 1", 1030, 5, (1, 2, 3)),
        TraceRequest("line 2", 1500, 6, (1, 2, 4)),
        TraceRequest("line 3", 512, 7, (5,)),
    ]
    assert read_trace(path, 2) == sessions[:2]


def test_a_record_is_read_by_arrival_with_its_block_size_and_without_its_other_fields(tmp_path: Path) -> None:
    """A router writes a line when its request has ended."""
    record = {"tenant": 0, "priority": 0, "outcome": "stop", "cached_tokens": 0, "attempts": 1, "ttft_ms": 3.5}
    path = jsonl(
        tmp_path / "record",
        {"timestamp": 900, "input_length": 40, "output_length": 2, "hash_ids": [0, 1, 2], "block_size": 16, **record},
        {"timestamp": 100, "input_length": 35, "output_length": 9, "hash_ids": [0, 1, 3], "block_size": 16, **record},
        {"timestamp": 500, "input_length": 35, "output_length": 0, "hash_ids": [], **record, "outcome": "overloaded"},
        {"timestamp": 1000, "input_length": 35, "output_length": 1, "hash_ids": [0, 4], "block_size": 32, **record},
    )
    sessions = read_trace(path, EVERYTHING)
    assert [(session.start_s, only(session).output_tokens) for session in sessions] == [
        (0.0, 9), (pytest.approx(0.4), 0), (pytest.approx(0.8), 2), (pytest.approx(0.9), 1),
    ]  # fmt: skip
    assert len({sessions[0].scope, sessions[2].scope}) == 1
    assert sessions[3].scope != sessions[2].scope, "blocks of other sizes share no ids"
    assert read_trace(path, 1) == sessions[:1]
    first, last = sessions[0].scaled(8), sessions[2].scaled(8)
    text = TraceText(0, first.block_tokens, lambda draw, num: draw.choices(range(1000), k=num))
    prompts = [text.prompt(only(session)) for session in (first, last)]
    assert [len(prompt) for prompt in prompts] == [4, 5]
    assert prompts[0][:4] == prompts[1][:4], "scaled blocks are shared, too"


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        (MOONCAKE | {"input_length": 0}, "input_length is 0, 1 to"),
        (MOONCAKE | {"input_length": 1 << 40}, "input_length is 1099511627776, 1 to"),
        (MOONCAKE | {"input_length": 10**30}, "input_length is 1000000000000000000000000000000, 1 to"),
        (MOONCAKE | {"output_length": -1}, "output_length is -1, 0 to"),
        (MOONCAKE | {"timestamp": 1e300}, r"timestamp is 1e\+297 s"),
        (MOONCAKE | {"timestamp": "now"}, r"Expected `float`, got `str` - at `\$.timestamp`"),
        (MOONCAKE | {"block_size": 0}, "block_size is 0, 1 to"),
        (MOONCAKE | {"hash_ids": [1, "a"]}, r"Expected `int`, got `str` - at `\$.hash_ids\[1\]`"),
        ({"timestamp": 0, "input_length": 5}, "missing required field `output_length`"),
        (MOONCAKE | {"input_length": 1100, "hash_ids": [1]}, "hash_ids has 1 entries for 1100 tokens, 3 blocks of 512"),
        ([1, 2], "Expected `object`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, entry: object, cause: str) -> None:
    path = jsonl(tmp_path / "trace.jsonl", MOONCAKE, entry)
    with pytest.raises(ConfigError, match=rf"trace\.jsonl, line 2: .*({cause})"):
        read_trace(path, EVERYTHING)


# ---- Azure


def test_azures_rows_have_times_and_lengths(tmp_path: Path) -> None:
    path = write(
        tmp_path / "azure.csv",
        f"{AZURE_HEADER}\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:16:46.9305900,91,0\r\n\r\n",
    )
    first, second = read_trace(path, EVERYTHING)
    assert (first.start_s, second.start_s) == (0.0, pytest.approx(60.25))
    assert (only(first), only(second)) == (TraceRequest("line 2", 374, 44), TraceRequest("line 3", 91, 0))
    assert first.scaled(7).block_tokens == 0, "without blocks any divisor is right"
    zoned = write(path, f"{AZURE_HEADER}\n2024-05-10 00:00:01.5+00:00,1,1\n2024-05-10 01:00:02+01:00,1,1\n")
    assert [session.start_s for session in read_trace(zoned, EVERYTHING)] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ("yesterday,1,1", "TIMESTAMP is 'yesterday'"),
        ("2023-11-16 18:15:46,-1,1", "ContextTokens is '-1'"),
        ("2023-11-16 18:15:46,1,1e3", "GeneratedTokens is '1e3'"),
        ("2023-11-16 18:15:46,0,1", "ContextTokens is 0, 1 to"),
        ("2023-11-16 18:15:46,1," + "9" * 5000, "GeneratedTokens is '9999"),
        ("2023-11-16 18:15:46,1", "2 fields, 3 are needed"),
        ('"2023', "no row of a CSV file"),
        ("2023-11-16 18:15:46,\0,1", "ContextTokens is|no row of a CSV file"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, cause: str) -> None:
    path = write(tmp_path / "azure.csv", f"{AZURE_HEADER}\n2023-11-16 18:15:46,1,1\n{row}\n")
    with pytest.raises(ConfigError, match=rf"azure\.csv, line 3: .*({cause})") as failure:
        read_trace(path, EVERYTHING)
    assert len(failure.value.message) < 500


# ---- ServeGen


def test_clients_of_servegen_have_the_rates_and_lengths_of_their_windows(tmp_path: Path) -> None:
    lengths = {
        "0": {"input_tokens": "{100: 0.5, 300: 0.5}", "output_tokens": "{20: 1.0}"},
        "1200.0": {"input_tokens": "{7: 1}", "output_tokens": "{0: 1}"},
        "1800": {"input_tokens": "{}", "output_tokens": "{}"},
    }
    client(tmp_path, 1, "0,2.0,0.5,Gamma,4.0,0.1\n600,0,nan,,,\n1200,1,2.0,Weibull\n1800,5,1,Gamma\n", lengths)
    client(tmp_path, 12, "0,0.5,0,,,\n")
    sessions = read_trace(tmp_path, EVERYTHING)
    starts = [session.start_s for session in sessions]
    assert starts == sorted(starts)
    assert starts[0] == 0.0
    of_client = {
        number: [each for each in sessions if each.scope.endswith(f"chunk-{number}-trace.csv")] for number in (1, 12)
    }
    first = [each for each in of_client[1] if each.start_s < 601]
    second = of_client[1][len(first) :]
    # standard deviations of the counts: 17 and 49
    assert abs(len(first) - 1200) < 85
    assert abs(len(second) - 600) < 250
    assert 1150 < second[0].start_s < 1300
    inputs = [only(session).input_tokens for session in first]
    assert set(inputs) == {100, 300}
    assert 450 < inputs.count(100) < 750
    assert {only(session).output_tokens for session in first} == {20}
    assert {(only(session).input_tokens, only(session).output_tokens) for session in second} == {(7, 0)}
    gaps = [after.start_s - before.start_s for before, after in pairwise(first)]
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(0.5, rel=0.15)
    steady = [after.start_s - before.start_s for before, after in pairwise(of_client[12])]
    assert steady == pytest.approx([2.0] * 299)
    assert read_trace(tmp_path, 50) == sessions[:50]
    assert read_trace(tmp_path, 50, seed=1) != sessions[:50]
    single = read_trace(tmp_path / "chunk-12-trace.csv", EVERYTHING)
    assert len(single) == 300


@pytest.mark.parametrize("pattern", ["Gamma", "Weibull"])
def test_gaps_of_each_pattern_have_the_mean_of_the_rate(tmp_path: Path, pattern: str) -> None:
    path = client(tmp_path, 1, f"0,10,1.0,{pattern},0.7,123.0\n")
    sessions = read_trace(path, EVERYTHING)
    assert abs(len(sessions) - 6000) < 6 * 6000**0.5 * 1.6


def test_a_hundred_days_are_drawn_only_as_far_as_they_are_asked_for(tmp_path: Path) -> None:
    rows = "".join(f"{start},1000000,1,Gamma,1,1\n" for start in range(0, 8_640_000, 600))
    windows = {f"{start}": {"input_tokens": "{5: 1}", "output_tokens": "{5: 1}"} for start in range(0, 8_640_000, 600)}
    assert len(read_trace(client(tmp_path, 1, rows, windows), 100)) == 100


@pytest.mark.parametrize(
    ("rows", "lengths", "cause"),
    [
        ("0,1,1", None, r"chunk-1-trace\.csv, line 1: 3 fields, 4 or 6"),
        ("0,1,1,Gamma,1,1\n0,1,1,Gamma,1,1", None, "line 2: start is 0, above 0"),
        ("0,-1,1,Gamma,1,1", None, "line 1: rate is '-1'"),
        ("0,nan,1,Gamma,1,1", None, "line 1: rate is 'nan'"),
        ("0,1e300,1,Gamma,1,1", None, r"line 1: rate is 1e\+300, at most 1e\+06"),
        ("0,1,1e-200,Gamma,0,0", None, "line 1: cv is 1e-200, 0 or 0.001 to 1000"),
        ("0,1,1,Weibull,1e-5,1", None, "line 1: shape is 1e-05, 0 or 0.006"),
        ("0,1,1,Pareto,1,1", None, "line 1: pattern is 'Pareto', Gamma or Weibull"),
        ("1e300,1,1,Gamma,1,1", None, r"line 1: start is 1e\+300 s"),
        ("0,1,1,Gamma,1,1", {"x": {}}, "a window's start is 'x'"),
        ("0,1,1,Gamma,1,1", {"0": {"input_tokens": 5}}, r"dataset\.json: Expected `str`, got `int`"),
        ("0,1,1,Gamma,1,1", {"0": {"input_tokens": "{1: 1}", "output_tokens": "[1]"}}, r"output_tokens is '\[1\]'"),
        ("0,1,1,Gamma,1,1", {"0": {"input_tokens": "{1: x}", "output_tokens": "{1: 1}"}}, "input_tokens has '1: x'"),
        ("0,1,1,Gamma,1,1", {"0": {"input_tokens": "{1: 1-e}", "output_tokens": "{1: 1}"}}, "input_tokens has '1: 1-e'"),
        ("0,1,1,Gamma,1,1", {"0": {"input_tokens": "{1: 0}", "output_tokens": "{1: 1}"}}, "probabilities of 0 together"),
        (
            "0,1,1,Gamma,1,1", {"0": {"input_tokens": "{99999999: 1}", "output_tokens": "{1: 1}"}},
            "window 0: input_tokens: a length is 99999999, 0 to",
        ),
    ],
)  # fmt: skip
def test_a_bad_client_is_named(tmp_path: Path, rows: str, lengths: dict[str, Any] | None, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        read_trace(client(tmp_path, 1, rows, lengths), 10)


def test_a_client_without_lengths_or_with_another_name_is_named(tmp_path: Path) -> None:
    path = client(tmp_path, 1, "0,1,1,Gamma\n")
    (tmp_path / "chunk-1-dataset.json").unlink()
    with pytest.raises(ConfigError, match=r"chunk-1-dataset\.json, which cannot be read"):
        read_trace(path, 1)
    with pytest.raises(ConfigError, match="the file of a client is named chunk-N-trace"):
        read_trace(path.rename(tmp_path / "other.csv"), 1, trace_format="servegen")
    (tmp_path / "other.csv").unlink()
    with pytest.raises(ConfigError, match=r"0 files chunk-N-trace\.csv"):
        read_trace(tmp_path, 1, trace_format="servegen")


# ---- which format


def test_a_format_is_told_by_the_content(tmp_path: Path) -> None:
    expected: dict[TraceFormat, list[Path]] = {
        "mooncake": [jsonl(tmp_path / "a", MOONCAKE), write(tmp_path / "empty", "\n \n")],
        "azure": [write(tmp_path / "b", f"\ufeff{AZURE_HEADER}\n")],
        "weka": [jsonl(tmp_path / "c", WEKA), write(tmp_path / "d", json.dumps(WEKA, indent=2))],
        "servegen": [client(tmp_path, 3, "0,1,1,Gamma")],
    }
    assert {name: [format_of(path) for path in paths] for name, paths in expected.items()} == {
        name: [name] * len(paths) for name, paths in expected.items()
    }
    with pytest.raises(
        ConfigError, match=r"begins with b'hello' and has no known format: --trace-format names one of mooncake"
    ):
        format_of(write(tmp_path / "e", "hello"))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        format_of(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"line 1: Object missing required field `timestamp`"):
        read_trace(tmp_path / "c", 1, trace_format="mooncake")


def test_a_folder_has_sessions_of_weka(tmp_path: Path) -> None:
    for name in ("x", "y"):
        jsonl(tmp_path / f"{name}.json", WEKA | {"id": name})
    assert [session.name for session in read_trace(tmp_path, EVERYTHING)] == ["x", "y"]
    write(tmp_path / "z.json", "never read")
    assert [session.name for session in read_trace(tmp_path, 2)] == ["x", "y"]
    with pytest.raises(ConfigError, match=r"z\.json: JSON is malformed"):
        read_trace(tmp_path, 3)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="a folder without files"):
        read_trace(tmp_path / "none", 1)


@pytest.mark.parametrize("trace_format", ["mooncake", "azure"])
def test_a_line_without_end_is_refused_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace_format: TraceFormat
) -> None:
    monkeypatch.setattr(trace_file, "MAX_LINE_BYTES", 1000)
    path = write(tmp_path / "long", f"{AZURE_HEADER}\n" + "1" * 5000 if trace_format == "azure" else "[" * 5000)
    with pytest.raises(ConfigError, match=r"line \d: longer than 1000 bytes"):
        read_trace(path, 1, trace_format=trace_format)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "MAX_FILE_BYTES", 50)
    with pytest.raises(ConfigError, match="more than 50 bytes"):
        read_trace(jsonl(tmp_path / "a", WEKA), 1)


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_file_is_read_or_refused_with_its_name(tmp_path: Path, seed: int) -> None:
    """Bytes changed at random: whatever is not read is an error that names the file."""
    draw = random.Random(seed)
    client(tmp_path, 1, "0,1.0,0.5,Gamma,4.0,0.1\n600,1,1,Weibull,1,1\n")
    files = [
        jsonl(tmp_path / "m", *[MOONCAKE | {"hash_ids": [1]}] * 4),
        write(tmp_path / "a", f"{AZURE_HEADER}\n" + "2023-11-16 18:15:46.6805900,374,44\n" * 4),
        jsonl(tmp_path / "w", WEKA),
        tmp_path / "chunk-1-trace.csv",
        tmp_path / "chunk-1-dataset.json",
    ]
    formats: list[TraceFormat] = ["mooncake", "azure", "weka", "servegen", "servegen"]
    for path, trace_format in zip(files, formats, strict=True):
        good = path.read_bytes()
        for _ in range(50):
            data = bytearray(good)
            for _ in range(draw.randint(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            path.write_bytes(data)
            read = tmp_path / "chunk-1-trace.csv" if trace_format == "servegen" else path
            refused = ""
            try:
                read_trace(read, 20, trace_format=trace_format)
            except ConfigError as error:
                refused = error.message
            assert not refused or path.name in refused
        path.write_bytes(good)
