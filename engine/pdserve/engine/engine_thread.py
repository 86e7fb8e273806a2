"""`EngineThread`: the thread in which an `EngineCore` runs, and the two queues to and from it.

reader's thread                      engine thread
---------------                      -------------
post(command)     --- inbox --->     command(core), between steps
on_outputs(...)   <-- call_soon ---  step()
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pdserve.common.errors import WorkerLost
from pdserve.common.request.engine_types import EngineCoreOutputs
from pdserve.engine.engine_core import EngineCore

log = logging.getLogger(__name__)

Command = Callable[[EngineCore], object]
IDLE_BEAT_S = 0.25
"""Seconds between turns of an idle engine's loop, so that its tick moves."""
BLOCKED_S = 0.05
"""Seconds to wait for an event when sequences wait for blocks and nothing can be computed."""
ENGINE_FAILED = "the engine failed; its log has the details"


def _look_again(core: EngineCore) -> None:
    """Wake the loop; the next step applies arrived results."""


def in_event_loop(loop: asyncio.AbstractEventLoop) -> Callable[[Callable[[], None]], None]:
    """`call_soon` for a reader in an event loop."""

    def call_soon(callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: there is no receiver
            loop.call_soon_threadsafe(callback)

    return call_soon


@dataclass(eq=False)
class EngineThread:
    """Starts with `start`, ends with `stop`; a failed step ends every request and the thread."""

    core: EngineCore
    call_soon: Callable[[Callable[[], None]], object]
    """Runs a callback after earlier ones, where outputs are read: in this thread, or `in_event_loop`."""
    _on_outputs: Callable[[EngineCoreOutputs], None]
    _on_death: Callable[[Exception], None]
    num_threads: int
    cpu_core: int | None
    failure_text: Callable[[Exception], str] = lambda error: ENGINE_FAILED
    """The message with which requests end when the engine fails."""
    _inbox: queue.SimpleQueue[Command | None] = field(default_factory=queue.SimpleQueue, init=False)
    _after_step: list[Callable[[], None]] = field(default_factory=list, init=False)
    _wait_s: float | None = field(default=None, init=False)
    """Seconds for which the next turn waits for a command; None: it does not wait."""
    _is_checked: bool = field(default=False, init=False)
    """Nothing has been computed since all blocks were checked."""

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.core.scheduler.grammars.on_arrival = lambda: self.post(_look_again)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop after its current work; waits for the thread."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def post(self, command: Command) -> None:
        """Run `command` in the engine thread, before the next step. Any thread may call it."""
        self._inbox.put(command)

    def _run(self) -> None:
        self._take_core()
        try:
            self._loop_until_stopped()
        except Exception as error:
            # the end of another process is its cause, not a place in this one's code
            why = f": {error.message}" if isinstance(error, WorkerLost) else ""
            log.error("the engine failed; every request it had ends%s", why, exc_info=not why)
            failure = error
            with contextlib.suppress(Exception):
                self.core.fail_all(WorkerLost(self.failure_text(failure)))
                self._notify(EngineCoreOutputs(outputs=self.core.scheduler.outputs.take()))
            self.call_soon(lambda: self._on_death(failure))
        for callback in self._after_step:
            self.call_soon(callback)

    def _loop_until_stopped(self) -> None:
        wait_s: float | None = None
        while (num_commands := self._run_commands(wait_s)) is not None:
            if not self._turn(num_commands):
                return
            wait_s = self._wait_s

    def _turn(self, num_commands: int) -> bool:
        """One step, after so many commands; sets `_wait_s`, the time for which the next one waits for a command. False to end."""
        if (
            num_commands == 0
            and self._wait_s == IDLE_BEAT_S
            and not self._is_checked
            and not self.core.scheduler.requests
        ):
            # idle for a whole beat, so no request waits for this check of all blocks
            self.core.scheduler.check()
            self._is_checked = True
        after_step, self._after_step = self._after_step, []
        outputs = self.core.step()
        try:
            # first run commands that the transfer side posted during the step: blocks are sent before outputs are reported
            ends = self._run_commands(None) is None
        finally:
            self._notify(outputs)
            for callback in after_step:
                self.call_soon(callback)
        if outputs.outputs or self.core.has_computed or self.core.is_loading:
            self._wait_s, self._is_checked = None, False
        else:
            self._wait_s = BLOCKED_S if self.core.has_work else IDLE_BEAT_S
        return not ends

    def _run_commands(self, wait_s: float | None) -> int | None:
        """Run posted commands, waiting at most `wait_s` for the first; returns their number, None to end the loop."""
        num_commands = 0
        try:
            command = self._inbox.get_nowait() if wait_s is None else self._inbox.get(timeout=wait_s)
            while command is not None:
                command(self.core)
                num_commands += 1
                command = self._inbox.get_nowait()
        except queue.Empty:
            return num_commands
        return None

    def _notify(self, outputs: EngineCoreOutputs) -> None:
        self.call_soon(lambda: self._on_outputs(outputs))

    def call_after_step(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the asyncio thread after the next step's outputs.

        Commands call this in the engine thread: the outputs that they cause leave with the next step.
        """
        self._after_step.append(callback)

    def _take_core(self) -> None:
        torch.set_num_threads(self.num_threads)
        if self.cpu_core is not None:
            cores = set(range(self.cpu_core, self.cpu_core + self.num_threads)) & set(range(os.cpu_count() or 1))
            try:
                os.sched_setaffinity(0, cores)  # 0 is this thread
            except OSError as error:
                log.warning("cannot pin the engine to core %d: %s", self.cpu_core, error)
