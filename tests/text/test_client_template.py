"""Templates that come with requests: equal to the model's own where they are its own, and harmless where they are hostile."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.common.errors import ConfigError, InvalidRequest, Overloaded
from pdserve.text.templates import client_template_process
from pdserve.text.templates.chat_template import ChatTemplate
from pdserve.text.templates.client_template import (
    FIELD,
    MAX_TEMPLATE_BYTES,
    ClientTemplate,
    TemplateForkServer,
    TemplateLimits,
    TemplateResult,
    TemplateTask,
)
from tests.support.waiting import HANG_S

MODEL = Path(__file__).resolve().parents[2] / "models/pdserve/models/demo/chat_template.jinja"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hëllo"}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
QUICK = TemplateLimits(cpu_s=0.3)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (MODEL.read_text(), {}),
        (MODEL.read_text(), {"tools": TOOLS, "add_generation_prompt": False}),
        ("{{ bos_token }}{% for m in messages %}{{ m.content }}{% if x %}{{ x | tojson }}{% endif %}{% endfor %}",
         {"variables": {"x": [1, {"a": None}]}, "continue_final_message": True, "add_generation_prompt": False}),
    ],
)  # fmt: skip
def test_it_renders_what_the_models_own_renders(source: str, options: dict[str, Any]) -> None:
    expected = ChatTemplate(source, TOKENS, "here").render(MESSAGES, **options)
    assert ClientTemplate(source, TOKENS).render(MESSAGES, **options) == expected


TWINS = "{% set n = namespace(a=1, b=1) %}{% for i in range(60) %}{% set n.a=[n.a, n.a] %}{% set n.b=[n.b, n.b] %}{% endfor %}"
HOSTILE = {
    "comparison of values that share their parts": (TWINS + "{{ n.a == n.b }}", "more than 0.3 s of processor time"),
    "long loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 0.3 s"),
    "a range beyond the sandbox": ("{% for i in range(10**9) %}x{% endfor %}", "refused the messages: Range too big"),
    "a long text": ("{{ 'a' * 10**9 }}", "chat_template needs too much for these messages"),
    "nesting": ("{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", "chat_template"),
    "memory": ("{% set n = namespace(l=[]) %}{% for i in range(99999) %}{% set n.l = [n.l, 'a' * 9999] %}{% endfor %}",
               "chat_template"),
    "syntax": ("{% for %}", "chat_template: chat template, line 1"),
    "its own error": ("{{ raise_exception('no') }}", "chat_template refused the messages: no"),
    "Python's internals": ("{{ ''.__class__.__mro__ }}", "chat_template refused the messages"),
    "half of a character": ("{{ '\\ud800' }}", "not valid Unicode"),
    "an import": ("{% include '/etc/passwd' %}", "chat_template refused the messages"),
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_one_ends_within_its_limits(name: str) -> None:
    source, told = HOSTILE[name]
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match=told) as refused:
        ClientTemplate(source, TOKENS, QUICK).render(MESSAGES)
    assert refused.value.field in ("chat_template", "messages")
    assert len(refused.value.message) < 500
    assert time.monotonic() - began < HANG_S


@pytest.mark.slow
def test_renderings_of_several_threads_and_a_fork_server_that_was_killed() -> None:
    server = TemplateForkServer()
    task = TemplateTask(source="{{ x }}", special_tokens={}, messages=MESSAGES, options={}, limits=QUICK)

    def render(number: int) -> str:
        asked = msgspec.structs.replace(task, options={"variables": {"x": number}})
        output, status = server.run(msgspec.json.encode(asked))
        assert status == 0
        return msgspec.json.decode(output, type=TemplateResult).text

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(render, range(12))) == [str(number) for number in range(12)]
    first = server.process_id
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert eventually_rendered(render) == "7"
    assert server.process_id not in (None, first)
    server.close()
    assert server.process_id is None


def eventually_rendered(render: Callable[[int], str]) -> str:
    """The first rendering may still reach the killed server."""
    with contextlib.suppress(Overloaded):
        return render(7)
    return render(7)


def test_a_long_source_is_refused_before_a_process_is_made() -> None:
    ClientTemplate("x" * MAX_TEMPLATE_BYTES, TOKENS)
    with pytest.raises(InvalidRequest, match="chat_template has 65537 bytes, at most 65536 are allowed"):
        ClientTemplate("x" * (MAX_TEMPLATE_BYTES + 1), TOKENS)


def test_values_that_json_does_not_have_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode or nested too deeply"):
        ClientTemplate("x", TOKENS).render([{"role": "user", "content": "\ud800"}])


def in_limits(answer: Callable[[TemplateTask], TemplateResult], monkeypatch: pytest.MonkeyPatch) -> TemplateResult:
    """Result of a task that runs this instead of a template."""
    monkeypatch.setattr(client_template_process, "answer", answer)
    task = TemplateTask(source="", special_tokens={}, messages=[], options={}, limits=TemplateLimits())
    ours, theirs = socket.socketpair()
    unused, control = socket.socketpair()
    with ours, theirs, unused, control:
        ours.sendall(msgspec.json.encode(task))
        ours.shutdown(socket.SHUT_WR)
        assert client_template_process.in_child(control, theirs) == 0
        theirs.close()
        return msgspec.json.decode(b"".join(iter(lambda: ours.recv(1 << 16), b"")), type=TemplateResult)


def test_code_that_leaves_the_sandbox_opens_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    paths = [f"/proc/{os.getpid()}/environ", "/proc/self/environ", str(tmp_path / "key")]
    assert all(Path(path).read_bytes() for path in paths)

    def reads(task: TemplateTask) -> TemplateResult:
        told = []
        for path in paths:
            try:
                told.append(Path(path).read_text())
            except OSError as error:
                told.append(str(error.errno))
        return TemplateResult(text=" ".join(told))

    assert in_limits(reads, monkeypatch).text == " ".join([str(errno.EMFILE)] * 3)


@pytest.mark.parametrize(
    "source",
    [
        "{{ strftime_now('%Y %c %Z') }}",
        "{{ messages | tojson(indent=1) }}{{ 'a <b>' | escape | urlize | wordwrap(2) | title }}{{ 1000 | filesizeformat }}",
        "{{ 'é'.encode('idna') }}{{ 'é'.encode('utf-16') }}{{ [3, 1] | sort | batch(1) | list }}{{ {'a': 1} | xmlattr }}",
        "{% for %}",
        "{{ raise_exception('no') }}",
        "{{ nothing.here.now }}",
        "{{ 1 / 0 }}",
        "{% break %}",
    ],
)
def test_a_template_needs_no_file(source: str) -> None:
    """The process renders what a process that may open files renders."""

    outcomes = []
    for make in (lambda: ChatTemplate(source, TOKENS, FIELD, name=FIELD), lambda: ClientTemplate(source, TOKENS)):
        try:
            outcomes.append(make().render(MESSAGES))
        except (InvalidRequest, ConfigError) as error:
            outcomes.append(error.message)
    # a clock goes on
    assert outcomes[0] == outcomes[1] or ("strftime_now" in source and outcomes[1][:2] == "20")
