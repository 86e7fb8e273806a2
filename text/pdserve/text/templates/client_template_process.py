"""A fork server that renders clients' chat templates, each in a child process: a `TemplateTask` comes over a socket, a
`TemplateResult` and the child's exit status go back.

`TemplateForkServer` starts this module with the descriptor of its control socket, over which each task's socket comes. The
server ends when that is closed, and a child with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings
import gc
import importlib
import os
import pkgutil
import resource
import signal
import socket
import sys
from pathlib import Path

import msgspec

from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.text.templates.chat_template import ChatTemplate
from pdserve.text.templates.client_template import FIELD, STATUS, TemplateLimits, TemplateResult, TemplateTask

_PR_SET_PDEATHSIG = 1
_NICENESS = 10
_PAGE_BYTES = resource.getpagesize()
_PART_BYTES = 1 << 20
_SAMPLE = "{{ [1] | tojson }}{{ strftime_now('%c') }}{{ 'x' | urlize | escape | title }}{{ [{'a': 1}] | groupby('a') | list }}"


def main() -> None:
    # Ctrl-C signals the whole process group; the router decides when this process ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # the router goes on serving beside it
    os.nice(_NICENESS)
    warm_up()
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


def warm_up() -> None:
    """Load what a rendering loads at its first need, since a child opens no file."""
    codecs = [f"encodings.{found.name}" for found in pkgutil.iter_modules(encodings.__path__)]
    for name in ("html.entities", "jinja2.debug", "unicodedata", *codecs):
        # some codecs are those of other systems
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for source in (_SAMPLE, "{% for %}", "{{ raise_exception('x') }}"):
        answer(TemplateTask(source=source, special_tokens={}, messages=[], options={}, limits=TemplateLimits()))


def limit(limits: TemplateLimits) -> None:
    """Limit this process from now on; the kernel kills it, or refuses it memory and descriptors.

    Without descriptors it opens no file: neither keys on the disk nor another process' environment in /proc.
    """
    begins_with = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES
    most = begins_with + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for none in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE):
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
