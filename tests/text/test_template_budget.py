"""Limits of one rendering of a chat template, whatever the template and the client's values are."""

from __future__ import annotations

import re
import time
import tracemalloc
from typing import Any

import pytest

from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.text.templates import template_budget
from pdserve.text.templates.chat_template import ChatTemplate
from pdserve.text.templates.template_budget import MAX_CPU_S, MAX_VALUE_CHARS, MAX_WORK_CHARS

HELLO = [{"role": "user", "content": "hello"}]
BIG = "{% set big = 'a' * 10**7 %}"
DOUBLING = "{% set n = namespace(s='ab') %}{% for i in range(60) %}"
NESTED = "{% set n = namespace(s=['a']) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
TEN_BILLION = "{% for i in range(100000) %}{% for j in range(100000) %}"

TOO_COSTLY = {
    "repeat": "{{ 'a' * 10**9 }}",
    "repeat from the left": "{{ 10**9 * 'a' }}",
    "repeat a list": "{{ [1] * 10**9 }}",
    "repeat the client's": "{{ messages[0].content * 10**9 }}",
    "power": "{{ 10**(10**10) }}",
    "numbers": "{% set n = namespace(s=3) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "concat": DOUBLING + "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "add": DOUBLING + "{% set n.s = n.s + n.s %}{% endfor %}",
    "add lists": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "nested lists as text": NESTED + "{{ n.s }}",
    "nested lists as text, concat": NESTED + "{{ n.s ~ '' }}",
    "nested lists as JSON": NESTED + "{{ n.s | tojson }}",
    "nested lists by format": NESTED + "{{ '%s' % (n.s,) }}",
    "nested lists joined": NESTED + "{{ n.s | join }}",
    "replace": BIG + "{{ big.replace('a', big) }}",
    "replace nothing": BIG + "{{ big.replace('', big) }}",
    "replace, filter": BIG + "{{ big | replace('a', big) }}",
    "join": BIG + "{{ big.join(range(99999) | map('string')) }}",
    "join a string": BIG + "{{ big.join(big) }}",
    "join, filter": BIG + "{{ range(99999) | join(big) }}",
    "join, filter over a generator": BIG + "{{ range(99999) | map('string') | join(big) }}",
    "join, filter over a view": BIG + "{{ dict(a=big, b=big, c=big).values() | join(big) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ ('\t' * 1000000).expandtabs(1000000) }}",
    "translate": BIG + "{{ ('a' * 100000).translate({97: big}) }}",
    "to_bytes": "{{ (5).to_bytes(10**9, 'big') }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent, a value": "{{ '%*d' % (10**9, 1) }}",
    "percent, filter": "{{ '%1000000000d' | format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format, a value": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "center": "{{ 'a' | center(10**9) }}",
    "indent": "{{ ('a\n' * 100000) | indent(100000) }}",
    "indent by text": BIG + "{{ ('a\n' * 100000) | indent(big) }}",
    "wordwrap": BIG + "{{ big | wordwrap(1, wrapstring=big) }}",
    "tojson, indent": "{{ messages | tojson(indent=10**9) }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "sum of lists": "{{ ([[1]] * 99999) | sum(start=[]) }}",
    "loops": TEN_BILLION + "{% endfor %}{% endfor %}",
    "loops of text": TEN_BILLION + "0123456789" * 99 + "{% endfor %}{% endfor %}",
    "loops of output": BIG + "{% for i in range(100000) %}{{ big }}{% endfor %}",
    "captured loops": BIG + "{% set x %}{% for i in range(100000) %}{{ big }}{% endfor %}{% endset %}",
    "captured text": "{% set x %}" + TEN_BILLION + "0123456789" * 99 + "{% endfor %}{% endfor %}{% endset %}",
    "macros": "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}",
    "call blocks": "{% macro a() %}{% for i in range(99999) %}{{ caller() }}{% endfor %}{% endmacro %}"
    "{% call a() %}{% for i in range(99999) %}{% endfor %}{% endcall %}",
}


AT_THE_LIMIT = {"loops", "join"}
"""Under the product's own limit of CPU time; the others have a sixteenth of it, which they take whole."""


