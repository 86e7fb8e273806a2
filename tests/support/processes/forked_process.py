"""`ForkedProcess`: a Python program as a process of its own, which starts in a tenth of the time.

Two of three seconds that a worker needs to start go into `import torch`. Here they are spent once: `fork_server.py` has
imported it, and forks. `pdserve up` and the examples start as users start them, in `tests/cluster/test_examples.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.processes.fork_server import MAX_BYTES
from tests.support.run.waiting import HANG_S

_SERVER = Path(__file__).with_name("fork_server.py")


class _ForkServer:
    """One for the test session; ends with it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_SERVER), str(number)],
                stdin=subprocess.DEVNULL,
                pass_fds=(number,),
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self._asking = threading.Lock()
        atexit.register(self._close)

    def fork(self, request: Mapping[str, object], descriptors: Sequence[int]) -> int:
        message = json.dumps(request).encode()
        if len(message) > MAX_BYTES:
            raise ValueError(f"a request of {len(message)} bytes, at most {MAX_BYTES} are read")
        with self._asking:
            socket.send_fds(self._control, [message], list(descriptors))
            answer = self._control.recv(64)
        if not answer:
            raise RuntimeError(f"the fork server ended with status {self._process.wait(HANG_S)}")
        return int(answer)

    def _close(self) -> None:
        self._control.close()
        self._process.wait(HANG_S)


_started: list[_ForkServer] = []


def _server() -> _ForkServer:
    if not _started:
        _started.append(_ForkServer())
    return _started[0]


class ForkedProcess:
    """As much of `subprocess.Popen` as tests use; the process is the fork server's child, which reaps it."""

    def __init__(
        self,
        program: Sequence[str],
        *,
        output: int,
        errors: int | None = None,
        environ: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> None:
        """program: `-m`, a module and its arguments, or a file and its arguments.

        output, errors: descriptors for stdout and stderr; without `errors` both go to `output`.
        """
        self._status, theirs = os.pipe()
        self.returncode: int | None = None
        """Negative for the signal that ended it; None before the end has been noticed."""
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            request = {"program": list(program), "environ": dict(environ), "descriptors": [0, 1, 2, *pass_fds]}
            self.pid = _server().fork(
                request, [nothing, output, output if errors is None else errors, *pass_fds, theirs]
            )
        finally:
            os.close(theirs)
            os.close(nothing)

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Without effect when it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has been reaped just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            said = os.read(self._status, 64)
            os.close(self._status)
            if not said:
                raise RuntimeError("the fork server is gone")
            self.returncode = int(said)
        return self.returncode
