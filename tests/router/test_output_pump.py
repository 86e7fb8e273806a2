"""Outputs are written where they arrive, without a task of their own; a client that does not read delays no one else."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.common.errors import ConfigError, InternalError, InvalidRequest
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.requests.client_stream import ClientStream
from pdserve.router.requests.output_pump import OutputPump
from pdserve.text.outputs.request_output import CompletionOutput
from tests.support.run.waiting import HANG_S, eventually


def output(text, index=0, finish=None):
    return CompletionOutput(index=index, text=text, token_ids=[1] * len(text), finish_reason=finish)


class Client:
    """Reads what is written while `reads` is set."""

    def __init__(self, stream):
        self.stream = stream
        self.written = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.pump = OutputPump(stream, 1, self.write, self.write_now)

    async def write(self, outputs):
        await self.reads.wait()
        self.take(outputs)

    def write_now(self, outputs):
        if self.reads.is_set():
            self.take(outputs)
        return self.reads.is_set()

    def take(self, outputs):
        self.written.append("".join(each.text for each in outputs))
        if "!" in self.written[-1]:
            raise InvalidRequest("no such text")

    async def run(self, first="a"):
        self.running = asyncio.create_task(self.pump.run([output(first)]))
        await asyncio.sleep(0)
        return self

    async def ended(self):
        """The text that is left to write."""
        return "".join(each.text for each in await asyncio.wait_for(self.running, HANG_S))


async def test_outputs_of_one_turn_of_the_loop_are_written_at_once_without_a_task():
    client = await Client(ClientStream(1, 1000)).run()
    num_tasks = len(asyncio.all_tasks())
    for text in "bcd":
        client.stream.push(output(text))
    await asyncio.sleep(0)
    assert client.written == ["a", "bcd"]
    client.stream.push(output("e"))
    await asyncio.sleep(0)
    assert (client.written, len(asyncio.all_tasks())) == (["a", "bcd", "e"], num_tasks)
    client.stream.push(output("f", finish="stop"))
    client.stream.end_run()
    assert await client.ended() == "f"
    assert client.written[-1] == "e"


async def test_what_a_client_does_not_read_is_merged_bounded_and_written_later():
    client = await Client(ClientStream(1, 40)).run()
    client.reads.clear()
    for text in ("b", "c"):
        client.stream.push(output(text))
        await asyncio.sleep(0)
    assert client.stream.is_blocked
    assert client.written == ["a"]
    client.stream.push(output("d"))
    client.reads.set()
    await eventually(lambda: client.written == ["a", "b", "cd"])
    assert not client.stream.is_blocked
    client.stream.push(output("e", finish="stop"))
    assert await client.ended() == "e"


async def test_an_error_ends_after_what_was_pushed():
    client = await Client(ClientStream(1, 1000)).run()
    client.stream.push(output("b"))
    client.stream.fail(InternalError("gone"))
    with pytest.raises(InternalError, match="gone"):
        await client.ended()
    assert client.written == ["a", "b"]


async def test_an_error_of_the_writer_ends_it():
    client = await Client(ClientStream(1, 1000)).run()
    client.stream.push(output("!"))
    with pytest.raises(InvalidRequest, match="no such text"):
        await client.ended()


async def test_what_came_before_it_ran_is_not_lost():
    stream = ClientStream(1, 1000)
    stream.push(output("b", finish="stop"))
    stream.end_run()
    client = await Client(stream).run()
    assert await client.ended() == "b"
    assert client.written == ["a"]


async def test_a_cancelled_writer_writes_no_more():
    client = await Client(ClientStream(1, 1000)).run()
    client.reads.clear()
    client.stream.push(output("b"))
    await asyncio.sleep(0.01)
    client.running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.running
    client.reads.set()
    client.stream.push(output("c"))
    await asyncio.sleep(0.01)
    assert client.written == ["a"]


async def test_an_error_of_the_writer_in_the_turn_of_the_cancellation_is_dropped():
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, error: errors.append(error))
    client = await Client(ClientStream(1, 1000)).run()
    client.reads.clear()
    client.stream.push(output("!"))
    await asyncio.sleep(0.01)
    client.reads.set()
    client.running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.running
    await asyncio.sleep(0.01)
    assert not errors


async def test_an_error_of_a_writer_that_has_waited_ends_it():
    client = await Client(ClientStream(1, 1000)).run()
    client.reads.clear()
    client.stream.push(output("!"))
    await asyncio.sleep(0.01)
    client.reads.set()
    with pytest.raises(InvalidRequest, match="no such text"):
        await client.ended()


async def test_a_write_that_ends_keeps_the_interval():
    client = await Client(ClientStream(1, 1000, flush_s=1000.0)).run()
    client.reads.clear()
    client.stream.push(output("b"))
    await asyncio.sleep(0.01)
    client.stream.push(output("c"))
    client.reads.set()
    await eventually(lambda: client.written == ["a", "b"])
    await asyncio.sleep(0.01)
    assert client.written == ["a", "b"]
    client.stream.push(output("d", finish="stop"))
    client.stream.end_run()
    assert await client.ended() == "cd"


async def test_a_request_that_ends_without_more_output_leaves_nothing_to_write():
    client = await Client(ClientStream(1, 1000)).run()
    client.stream.end_run()
    assert await client.ended() == ""


async def test_an_error_after_output_that_was_written_at_once_ends_it():
    stream, written = ClientStream(1, 1000), []

    async def write(outputs):
        raise AssertionError("the client takes everything at once")

    def write_now(outputs):
        written.append("".join(each.text for each in outputs))
        return True

    running = asyncio.create_task(OutputPump(stream, 1, write, write_now).run([output("a")]))
    await asyncio.sleep(0)
    stream.push(output("b"))
    stream.fail(InternalError("gone"))
    with pytest.raises(InternalError, match="gone"):
        await asyncio.wait_for(running, HANG_S)
    assert written == ["a", "b"]


async def test_a_slow_client_is_written_to_by_the_task_and_then_at_once_again():
    stream, written, is_ready = ClientStream(1, 1000), [], True

    async def write(outputs):
        await asyncio.sleep(0)
        written.append(("task", "".join(each.text for each in outputs)))

    def write_now(outputs):
        if is_ready:
            written.append(("callback", "".join(each.text for each in outputs)))
        return is_ready

    running = asyncio.create_task(OutputPump(stream, 1, write, write_now).run([output("a")]))
    for text, ready in (("b", True), ("c", False), ("d", True)):
        is_ready = ready
        stream.push(output(text))
        await asyncio.sleep(0.01)
    stream.push(output("e", finish="stop"))
    assert [each.text for each in await asyncio.wait_for(running, HANG_S)] == ["e"]
    assert written == [("callback", "a"), ("callback", "b"), ("task", "c"), ("callback", "d")]


async def test_a_stream_is_read_once_per_interval_but_for_its_first_output_and_its_end():
    stream = ClientStream(1, 1000, flush_s=1000.0)
    taken = []

    def take():
        taken.append("".join(each.text for each in stream.take_now()))

    stream.subscribe(take)
    for text in "abc":
        stream.push(output(text))
        await asyncio.sleep(0.001)
    assert taken == ["a"]
    stream.push(output("d", finish="stop"))
    stream.end_run()
    await asyncio.sleep(0.001)
    assert taken == ["a", "bcd"]
    stream.subscribe(None)


def test_the_interval_has_limits():
    for value in (-1, 1001):
        with pytest.raises(ConfigError, match="stream_flush_ms"):
            RouterSettings(stream_flush_ms=value).verify()
    RouterSettings(stream_flush_ms=1000).verify()