@pytest.mark.few(2)
@pytest.mark.parametrize("name", TOO_COSTLY)
def test_what_costs_too_much_is_a_clear_error_at_a_bounded_price(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    max_cpu_s = MAX_CPU_S if name in AT_THE_LIMIT else MAX_CPU_S / 16
    monkeypatch.setattr(template_budget, "MAX_CPU_S", max_cpu_s)
    template = ChatTemplate(TOO_COSTLY[name], {}, "test")
    tracemalloc.start()
    since = time.thread_time()
    try:
        with pytest.raises(
            InvalidRequest, match="the model's chat template needs too much for these messages"
        ) as caught:
            template.render(HELLO)
        cpu_s = time.thread_time() - since
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.field == "messages"
    assert cpu_s < max_cpu_s + MAX_CPU_S
    assert peak_bytes < 2 * MAX_WORK_CHARS


@pytest.mark.parametrize(
    "source", ["{{ 'a' * 10**9 }}", "{{ 'a' | center(10**9) }}", "{{ 10**(10**10) }}", "{{ 'a' ~ 'b' }}"]
)
def test_nothing_is_computed_while_a_template_is_compiled(source: str) -> None:
    tracemalloc.start()
    try:
        ChatTemplate(source, {}, "test")
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_each_rendering_has_a_budget_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "MAX_WORK_CHARS", 1000)
    template = ChatTemplate("{{ messages[0].content * 90 }}", {}, "test")
    for _ in range(20):
        assert len(template.render(HELLO)) == 450
    with pytest.raises(InvalidRequest, match="more than 1000 characters in all"):
        template.render([{"role": "user", "content": "a" * 12}])
    assert len(template.render(HELLO)) == 450


def test_a_text_longer_than_the_largest_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}, "test")
    messages = [{"role": "user", "content": "a" * (MAX_VALUE_CHARS // 2)}] * 3
    with pytest.raises(InvalidRequest, match=f"makes {3 * (MAX_VALUE_CHARS // 2)} characters of the messages"):
        template.render(messages)
    assert len(template.render(messages[:2])) == MAX_VALUE_CHARS


USUAL: list[tuple[str, str]] = [
    ("{{ 'a' ~ 1 ~ none ~ messages[0].role }}", "a1Noneuser"),
    (
        "{{ 'ab' * 3 }}{{ [1] * 2 }}{{ 2 * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ 1.5 * 2 }}{{ 'x' + 'y' }}",
        "ababab[1, 1]6102433.0xy",
    ),
    ("{{ '%02d|%s' % (7, 'b') }}{{ '%d' | format(5) }}{{ '100%%' % () }}", "07|b5100%"),
    ("{{ 'year 20251 {{}} {:>4} {a}'.format(1, a='b') }}", "year 20251 {}    1 b"),
    (
        "{{ ['b', 'c'] | join(', ') }}{{ ','.join(['x', 'y']) }}{{ messages | map(attribute='role') | join }}",
        "b, cx,yuser",
    ),
    ("{{ 'a-b'.replace('-', '+') | replace('+', '') | upper | center(4) }}", " AB "),
    ("{{ 'a\nb' | indent(2) }}{{ 'a\tb'.expandtabs(2) }}{{ 'x'.rjust(3) }}", "a\n  ba b  x"),
    (
        "{{ ([[1], [2]] | sum(start=[])) }}{{ [1, 2] | sum }}{{ 100000 | default(5) }}{{ x | default(100000) }}",
        "[1, 2]3100000100000",
    ),
    (
        "{% macro m(x) %}<{{ x }}{{ caller() if caller }}>{% endmacro %}{{ m(1) }}{% call m(2) %}!{% endcall %}",
        "<1><2!>",
    ),
    ("{% for i in range(3) recursive %}{{ loop.index }}{% if not loop.last %},{% endif %}{% endfor %}", "1,2,3"),
    ("{% for m in messages if m.role == 'system' %}x{% else %}none{% endfor %}", "none"),
    ("{% for a, b in {'k': 'v'}.items() %}{{ a }}{{ b }}{% endfor %}{{ [3, 1] | sort | first }}", "kv1"),
    (
        "{% for x in range(9) %}{% if x == 1 %}{% continue %}{% elif x == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}",
        "02",
    ),
    (
        "{{ messages[0].content | trim | length }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "51",
    ),
    (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.content %}{% endfor %}{{ ns.t }}",
        "hello",
    ),
    ("{% filter upper %}{{ messages[0].content }}{% endfilter %}{% set x %}a{{ 1 }}{% endset %}{{ x }}", "HELLOa1"),
    ("{{ messages | tojson(indent=1) }}", '[\n {\n  "role": "user",\n  "content": "hello"\n }\n]'),
]


@pytest.mark.parametrize(("source", "expected"), USUAL)
def test_usual_templates_write_what_they_always_did(source: str, expected: str) -> None:
    assert ChatTemplate(source, {}, "test").render(HELLO) == expected


def test_a_long_conversation_fits():
    source = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% if loop.index0 < messages | length %}"
        "{% set ns.t = ns.t ~ '<|' + m['role'] + '|>' ~ m.content | trim ~ '\n' %}{% endif %}{% endfor %}{{ ns.t }}"
    )
    messages = [{"role": "user", "content": "word " * 20}] * 1000
    since = time.thread_time()
    assert len(ChatTemplate(source, {}, "test").render(messages)) == 1000 * (8 + 99 + 1)
    assert time.thread_time() - since < MAX_CPU_S / 4


