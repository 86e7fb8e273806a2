"""`ClientTemplate`: a chat template that came with a request, compiled and rendered in a process of its own.

A template is a program. The sandbox and the budget of `template_budget.py` hold for an honest author; comparing two values that
share their parts may still take exponential time in one operation. So the kernel limits the process: its processor time and its
memory. It opens no file, so that not even code that has left the sandbox reads a secret from the disk or from `/proc`. A fork
server (`client_template_process.py`) makes one process per rendering.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdserve.common.errors import InvalidRequest, Overloaded
from pdserve.common.processes.child_environment import child_environment

FIELD = "chat_template"
MAX_TEMPLATE_BYTES = 1 << 16
STATUS = struct.Struct("<i")
"""Exit status of a rendering's process, after its output; negative: the number of the signal that ended it."""
_WALL_S = 30.0
"""Longest wait for a process, seconds, on a machine that others keep busy."""
_END_S = 2.0
"""Seconds for the fork server to end after its socket is closed."""
_PART_BYTES = 1 << 20


class TemplateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that the kernel puts to the process."""

    memory_bytes: int = 256 << 20
    """Address space that it may add to that of the program."""
    cpu_s: float = 2.5
    """Processor time of compiling and rendering, seconds."""


class TemplateTask(msgspec.Struct, kw_only=True):
    """Input of the process, as JSON; `options` are arguments of `ChatTemplate.render`."""

    source: str
    special_tokens: dict[str, str]
    messages: list[Any]
    options: dict[str, Any]
    limits: TemplateLimits


class TemplateResult(msgspec.Struct, kw_only=True):
    """Output of the process, as JSON: a text, or the message of an `InvalidRequest` with its field."""

    text: str = ""
    error: str | None = None
    field: str | None = None


class ClientTemplate:
    """`render` blocks a thread until the process ends."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], limits: TemplateLimits = TemplateLimits()
    ) -> None:
        """Raises: InvalidRequest for a source that is too long."""
        if (num_bytes := len(source.encode(errors="surrogatepass"))) > MAX_TEMPLATE_BYTES:
            raise InvalidRequest(
                f"chat_template has {num_bytes} bytes, at most {MAX_TEMPLATE_BYTES} are allowed", FIELD
            )
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._limits = limits

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt's text, as `ChatTemplate.render` makes it. Raises: InvalidRequest; Overloaded after 30 s."""
        task = TemplateTask(
            source=self._source,
            special_tokens=self._special_tokens,
            messages=list(messages),
            options=options,
            limits=self._limits,
        )
        try:
            data = msgspec.json.encode(task)
        except (UnicodeEncodeError, RecursionError) as error:
            raise InvalidRequest(
                f"chat_template, or what it renders, is not valid Unicode or nested too deeply: {error!s:.100}", FIELD
            ) from None
        return self._text_of(*_FORK_SERVER.run(data))

    def _text_of(self, output: bytes, status: int) -> str:
        """Raises: InvalidRequest for a process that was killed, or that refused its task."""
        if status == -signal.SIGPROF:
            raise InvalidRequest(f"chat_template needs more than {self._limits.cpu_s:g} s of processor time", FIELD)
        try:
            result = msgspec.json.decode(output, type=TemplateResult)
        except msgspec.MsgspecError:
            raise InvalidRequest(
                f"chat_template ended its process with status {status}: it needs more than "
                f"{self._limits.memory_bytes >> 20} MiB, or nests too deeply",
                FIELD,
            ) from None
        if result.error is not None:
            raise InvalidRequest(result.error, result.field)
        return result.text


class TemplateForkServer:
    """The fork server of this process, started at first use. Any thread may use it; renderings follow one another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._program: subprocess.Popen[bytes] | None = None

    @property
    def process_id(self) -> int | None:
        """None while it is not started."""
        return None if self._program is None else self._program.pid

    def run(self, data: bytes) -> tuple[bytes, int]:
        """Output and exit status of a process with this input. Raises: Overloaded for one that does not end in time."""
        with self._lock:
            ours = self._connected()
        with ours:
            ours.settimeout(_WALL_S)
            try:
                # a process that is killed early closes its end
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    ours.sendall(data)
                    ours.shutdown(socket.SHUT_WR)
                received = b"".join(iter(lambda: ours.recv(_PART_BYTES), b""))
            except ConnectionResetError:
                received = b""
            except TimeoutError:
                raise Overloaded(f"chat_template was not rendered within {_WALL_S:g} s: the machine is busy") from None
        if len(received) < STATUS.size:
            raise Overloaded("the process that renders chat templates ended, and is started again")
        return received[: -STATUS.size], STATUS.unpack(received[-STATUS.size :])[0]

    def _connected(self) -> socket.socket:
        """A socket to a new process; a fork server that has ended is started again."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control or self._start(), [b"\0"], [theirs.fileno()])
            except OSError:
                self.close()
                socket.send_fds(self._start(), [b"\0"], [theirs.fileno()])
        return ours

    def _start(self) -> socket.socket:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._program = subprocess.Popen(
                [sys.executable, "-P", "-m", "pdserve.text.templates.client_template_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=child_environment(),
            )
        atexit.register(self.close)
        return self._control

    def close(self) -> None:
        """End the fork server, and wait for its end. A later `run` starts another."""
        atexit.unregister(self.close)
        if self._control is not None:
            self._control.close()
        if self._program is not None:
            try:
                self._program.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._program.kill()
                self._program.wait()
        self._control = self._program = None


_FORK_SERVER = TemplateForkServer()
