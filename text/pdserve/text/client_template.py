"""`ClientTemplate`: a chat template that came with a request, compiled and rendered in a process of its own.

A template is a program. The sandbox and the budget of `template_budget.py` hold for an honest author; comparing two values that
share their parts may still take exponential time in one operation. So the kernel limits the process: its processor time, its
memory, and the files that it may write. It ends with its parent.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdserve.common.child_environment import child_environment
from pdserve.common.errors import InvalidRequest, Overloaded

FIELD = "chat_template"
MAX_TEMPLATE_BYTES = 1 << 16
_WALL_S = 30.0
"""Longest wait for the process, seconds, on a machine that others keep busy."""


class TemplateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that the kernel puts to the process."""

    memory_bytes: int = 256 << 20
    """Address space that it may add to that of the program."""
    cpu_s: float = 2.5
    """Processor time of compiling and rendering, without the program's start, seconds."""


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
        try:
            ended = subprocess.run(
                [sys.executable, "-P", "-m", "pdserve.text.client_template_process"],
                input=data,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_WALL_S,
                check=False,
                env=child_environment(),
            )
        except subprocess.TimeoutExpired:
            raise Overloaded(f"chat_template was not rendered within {_WALL_S:g} s: the machine is busy") from None
        return _text_of(ended, self._limits)


def _text_of(ended: subprocess.CompletedProcess[bytes], limits: TemplateLimits) -> str:
    """Raises: InvalidRequest for a process that was killed, or that refused its task."""
    if ended.returncode == -signal.SIGPROF:
        raise InvalidRequest(f"chat_template needs more than {limits.cpu_s:g} s of processor time", FIELD)
    try:
        result = msgspec.json.decode(ended.stdout, type=TemplateResult)
    except msgspec.MsgspecError:
        raise InvalidRequest(
            f"chat_template ended its process with status {ended.returncode}: it needs more than "
            f"{limits.memory_bytes >> 20} MiB, or nests too deeply",
            FIELD,
        ) from None
    if result.error is not None:
        raise InvalidRequest(result.error, result.field)
    return result.text
