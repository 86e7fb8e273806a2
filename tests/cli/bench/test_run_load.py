"""`LoadRun`, the driver of `pdserve bench` against an end point in memory, and the figures that are made of its records."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from importlib.util import find_spec

import pytest

from pdserve.cli.bench.endpoints import Chunk, Prompt, RequestFailed
from pdserve.cli.bench.report import as_html, as_json, latency_row, plots, total_rows
from pdserve.cli.bench.run_load import LoadPlan, LoadRun, RequestRecord
from pdserve.cli.bench.summary import Summary, parse_targets
from pdserve.cli.bench.traces.trace import TraceRequest, TraceSession
from pdserve.cli.bench.traces.trace_text import TraceTexts
from pdserve.common.errors import ConfigError


class Echo:
    """Answers each prompt with `a` per token; prompt 13 fails, and prompt 14 never ends."""

    def __init__(self, *, has_ids: bool = False) -> None:
        """has_ids: token 97 per `a` is given, too."""
        self.has_ids = has_ids
        self.prompts: list[Prompt] = []
        self.at_once = self.most_at_once = 0
        self.is_stuck = asyncio.Event()

    async def stream(self, prompt: Prompt, output_tokens: int) -> AsyncIterator[Chunk]:
        self.prompts.append(prompt)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            yield Chunk()
            for _ in range(output_tokens):
                await asyncio.sleep(0)
                yield Chunk("a", has_output=True, token_ids=(97,) if self.has_ids else ())
            if prompt.name == "14":
                self.is_stuck.set()
                await asyncio.Event().wait()
            if prompt.name == "13":
                raise RequestFailed("HTTP 429", "slow down")
            yield Chunk(prompt_tokens=3, output_tokens=output_tokens, cached_tokens=1)
        finally:
            self.at_once -= 1

    async def close(self) -> None: ...


def decode(token_ids: list[int]) -> str:
    return "".join(f"<{token_id}>" for token_id in token_ids)


def run_of(endpoint: Echo, *, as_text: bool = False, timeout_s: float = 60.0) -> LoadRun:
    texts = TraceTexts(0, lambda draw, num: list(range(1, num + 1)))
    return LoadRun(endpoint, texts, decode, as_text=as_text, timeout_s=timeout_s, on_end=lambda record: None)


def asked(name: str, input_tokens: int, output_tokens: int, think_s: float = 0.0) -> TraceRequest:
    return TraceRequest(name, input_tokens, output_tokens, think_s=think_s)


def single(number: int, output_tokens: int = 3, start_s: float = 0.0) -> TraceSession:
    return TraceSession(f"{number}", "", 0, (asked(f"{number}", 1, output_tokens),), start_s)


async def test_a_closed_loop_keeps_as_many_open_as_asked() -> None:
    endpoint = Echo()
    run = run_of(endpoint)
    await run.run([single(100 + i) for i in range(20)], LoadPlan(concurrency=4))
    assert endpoint.most_at_once == 4
    assert len(run.records) == 20
    assert [prompt.name for prompt in endpoint.prompts] == [f"{100 + i}" for i in range(20)]
    assert all(prompt == Prompt(prompt.name, [1], []) for prompt in endpoint.prompts)
    assert all(len(record.chunk_s) == 3 and record.output_tokens == 3 for record in run.records)


async def test_a_poisson_process_sends_whatever_is_still_open() -> None:
    endpoint = Echo()
    run = run_of(endpoint)
    await run.run([single(100 + i, 200) for i in range(30)], LoadPlan(requests_per_s=20_000.0, seed=1))
    assert endpoint.most_at_once > 4
    gaps = [after.scheduled_s - before.scheduled_s for before, after in zip(run.records, run.records[1:], strict=False)]
    assert len(run.records) == 30
    assert min(gaps) > 0
    assert len(set(gaps)) == 29


async def test_a_trace_is_sent_at_its_own_times() -> None:
    endpoint = Echo()
    run = run_of(endpoint)
    await run.run([single(i, 1, start_s=i * 0.02) for i in range(4)], LoadPlan(follows_trace=True))
    assert [record.scheduled_s for record in run.records] == [0.0, 0.02, 0.04, 0.06]
    assert all(record.sent_s >= record.scheduled_s for record in run.records)


CONVERSATION = TraceSession("s", "", 0, (asked("a", 1, 2), asked("b", 5, 1), asked("c", 2, 1), asked("d", 4, 1)))
"""The third prompt is shorter than what was said, and so no part of it; the fourth one continues the third."""


async def test_a_turn_continues_what_was_said_as_texts() -> None:
    endpoint = Echo()
    await run_of(endpoint, as_text=True).run([CONVERSATION], LoadPlan(concurrency=1))
    assert [prompt.texts for prompt in endpoint.prompts] == [
        ["<1>"], ["<1>", "aa", "<1><2>"], ["<1><2>"], ["<1><2>", "a", "<1>"],
    ]  # fmt: skip
    assert all(prompt.token_ids is None for prompt in endpoint.prompts)


async def test_a_turn_continues_what_was_said_as_token_ids_where_they_are_known() -> None:
    endpoint = Echo(has_ids=True)
    await run_of(endpoint).run([CONVERSATION], LoadPlan(concurrency=1))
    assert [prompt.token_ids for prompt in endpoint.prompts] == [[1], [1, 97, 97, 1, 2], [1, 2], [1, 2, 97, 1]]
    endpoint = Echo()
    await run_of(endpoint).run([CONVERSATION], LoadPlan(concurrency=1))
    assert [(prompt.token_ids, prompt.texts) for prompt in endpoint.prompts] == [
        ([1], []), (None, ["<1>", "aa", "<1><2>"]), ([1, 2], []), (None, ["<1><2>", "a", "<1>"]),
    ]  # fmt: skip


async def test_a_server_that_counts_wrong_costs_the_tokens_of_its_answer_only() -> None:
    class Liar(Echo):
        async def stream(self, prompt: Prompt, output_tokens: int) -> AsyncIterator[Chunk]:
            async for chunk in super().stream(prompt, output_tokens):
                yield chunk if chunk.output_tokens is None else Chunk(output_tokens=1 << 50)

    endpoint = Liar(has_ids=True)
    await run_of(endpoint).run([CONVERSATION], LoadPlan(concurrency=1))
    assert [prompt.token_ids for prompt in endpoint.prompts] == [[1], None, [1, 2], None]
    assert endpoint.prompts[1].texts == ["<1>", "aa", "<1><2>"]


async def test_requests_wait_for_their_think_time_and_for_sub_agents_but_not_for_those_in_the_background() -> None:
    def agent(name: str, start_s: float, *, is_background: bool = False) -> TraceSession:
        return TraceSession(name, "", 0, (asked(name, 1, 1),), start_s, is_background)

    steps = (asked("first", 1, 1), agent("x", 0.02), agent("y", 0.0), agent("late", 0.4, is_background=True),
             asked("next", 1, 1, think_s=0.05))  # fmt: skip
    run = run_of(Echo())
    await run.run([TraceSession("s", "", 0, steps, 0.01)], LoadPlan(follows_trace=True))
    assert [record.name for record in run.records] == ["first", "y", "x", "next", "late"]
    first, y, x, after, late = run.records
    assert None not in (first.ended_s, x.ended_s)
    assert (first.scheduled_s, y.scheduled_s) == (0.01, y.sent_s)
    assert x.sent_s >= (first.ended_s or 0.0) + 0.02
    assert after.sent_s >= (x.ended_s or 0.0) + 0.05
    assert late.sent_s >= (first.ended_s or 0.0) + 0.4


async def test_a_failed_turn_ends_its_session_and_no_other() -> None:
    endpoint = Echo()
    run = run_of(endpoint)
    await run.run([single(1), single(13), single(2)], LoadPlan(concurrency=1))
    assert [record.error for record in run.records] == [None, "HTTP 429", None]
    summary = Summary.of(run.records, {})
    assert summary.completed == 2
    assert summary.failures == {"HTTP 429": 1}
    assert (summary.input_tokens, summary.output_tokens, summary.cached_tokens) == (6, 6, 2)


async def test_a_request_that_takes_too_long_is_ended() -> None:
    endpoint = Echo()
    run = run_of(endpoint, timeout_s=0.05)
    await run.run([single(14), single(1)], LoadPlan(concurrency=1))
    assert [record.error for record in run.records] == ["timeout", None]
    assert run.records[0].error_message == "no complete answer within 0.05 s"
    assert endpoint.at_once == 0


async def test_cancellation_ends_what_is_in_flight_and_keeps_what_has_ended() -> None:
    endpoint = Echo()
    run = run_of(endpoint)
    task = asyncio.create_task(run.run([single(1), single(2), single(14), single(3)], LoadPlan(concurrency=1)))
    async with asyncio.timeout(5):
        await endpoint.is_stuck.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [record.ended_s is not None for record in run.records] == [True, True, False]
    assert endpoint.at_once == 0


def record_of(sent_s: float, *chunk_s: float, output_tokens: int, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        "request",
        sent_s,
        sent_s,
        list(chunk_s),
        chunk_s[-1],
        prompt_tokens=10,
        output_tokens=output_tokens,
        error=error,
    )


RECORDS = [
    record_of(0.0, 0.1, 0.2, 0.4, output_tokens=3),
    record_of(1.0, 1.3, 1.5, output_tokens=5),
    record_of(1.0, 1.2, output_tokens=1),
    record_of(1.0, 9.0, output_tokens=1, error="HTTP 500"),
]


def test_latencies_are_those_of_the_definitions() -> None:
    figures = Summary.of(RECORDS, {}).figures()
    assert figures["median_ttft_ms"] == pytest.approx(200)
    assert figures["max_ttft_ms"] == pytest.approx(300)
    # gaps 0.1, 0.2 and 0.2 s: an answer of one chunk has none
    assert figures["mean_itl_ms"] == pytest.approx(500 / 3)
    # (0.4 - 0.1) / 2 and (1.5 - 1.3) / 4: an answer of one token has none
    assert figures["mean_tpot_ms"] == pytest.approx(100)
    assert figures["median_e2el_ms"] == pytest.approx(400)
    assert figures["completed"] == 3
    assert figures["failed"] == 1
    assert figures["duration"] == pytest.approx(9.0)
    assert figures["output_throughput"] == pytest.approx(1.0)
    assert figures["request_goodput"] is None


def test_goodput_counts_requests_that_meet_every_target() -> None:
    assert Summary.of(RECORDS, parse_targets(["ttft:250"])).good == 2
    assert Summary.of(RECORDS, parse_targets(["ttft:250", "tpot:100"])).good == 1
    assert Summary.of(RECORDS, parse_targets(["e2el:100"])).good == 0


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:-1", "ttft:nan", "ttft:inf", "itl:5", "x:1"])
def test_a_target_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--goodput is"):
        parse_targets([word])


def test_a_run_without_answers_has_figures() -> None:
    figures = Summary.of([RECORDS[-1]], {"ttft": 1.0}).figures()
    assert (figures["completed"], figures["median_ttft_ms"], figures["request_goodput"]) == (0, None, 0.0)
    assert latency_row(Summary.of([], {}), "ttft") == ["first token (TTFT)", *["-"] * 6]
    assert Summary.of([], {}).figures()["request_throughput"] == 0.0


def test_reports_show_the_figures_and_escape_what_they_are_given() -> None:
    summary = Summary.of(RECORDS, parse_targets(["ttft:250"]))
    assert ("goodput, requests/s", "0.22 (2 of 3 met the targets)") in total_rows(summary)
    page = as_html(summary, {"model": "<script>"}, {"Latencies": b"png"})
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert 'src="data:image/png;base64,cG5n"' in page
    assert '"failures": {\n  "HTTP 500": 1\n }' in as_json(summary, {}, None)
    assert '"requests"' not in as_json(summary, {}, None)
    assert '"chunk_s": [' in as_json(summary, {}, RECORDS)


@pytest.mark.few(1)
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="an environment without the extra bench")
@pytest.mark.parametrize("records", [RECORDS, []])
def test_plots_are_pictures(records: list[RequestRecord]) -> None:
    pictures = plots(records)
    assert set(pictures) == {"Latencies", "TTFT by time"}
    assert all(data.startswith(b"\x89PNG") for data in pictures.values())


def test_plots_without_their_library_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"--html and --plots need matplotlib.*deploy/install\.py bench"):
        plots([])
