"""`pdserve chat` and `generate`: print the answer to a question as it streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.cli.clients.grpc_client import ClientMessage, Delta, GrpcClient
from pdserve.common import timeline
from pdserve.common.timeline import Timeline

Sampling = Mapping[str, float | int | None]
Connect = Callable[[], GrpcClient]
"""Makes the client, inside the event loop."""


async def show_answer(console: Console, deltas: AsyncIterator[Delta], show_timeline: bool) -> str:
    """Print an answer while it arrives; returns its text. Raises: PdServeError."""
    text, last = "", None
    async for delta in deltas:
        text += delta.text
        last = delta
        console.print(delta.text, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
    if show_timeline and last is not None:
        console.print()
        console.print(timeline_table(last, console.width))
        console.print(summary(last), style="dim", highlight=False, soft_wrap=True)
    return text


async def converse(
    connect: Connect,
    message: str | None,
    system: str | None,
    sampling: Sampling,
    show_timeline: bool,
    image_url: str | None = None,
) -> None:
    """One question, or a conversation until end of input. image_url: of the first message. Raises: PdServeError."""
    console = Console()
    turns = [ClientMessage("system", system)] if system else []
    async with connect() as client:
        if message is not None:
            await show_answer(
                console, client.chat([*turns, ClientMessage("user", message, image_url)], **sampling), show_timeline
            )
            return
        while True:
            try:
                asked = await asyncio.to_thread(console.input, "[bold]> [/]")
            except EOFError:
                return
            if asked.strip():
                turns.append(ClientMessage("user", asked, image_url))
                image_url = None
                turns.append(
                    ClientMessage(
                        "assistant", await show_answer(console, client.chat(turns, **sampling), show_timeline)
                    )
                )


async def continue_text(connect: Connect, prompt: str, sampling: Sampling, show_timeline: bool) -> None:
    """Continue a text. Raises: PdServeError."""
    async with connect() as client:
        await show_answer(Console(), client.generate(prompt, **sampling), show_timeline)


BAR_WIDTH = 40
WIDE = 120
"""Terminal width, in columns, from which the meanings of the phases are shown next to the bars."""


def timeline_table(last: Delta, width: int) -> Table:
    """Phases of the request whose last message is `last`. width: columns of the terminal; below `WIDE` without meanings."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("phase")
    table.add_column("ms", justify="right")
    table.add_column("when", no_wrap=True)
    with_meaning = width >= WIDE
    if with_meaning:
        table.add_column("", no_wrap=True)
    moments = last.timeline.moments_unix_ns
    total = last.timeline.seconds(timeline.ARRIVED, timeline.FINISHED)
    for phase, seconds in last.timeline.phases():
        bar = _bar(moments[phase.start], moments[phase.end], last.timeline, total)
        meaning = [Text(phase.meaning, style="dim")] if with_meaning else []
        table.add_row(phase.name, f"{seconds * 1e3:.2f}", bar, *meaning)
    return table


def summary(last: Delta) -> str:
    """One line: tokens, TTFT, TPOT."""
    parts = [f"{last.num_prompt_tokens} prompt tokens ({last.num_cached_tokens} cached), {last.num_output_tokens} new"]
    if (ttft_s := last.timeline.ttft_s) is not None:
        parts.append(f"first token after {ttft_s * 1e3:.1f} ms")
    if (tpot_s := last.timeline.tpot_s(last.num_output_tokens)) is not None:
        parts.append(f"then {tpot_s * 1e3:.2f} ms a token")
    return ", ".join(parts)


def _bar(start_ns: int, end_ns: int, times: Timeline, total_s: float | None) -> Text:
    first = times.moments_unix_ns.get(timeline.ARRIVED)
    if first is None or not total_s:
        return Text("")
    scale = BAR_WIDTH / (total_s * 1e9)
    left = min(BAR_WIDTH - 1, max(0, round((start_ns - first) * scale)))
    width = min(BAR_WIDTH - left, max(1, round((end_ns - start_ns) * scale)))
    return Text(" " * left + "█" * width, style="green")
