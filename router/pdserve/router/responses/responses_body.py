"""`ResponsesBody`: the body of `POST /v1/responses`, and the request that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_STRINGS
from pdserve.router.bodies.ignored_fields import IgnoredFields
from pdserve.router.bodies.request_body import convert_part, shown
from pdserve.router.openai.caller_fields import verify_caller
from pdserve.router.openai.no_op_fields import RESPONSES_NO_OP, verify_neutral
from pdserve.router.openai.response_format import of_schema
from pdserve.router.openai.shared_body import SharedBody
from pdserve.router.requests.fields.chat_fields import verify_effort
from pdserve.router.requests.fields.output_constraint import OutputConstraint
from pdserve.router.requests.fields.request_limits import MAX_MESSAGES, MAX_METADATA
from pdserve.router.requests.fields.tools import (
    MAX_TOOLS,
    FunctionBody,
    NamedFunction,
    NamedTool,
    ToolBody,
    ToolUse,
    tool_use,
)
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.router.responses.input_items import as_items, as_messages
from pdserve.text.parsers.tool_call_parser import HERMES_CALLS, ForcedCalls
from pdserve.text.prompt import ChatInput

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""The second has no effect: reasoning is returned as text, and taken as text."""
_FORMATS = ("text", "json_object", "json_schema")


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    """No effect: the answer always follows the schema."""
    description: str | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    effort: str | None = None
    """The variable `reasoning_effort` of the chat template."""
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_obfuscation: bool | None = None
    """No effect: events have no padding."""


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; None for a function without parameters."""
    strict: bool | None = None
    """No effect: arguments of forced calls always follow the schema."""


class _ChosenTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    name: str


class _AllowedTools(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    mode: str
    tools: list[dict[str, Any]]


class ResponsesBody(SharedBody, forbid_unknown_fields=True, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    """None means true."""
    previous_response_id: str | None = None
    stream_options: ResponsesStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # accepted, and without effect
    max_tool_calls: int | None = None
    # known, but only with the value that changes nothing
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None
    truncation: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report with each; None for no log-probabilities."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    def verify(self) -> None:
        """Check values and sizes before anything is built from them. Raises: InvalidRequest."""
        verify_neutral(self, RESPONSES_NO_OP)
        for field, most, entries in (
            ("input", MAX_MESSAGES, self.input),
            ("tools", MAX_TOOLS, self.tools),
            ("metadata", MAX_METADATA, self.metadata),
            ("include", len(_INCLUDED), self.include),
            ("stop", MAX_STOP_STRINGS, self.stop),
            ("logit_bias", MAX_LOGIT_BIASES, self.logit_bias),
        ):
            if isinstance(entries, list | dict) and len(entries) > most:
                raise InvalidRequest(f"{field} has {len(entries)} entries, at most {most} are allowed", field)
        verify_caller(self)
        if not self.input:
            raise InvalidRequest("input is empty, a text or at least one item is needed", "input")
        for wanted in self.include or ():
            if wanted not in _INCLUDED:
                known = " and ".join(map(shown, _INCLUDED))
                raise InvalidRequest(f"include has {shown(wanted)}, only {known} are supported", "include")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", "stream_options")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise InvalidRequest(
                f"max_output_tokens must be at least 1, not {self.max_output_tokens}", "max_output_tokens"
            )
        if self.top_logprobs and self.num_logprobs is None:
            raise InvalidRequest(f"top_logprobs needs {shown(LOGPROBS)} in include", "top_logprobs")

    def request(
        self,
        defaults: Mapping[str, float | int],
        call: CallFields,
        before: list[dict[str, Any]],
        ignored: IgnoredFields | None = None,
        forced_calls: ForcedCalls = HERMES_CALLS,
    ) -> ClientRequest:
        """The request, after `verify`. Raises: InvalidRequest.

        defaults: sampling parameters in place of absent fields. before: the conversation of `previous_response_id`. ignored: as in
        `parse_body`. forced_calls: texts around the calls that `tool_choice` forces.
        """
        items = [*before, *as_items(self.input)]
        if len(items) > MAX_MESSAGES:
            raise InvalidRequest(
                f"previous_response_id and input have {len(items)} items together, at most {MAX_MESSAGES} are allowed",
                "previous_response_id",
            )
        tools = self._tool_use(ignored, forced_calls)
        form = self._form().forced(tools.form)
        form.verify()
        messages = as_messages(items, self.instructions, num_before=len(before), ignored=ignored)
        return ClientRequest(
            prompt=ChatInput(messages, template_variables=self._template_variables(), tools=tools.tools),
            field="input",
            sampling_params=self.sampling(defaults, form),
            constraint_field=form.field,
            max_tool_calls=tools.max_calls,
            max_tokens=self.max_output_tokens,
            max_tokens_field="max_output_tokens",
            logprobs_field="top_logprobs",
            **self.request_fields(call),
        )

    def _tool_use(self, ignored: IgnoredFields | None, forced_calls: ForcedCalls) -> ToolUse:
        """Raises: InvalidRequest."""
        tools = [
            ToolBody(function=FunctionBody(**{name: getattr(tool, name) for name in FunctionBody.__struct_fields__}))
            for place, given in enumerate(self.tools or ())
            for tool in (_function(given, FunctionTool, f"tools[{place}]", ignored),)
        ]
        choice: str | NamedTool | None
        if isinstance(self.tool_choice, dict) and self.tool_choice.get("type") == "allowed_tools":
            allowed = convert_part(self.tool_choice, _AllowedTools, "tool_choice", ignored)
            tools, choice = _only(tools, allowed, ignored), allowed.mode
        elif isinstance(self.tool_choice, dict):
            chosen = _function(self.tool_choice, _ChosenTool, "tool_choice", ignored)
            choice = NamedTool(function=NamedFunction(name=chosen.name))
        else:
            choice = self.tool_choice
        return tool_use(tools, choice, self.parallel_tool_calls, forced_calls, "name")

    def _form(self) -> OutputConstraint:
        """The constraint of `text.format` or `structured_outputs`. Raises: InvalidRequest."""
        by_format, own = self._form_of_text(), self.structured_outputs
        if own is None:
            return by_format
        if by_format.params is None:
            return OutputConstraint(own)
        if own.constraints:
            raise InvalidRequest("text.format and structured_outputs both ask for a form", "text.format")
        return by_format._replace(params=by_format.params.with_options_of(own))

    def _form_of_text(self) -> OutputConstraint:
        given = None if self.text is None else self.text.format
        if given is None or given.type == "text":
            return OutputConstraint()
        field = "text.format"
        if given.type not in _FORMATS:
            raise InvalidRequest(f"{field}.type is {shown(given.type)}, one of {', '.join(_FORMATS)} is needed", field)
        if given.type == "json_object":
            return OutputConstraint(of_schema(given.type, None, field), field)
        for name in ("name", "schema"):
            if getattr(given, name) is None:
                raise InvalidRequest(f"{field}.{name} is missing", f"{field}.{name}")
        return OutputConstraint(of_schema(given.name or "", given.schema, field), field)

    def _template_variables(self) -> dict[str, Any]:
        """Variables for the chat template; `chat_template_kwargs` come last. Raises: InvalidRequest."""
        named = {}
        if self.reasoning is not None and (effort := self.reasoning.effort) is not None:
            verify_effort(effort, "reasoning.effort")
            named["reasoning_effort"] = effort
        return named | (self.chat_template_kwargs or {})


def _only(tools: list[ToolBody], allowed: _AllowedTools, ignored: IgnoredFields | None) -> list[ToolBody]:
    """The allowed ones of the tools. Raises: InvalidRequest."""
    if allowed.mode not in ("auto", "required"):
        raise InvalidRequest(
            f"tool_choice.mode is {shown(allowed.mode)}, one of auto, required is needed", "tool_choice"
        )
    if not 0 < len(allowed.tools) <= MAX_TOOLS:
        raise InvalidRequest(
            f"tool_choice.tools has {len(allowed.tools)} entries, 1 to {MAX_TOOLS} are allowed", "tool_choice"
        )
    wanted = {}
    known = {tool.function.name for tool in tools}
    for place, given in enumerate(allowed.tools):
        name = _function(given, _ChosenTool, f"tool_choice.tools[{place}]", ignored).name
        if name not in known:
            raise InvalidRequest(
                f"tool_choice.tools[{place}] names the function {shown(name)}, which is not among the tools",
                "tool_choice",
            )
        wanted[name] = True
    return [tool for tool in tools if tool.function.name in wanted]


def _function(given: Mapping[str, Any], kind: Any, where: str, ignored: IgnoredFields | None) -> Any:
    """A tool, or the choice of one, as `kind`. A type that is not served is refused before its fields are read."""
    if "type" in given and given["type"] != "function":
        raise InvalidRequest(
            f"{where}.type is {shown(given['type'])}, only 'function' is supported", where.partition("[")[0]
        )
    return convert_part(given, kind, where, ignored)
