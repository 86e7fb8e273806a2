"""`pdserve chat` and `generate`: print the answer to a question as it streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from rich.console import Console

from pdserve.cli.grpc_client import Delta, GrpcClient, Turn
from pdserve.cli.timeline_view import summary, timeline_table

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
    connect: Connect, message: str | None, system: str | None, sampling: Sampling, show_timeline: bool
) -> None:
    """One question, or a conversation until end of input. Raises: PdServeError."""
    console = Console()
    turns = [Turn("system", system)] if system else []
    async with connect() as client:
        if message is not None:
            await show_answer(console, client.chat([*turns, Turn("user", message)], **sampling), show_timeline)
            return
        while True:
            try:
                asked = await asyncio.to_thread(console.input, "[bold]> [/]")
            except EOFError:
                return
            if asked.strip():
                turns.append(Turn("user", asked))
                turns.append(
                    Turn("assistant", await show_answer(console, client.chat(turns, **sampling), show_timeline))
                )


async def continue_text(connect: Connect, prompt: str, sampling: Sampling, show_timeline: bool) -> None:
    """Continue a text. Raises: PdServeError."""
    async with connect() as client:
        await show_answer(Console(), client.generate(prompt, **sampling), show_timeline)
