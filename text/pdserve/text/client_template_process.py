"""A program that renders one client's chat template: a `TemplateTask` on standard input, a `TemplateResult` on standard output."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

import msgspec

from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.text.chat_template import ChatTemplate
from pdserve.text.client_template import FIELD, TemplateLimits, TemplateResult, TemplateTask

_PR_SET_PDEATHSIG = 1
_NICENESS = 10
_PAGE_BYTES = resource.getpagesize()


def main() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=TemplateTask)
    # the router goes on serving beside it
    os.nice(_NICENESS)
    limit(task.limits)
    sys.stdout.buffer.write(msgspec.json.encode(answer(task)))


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
