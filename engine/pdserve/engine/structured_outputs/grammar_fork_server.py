"""`GrammarForkServer`: starts and controls the fork server for grammars (`grammar_process.py`)."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdserve.common.ipc.child_process import ChildProcess
from pdserve.common.processes.child_environment import child_environment
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.engine.structured_outputs.grammar_messages import (
    MAX_PACKET_BYTES,
    Broken,
    Exited,
    GrammarLimits,
    Kill,
    Ready,
    Spawn,
    decode,
    encode,
    make_progress,
    packet_socket_pair,
)

_END_S = 2.0
"""Seconds for the fork server to end after its socket is closed."""
_MODULE = "pdserve.engine.structured_outputs.grammar_process"
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Variables of the program in addition to `child_environment`."""


def start_program(arguments: Sequence[str], descriptor: int) -> ChildProcess:
    """Start the program with a descriptor, which it inherits."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(descriptor,),
        env=child_environment() | ENVIRONMENT,
    )


@dataclass(frozen=True, slots=True)
class SpawnedProcess:
    """A process for one grammar."""

    number: int
    control: socket.socket
    steps: socket.socket
    progress: NDArray[np.int32]
    """See `map_progress`."""


class GrammarForkServer:
    """A running fork server, used by one thread. It ends when its socket is closed, so also when this process is killed."""

    def __init__(self, folder: Path, vocab_size: int, limits: GrammarLimits) -> None:
        """Start the program. It imports modules and reads the vocabulary, about 1 s, without blocking the caller."""
        self._limits = limits
        self._num_spawned = 0
        self.is_ready = False
        """True after the program has read the vocabulary; processes spawned earlier wait for it."""
        self._socket, theirs = packet_socket_pair()
        with theirs:
            arguments = (theirs.fileno(), folder, vocab_size, limits.whitespace_chars, limits.string_chars)
            self._program = start_program([*map(str, arguments)], theirs.fileno())

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def process_id(self) -> int:
        return self._program.pid

    def processor_ticks(self) -> int:
        """CPU time of the fork server without its processes, in clock ticks; 0 if it has ended."""
        with contextlib.suppress(OSError):
            after_name = Path(f"/proc/{self.process_id}/stat").read_text().rpartition(")")[2].split()
            return int(after_name[11]) + int(after_name[12])
        return 0

    def spawn(self, params: StructuredOutputsParams) -> SpawnedProcess:
        """A new process that compiles a grammar. Raises: OSError if the fork server has ended."""
        self._num_spawned += 1
        control, their_control = packet_socket_pair()
        steps, their_steps = packet_socket_pair()
        descriptor, progress = make_progress()
        try:
            message = encode(Spawn(self._num_spawned, params, self._limits))
            socket.send_fds(self._socket, [message], [their_control.fileno(), their_steps.fileno(), descriptor])
        except OSError:
            control.close()
            steps.close()
            raise
        finally:
            their_control.close()
            their_steps.close()
            os.close(descriptor)
        return SpawnedProcess(self._num_spawned, control, steps, progress)

    def kill(self, number: int) -> None:
        """Kill a process in any state."""
        with contextlib.suppress(OSError):
            self._socket.send(encode(Kill(number)))

    def receive(self) -> Ready | Exited | Broken | None:
        """The next message, which must have arrived. None if the fork server has ended."""
        with contextlib.suppress(OSError):
            if packet := self._socket.recv(MAX_PACKET_BYTES):
                message: Ready | Exited | Broken = decode(packet, Ready, Exited, Broken)
                self.is_ready = self.is_ready or isinstance(message, Ready)
                return message
        return None

    def close(self) -> None:
        """End the fork server and all its processes, and wait for its end."""
        self._socket.close()
        try:
            self._program.wait(_END_S)
        except subprocess.TimeoutExpired:
            # it is still importing, or swapped out; its processes end with it
            self._program.kill()
            self._program.wait()
