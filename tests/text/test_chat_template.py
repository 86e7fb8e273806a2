"""Chat templates: where they stand, what they see, and whose fault an error is."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.text.templates.chat_template import ChatTemplate
from pdserve.text.tokenization.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, Any]] = HELLO, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, "test").render(messages, **options)


def folder_with(folder: Path, backend: Backend, template: object = None, jinja: str | None = None) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    return Tokenizer.from_folder(folder)


def test_template_of_tokenizer_config(byte_level_tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "be brief"}, *HELLO]
    text = byte_level_tokenizer.apply_chat_template(messages)
    assert text == "<s><|system|>be brief</s>\n<|user|>hello</s>\n<|assistant|>"
    assert byte_level_tokenizer.apply_chat_template(HELLO, add_generation_prompt=False) == "<s><|user|>hello</s>\n"
    assert byte_level_tokenizer.encode(text, add_special_tokens=False)[0] == byte_level_tokenizer.bos_token_id


TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<new>{% endif %}"
)
BEGUN = [*HELLO, {"role": "assistant", "content": "So far </s> "}]


def test_the_final_message_stays_open() -> None:
    open_turn = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(TURNS, BEGUN, **open_turn) == "<user>hello</s><assistant>So far </s> "
    # a template may change the content, and write it more than once
    assert render("{{ messages[-1].content | trim | upper | lower }}", BEGUN, **open_turn) == "so far </s> "
    twice = "{{ messages[-1].content }}-{{ messages[-1].content }}</s>"
    assert render(twice, BEGUN, **open_turn) == "So far </s> -So far </s> "
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(TURNS, parts, **open_turn) == "<assistant>a\nb"
    assert render(TURNS, [{"role": "assistant", "content": ""}], **open_turn) == "<assistant>"
    hidden = render(TURNS, BEGUN, hide=lambda text: text.replace("</s>", "#"), **open_turn)
    assert hidden.endswith("<assistant>So far # ")
    assert BEGUN[-1]["content"] == "So far </s> "


def test_a_template_without_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequest, match="leaves out the content of the last message") as refused:
        render("{{ messages[0].role }}", BEGUN, continue_final_message=True)
    assert refused.value.field == "continue_final_message"
    with pytest.raises(InvalidRequest, match="at least one message"):
        render(TURNS, [], continue_final_message=True)


def test_named_templates_take_default(tmp_path: Path, byte_level_backend: Backend) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D{{ bos_token }}"}]
    assert folder_with(tmp_path, byte_level_backend, named).apply_chat_template(HELLO) == "D<s>"


def test_a_file_of_its_own_goes_first(tmp_path: Path, byte_level_backend: Backend) -> None:
    assert folder_with(tmp_path, byte_level_backend, "old", jinja="new").apply_chat_template(HELLO) == "new"


def test_a_template_among_additional_ones(tmp_path: Path, byte_level_backend: Backend) -> None:
    """As in transformers: files go before tokenizer_config.json, and `tool_use` is for requests with tools."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "default.jinja").write_text("additional{{ bos_token }}")
    tokenizer = folder_with(tmp_path, byte_level_backend, "old")
    assert tokenizer.apply_chat_template(HELLO) == "additional<s>"
    (more / "tool_use.jinja").write_text("{% if tools %}tools{% endif %}")
    tokenizer = folder_with(tmp_path, byte_level_backend, "old", jinja="new")
    assert tokenizer.apply_chat_template(HELLO) == "additional<s>"
    assert tokenizer.apply_chat_template(HELLO, tools=tools) == "tools"
    (more / "default.jinja").unlink()
    assert folder_with(tmp_path, byte_level_backend, "old", jinja="new").apply_chat_template(HELLO) == "new"


@pytest.mark.few(2)
@pytest.mark.parametrize("template", [None, [], [{"name": "rag", "template": "R"}]])
def test_no_template_says_so(tmp_path: Path, byte_level_backend: Backend, template: object) -> None:
    tokenizer = folder_with(tmp_path, byte_level_backend, template)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.apply_chat_template(HELLO)
    assert caught.value.field == "messages"


def test_whitespace_loop_controls_and_generation_blocks():
    source = """
    {%- for m in messages %}
        {%- if loop.index > 2 %}{% break %}{% endif %}
        {%- generation %}[{{ m.content }}]{% endgeneration %}
    {%- endfor %}
    {% set x = 1 %}
end"""
    messages = [{"role": "user", "content": str(i)} for i in range(4)]
    assert render(source, messages) == "[0][1]end"


def test_filters_and_globals():
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hello"}]'
    assert render("{{ '<é>&' | tojson }}") == '"<é>&"'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'
    assert re.fullmatch(r"20\d\d", render("{{ strftime_now('%Y') }}"))
    assert render("{{ strftime_now('%Y-%m') }}") <= datetime.now().strftime("%Y-%m")
    assert render("{% set n = namespace(self=1) %}{% set n.a = n.self + 1 %}{{ n.a }}{{ dict(a=1)['a'] }}") == "21"
    assert render("{{ tools is none }}{{ enable_thinking }}", variables={"enable_thinking": False}) == "TrueFalse"
    assert render("{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"


def test_client_variables_replace_nothing_of_ours():
    source = "{{ messages[0].content }}{{ bos_token }}{{ tools }}{{ add_generation_prompt }}{{ documents[0] }}"
    variables = {"messages": [], "bos_token": "x", "tools": 1, "add_generation_prompt": False, "documents": [7]}
    assert render(source, variables=variables) == "hello<s>NoneTrue7"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ nothing.at.all }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ raise_exception.__globals__ }}{{ dict.__subclasses__() }}",
    ],
)
def test_a_template_that_stumbles_refuses_the_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refused the messages") as caught:
        render(source)
    assert caught.value.field == "messages"


def test_raise_exception_passes_its_words():
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_that_does_not_compile_is_a_config_error():
    with pytest.raises(ConfigError, match="test: chat template, line 2"):
        render("\n{% for %}")


def test_text_parts_become_one_string():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"
    assert render("[{{ messages[0].content }}]", [{"role": "assistant", "content": None}]) == "[]"
    assert render("{{ messages[0].name }}", [{"role": "user", "content": "x", "name": "Ann"}]) == "Ann"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "type 'image_url'"),
        ({"role": "user", "content": [{"text": "x"}]}, "type None"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\].text must be a string"),
        ({"role": "user", "content": [7]}, "type 'int'"),
        ({"role": "user", "content": 7}, "content must be a string or a list"),
        ({"content": "x"}, r"messages\[0\].role must be"),
        ({"role": "", "content": "x"}, r"messages\[0\].role must be"),
        ({"role": "user", "content": "x", "extra": object()}, "object, which is not a JSON value"),
        ("hello", r"messages\[0\] must be an object"),
    ],
)
def test_malformed_messages_are_named(message: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        render("{{ messages }}", [message])
    assert caught.value.field == "messages"


def test_no_messages_and_bottomless_ones():
    with pytest.raises(InvalidRequest, match="at least one"):
        render("x", [])
    nested: dict[str, Any] = {}
    for _ in range(5000):
        nested = {"a": nested}
    with pytest.raises(InvalidRequest, match="nested deeper"):
        render("x", [{"role": "user", "content": "x", "extra": nested}])