@pytest.mark.parametrize("name", ["raise_exception", "namespace", "range", "dict", "strftime_now", "joiner", "cycler"])
@pytest.mark.parametrize("value", [1, None, "text"])
def test_a_client_replaces_no_function_of_the_template(name: str, value: Any) -> None:
    template = ChatTemplate("{{ raise_exception('no') if messages | length > 1 else 'fine' }}", {}, "test")
    with pytest.raises(
        InvalidRequest, match=re.escape(f"chat_template_kwargs has '{name}', which is a function")
    ) as caught:
        template.render(HELLO * 2, variables={"enable_thinking": True, name: value})
    assert caught.value.field == "chat_template_kwargs"


def test_what_a_template_says_is_repeated_in_short():
    template = ChatTemplate("{{ raise_exception('no role ' + messages[0].role) }}", {}, "test")
    with pytest.raises(InvalidRequest) as caught:
        template.render([{"role": "x" * 10_000, "content": ""}])
    assert "no role xxx" in caught.value.message
    assert len(caught.value.message) < 200


NAMELESS = ("raise_exception", "''.upper", "[].append", "messages.items", "namespace", "cycler('a')", "joiner()", "loop", "caller",
            "(messages | map('upper'))", "self", "{}.keys", "dict", "named")  # fmt: skip
"""Values of which Python's text has an address, or whose parts may."""
WRITTEN = {
    "{{ VALUE }}", "{{ [VALUE] }}", "{{ {'a': VALUE} }}", "{{ namespace(f=VALUE) }}", "{{ VALUE ~ '' }}", "{{ '%s' % VALUE }}",
    "{{ '%r' % [VALUE] }}", "{{ '{}'.format(VALUE) }}", "{{ '{a}'.format_map({'a': VALUE}) }}", "{{ [VALUE] | join }}",
    "{{ {'a': VALUE}.values() }}", "{{ {'a': VALUE}.items() | list }}", "{{ ['a'] | join(VALUE) }}", "{{ {}[VALUE].x }}",
    "{{ raise_exception(VALUE) }}", "{{ 'a' | replace('a', VALUE) }}", "{% set t %}{{ VALUE }}{% endset %}{{ t }}",
    "{{ messages | map(attribute='content') | join(VALUE) }}", "{{ [VALUE] | map('string') | list }}",
    "{% filter upper %}{{ VALUE }}{% endfilter %}", "{{ [VALUE] | sum(start='') }}", "{{ [[VALUE]] | first | string | reverse }}",
    "{{ VALUE + '' }}", "{{ '' + VALUE }}", "{{ VALUE | dictsort }}", "{{ VALUE | tojson }}", "{{ 1 / VALUE }}",
}  # fmt: skip


@pytest.mark.slow
def test_no_address_of_memory_is_text():
    budget = template_budget.BudgetedEnvironment()
    filters = {f"{{{{ {operand} | {name} }}}}" for name in budget.filters for operand in ("VALUE", "[VALUE]")}
    for value in NAMELESS:
        for written in sorted(WRITTEN | (filters if value in NAMELESS[:2] else set())):
            inner = written.replace("VALUE", value)
            source = (
                "{% macro named() %}{% endmacro %}{% macro calls() %}{{ caller() }}{% endmacro %}{% for m in messages %}"
                f"{inner if value != 'caller' else ''}" + "{% endfor %}"
            )
            if value == "caller":
                source += "{% macro outer() %}" + inner + "{% endmacro %}{% call outer() %}x{% endcall %}"
            try:
                said = ChatTemplate(source, {}, "test").render(HELLO)
            except (ConfigError, InvalidRequest) as error:
                said = error.message
            assert not re.search("0x[0-9a-f]{6,}", said.lower() + said.lower()[::-1]), (written, value, said)
