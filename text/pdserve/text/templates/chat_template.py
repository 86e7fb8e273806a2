"""`ChatTemplate`: turns chat messages into a prompt's text by the model's own Jinja template, in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.utils import Namespace

from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.text.images.chat_images import ImagePart
from pdserve.text.templates.template_budget import MAX_VALUE_CHARS, BudgetedEnvironment, TemplateTooCostly, rendering
from pdserve.text.templates.tool_prompt import as_plain_text, with_parsed_calls
from pdserve.text.tokenization.literal_specials import hidden_in

FIELD = "messages"
_MAX_DEPTH = 64
_MARK_BYTES = 16
"""Random bytes that mark the end of a message; no client can know them."""
_REASON_CHARS = 120
"""Characters of a template's error that are shown; the error may repeat the messages."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""The address of an object in memory, as Python writes it."""


class ChatTemplate:
    """One compiled template. Rendering is safe from any thread, and limited in time and memory (`template_budget.py`).

    Source: the environment (whitespace control, filters, globals, `generation` blocks) is that of transformers'
    `apply_chat_template`, so that a model's template gives the text that the model was trained on.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], origin: str, name: str = "the model's chat template"
    ) -> None:
        """special_tokens: variables such as `bos_token`. origin: the template's file, for operators' messages. name: the template's
        name in messages to clients.

        Raises: ConfigError if the template does not compile.
        """
        self._name = name
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        self._functions = frozenset(environment.globals)
        try:
            self._template = environment.from_string(source)
            self._knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{origin}: chat template, line {error.lineno}: {error.message!s:.300}") from error
        except Exception as error:
            # jinja2 translates the template to Python and compiles it; an expression may nest too deeply for either step
            kind = type(error).__name__
            raise ConfigError(f"{origin}: the chat template does not compile: {kind}: {error!s:.200}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        hide: Callable[[str], str] | None = None,
    ) -> str:
        """The prompt's text.

        continue_final_message: end the text with the content of the last message, which the model then continues.
        tools: as in OpenAI's API; they are written into the system message if the template does not use tools.
        variables: the client's variables for this template, such as `enable_thinking`.
        hide: applied to every string of the client before it reaches the template.
        Raises: InvalidRequest if the messages are malformed, the template refuses them, or rendering exceeds its budget.
        """
        plain = with_parsed_calls(
            [plain_message(message, place) for place, message in enumerate(messages)], keeps_text=not self._knows_tools
        )
        self._verify_names(variables or {})
        named, tools = _plain(dict(variables or {}), "chat_template_kwargs"), _plain(tools, "tools")
        if hide is not None:
            plain, tools = hidden_in(plain, hide), hidden_in(tools, hide)
            named = {name: hidden_in(value, hide) for name, value in named.items()}
        mark = secrets.token_hex(_MARK_BYTES) if continue_final_message and plain else ""
        if mark and not isinstance(plain[-1]["content"], str):
            raise InvalidRequest(
                "continue_final_message is true, and the last message has images", "continue_final_message"
            )
        if mark:
            plain[-1]["content"] += mark
        given = {
            "documents": None,
            **named,
            # set after the client's variables, so that a client cannot replace them
            **self._special_tokens,
            "messages": plain if self._knows_tools else as_plain_text(plain, tools),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        if not given["messages"]:
            raise InvalidRequest("messages must hold at least one message", FIELD)
        try:
            with rendering():
                text = self._template.render(given)
        except TemplateTooCostly as error:
            raise InvalidRequest(f"{self._name} needs too much for these messages: {error}", FIELD) from error
        except Exception as error:
            # a template is a program over the client's values, so any exception is an error of this request
            reason = f"{_ADDRESS.sub('', str(error)):.{_REASON_CHARS}}"
            raise InvalidRequest(f"{self._name} refused the messages: {reason}", FIELD) from error
        if len(text) > MAX_VALUE_CHARS:
            raise InvalidRequest(
                f"{self._name} makes {len(text)} characters of the messages, at most {MAX_VALUE_CHARS} are allowed",
                FIELD,
            )
        return _until_mark(text, mark) if mark else text

    def _verify_names(self, variables: Mapping[str, Any]) -> None:
        """Raises: InvalidRequest for a variable with the name of a template function."""
        for name in variables:
            if name in self._functions:
                raise InvalidRequest(
                    f"chat_template_kwargs has {name!r}, which is a function of chat templates and cannot be replaced",
                    "chat_template_kwargs",
                )


def _until_mark(text: str, mark: str) -> str:
    """The text before the last `mark`, without other marks. Raises: InvalidRequest if there is none."""
    before, found, _ = text.rpartition(mark)
    if not found:
        raise InvalidRequest(
            "continue_final_message is true, but the model's chat template leaves out the content of the last message",
            "continue_final_message",
        )
    return before.replace(mark, "")


def plain_message(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    """One message in plain JSON types, its content flattened to one string, as text-only templates expect.

    Text parts are joined by newlines (as vLLM does); absent content becomes empty. A null field is dropped, since clients send back
    the messages of answers with all of their fields. Other fields pass through. The content of a message with images
    (`chat_images.py`) remains a list of parts.
    Raises: InvalidRequest naming a part's type that is not text, or a malformed field.
    """
    where = f"{FIELD}[{place}]"
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object, not {type(message).__name__}", FIELD)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role must be a non-empty string, not {role!r:.80}", FIELD)
    plain: dict[str, Any] = _plain({name: value for name, value in message.items() if value is not None}, where)
    given = message.get("content")
    if isinstance(given, list) and any(isinstance(part, ImagePart) for part in given):
        plain["content"] = _parts(given, f"{where}.content")
    else:
        plain["content"] = _flatten(plain.get("content"), f"{where}.content")
    return plain


def _parts(content: list[Any], where: str) -> list[dict[str, str]]:
    """Parts of a message with images, as templates of models with images expect them."""
    return [
        dict(part) if isinstance(part, ImagePart) else {"type": "text", "text": _part_text(part, f"{where}[{place}]")}
        for place, part in enumerate(content)
    ]


def _flatten(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts, not {type(content).__name__}", FIELD)
    return "\n".join(_part_text(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise InvalidRequest(f"{where} has type {kind!r:.80}; this model takes only text", FIELD)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string, not {type(text).__name__}", FIELD)
    return text


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy in exact JSON types, without subclasses, because the sandbox cannot check the methods of other types."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth >= _MAX_DEPTH:
        raise InvalidRequest(f"{where} is nested deeper than {_MAX_DEPTH} levels", where.partition("[")[0])
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    raise InvalidRequest(f"{where} holds a {type(value).__name__}, which is not a JSON value", where.partition("[")[0])


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks a training mask; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _GuardedNamespace(Namespace):
    """Jinja's `namespace()`, without names that give access to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # no named first parameter, so that a template may store the key `self`
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_internal(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_internal(name)
        super().__setitem__(name, value)


def _refuse_internal(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not hold {name!r}")


def _environment() -> BudgetedEnvironment:
    environment = BudgetedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_new_dict, namespace=_GuardedNamespace
    )
    environment.measure_filters()
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as in the models' training data; Jinja's own filter escapes `<`, `>` and `&` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """A new dict. A function and not the type `dict`, because a template could read the type's attributes."""
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
