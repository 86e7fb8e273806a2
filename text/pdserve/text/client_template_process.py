"""A fork server that renders clients' chat templates, each in a child process: a `TemplateTask` comes over a socket, a
`TemplateResult` and the child's exit status go back.

`TemplateForkServer` starts this module with the descriptor of its control socket, over which each task's socket comes. The
server ends when that is closed, and a child with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import msgspec

from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.text.chat_template import ChatTemplate
from pdserve.text.client_template import FIELD, STATUS, TemplateLimits, TemplateResult, TemplateTask

_PR_SET_PDEATHSIG = 1
_NICENESS = 10
_PAGE_BYTES = resource.getpagesize()
_PART_BYTES = 1 << 20


def main() -> None:
    # Ctrl-C signals the whole process group; the router decides when this process ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # the router goes on serving beside it
    os.nice(_NICENESS)
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            with socket.socket(fileno=descriptors[0]) as task:
                status = STATUS.pack(in_child(control, task))
                with contextlib.suppress(OSError):
                    task.sendall(status)


def in_child(control: socket.socket, task: socket.socket) -> int:
    """Exit status of a child that serves the task; negative: the number of a signal."""
    process_id = os.fork()
    if process_id:
        return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
    status = 1
    try:
        server = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:
            control.close()
            received = b"".join(iter(lambda: task.recv(_PART_BYTES), b""))
            asked = msgspec.json.decode(received, type=TemplateTask)
            limit(asked.limits)
            task.sendall(msgspec.json.encode(answer(asked)))
            status = 0
    finally:
        os._exit(status)


def limit(limits: TemplateLimits) -> None:
    """Limit this process from now on; the kernel kills it, or refuses it memory."""
    begins_with = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES
    most = begins_with + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for none in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(none, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)


def answer(task: TemplateTask) -> TemplateResult:
    try:
        template = ChatTemplate(task.source, task.special_tokens, FIELD, name=FIELD)
        text = template.render(task.messages, **task.options)
        # a template may write what is no Unicode
        text.encode()
        return TemplateResult(text=text)
    except InvalidRequest as error:
        return TemplateResult(error=error.message, field=error.field)
    except ConfigError as error:
        return TemplateResult(error=error.message, field=FIELD)
    except UnicodeEncodeError:
        return TemplateResult(error="chat_template makes a text that is not valid Unicode", field=FIELD)


if __name__ == "__main__":
    main()
