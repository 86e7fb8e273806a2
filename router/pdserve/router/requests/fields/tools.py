"""`tools` and `tool_choice` of a chat: their checks, and the constraint of the answer that they require."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.router.bodies.request_body import writing
from pdserve.text.parsers.tool_call_parser import HERMES_CALLS, ForcedCalls

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = ("none", "auto", "required")


class FunctionBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; None for a function without parameters."""
    strict: bool | None = None
    """No effect: arguments of forced calls always follow the schema."""


class ToolBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    function: FunctionBody
    type: str = "function"

    def as_json(self) -> dict[str, Any]:
        """The fields that the client sent, in the form for chat templates."""
        given = {name: value for name, value in msgspec.structs.asdict(self.function).items() if value is not None}
        return {"type": self.type, "function": given}


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    function: NamedFunction
    type: str = "function"


class ToolUse(NamedTuple):
    """The effect of a chat's tools on prompt and output."""

    tools: list[dict[str, Any]]
    """Tools for the prompt; if empty, the answer is not parsed for calls."""
    form: StructuredOutputsParams | None = None
    """The form of the output; None if the model may choose."""
    max_calls: int | None = None


def tool_use(
    tools: Sequence[ToolBody] | None,
    choice: str | NamedTool | None,
    parallel: bool | None,
    written: ForcedCalls = HERMES_CALLS,
    name_path: str = "function.name",
) -> ToolUse:
    """Check the fields of a chat. parallel: None means true. written: texts around forced calls. name_path: path of a tool's name.

    Raises: InvalidRequest.
    """
    names = _verified_names(tools or (), name_path)
    if isinstance(choice, str) and choice not in _CHOICES:
        told = f"tool_choice is {choice[:40]!r}, one of {', '.join(_CHOICES)} or a function is needed"
        raise InvalidRequest(told, "tool_choice")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice asks for a call, but there are no tools", "tool_choice")
        return ToolUse([])
    if choice == "none":
        return ToolUse([])
    rendered = [tool.as_json() for tool in tools]
    max_calls = 1 if parallel is False else None
    if choice is None or choice == "auto":
        return ToolUse(rendered, None, max_calls)
    if isinstance(choice, NamedTool):
        _verify_type(choice.type, "tool_choice")
        name = choice.function.name
        if name not in names:
            raise InvalidRequest(
                f"tool_choice names the function {name[:80]!r}, which is not among the tools", "tool_choice"
            )
        return ToolUse(rendered, _forced([tools[names.index(name)].function], written, only_one=True), 1)
    functions = [tool.function for tool in tools]
    return ToolUse(rendered, _forced(functions, written, only_one=max_calls == 1), max_calls)


def _verified_names(tools: Sequence[ToolBody], name_path: str) -> list[str]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries, at most {MAX_TOOLS} are allowed", "tools")
    names: list[str] = []
    for place, tool in enumerate(tools):
        _verify_type(tool.type, f"tools[{place}]")
        name = tool.function.name
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"tools[{place}].{name_path} is {name[:80]!r}, "
                "1 to 64 letters, digits, underscores and hyphens are needed",
                "tools",
            )
        if name in names:
            raise InvalidRequest(f"tools[{place}].{name_path} is {name!r} again", "tools")
        names.append(name)
    return names


def _verify_type(kind: str, where: str) -> None:
    if kind != "function":
        raise InvalidRequest(f"{where}.type is {kind[:40]!r}, only 'function' is supported", where.partition("[")[0])


def _forced(functions: Sequence[FunctionBody], written: ForcedCalls, *, only_one: bool) -> StructuredOutputsParams:
    """A structural tag that allows only calls of these functions."""
    tags = [
        {
            "type": "tag",
            "begin": written.begin % function.name,
            "content": {"type": "json_schema", "json_schema": function.parameters or {"type": "object"}},
            "end": written.end,
        }
        for function in functions
    ]
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": written.separator,
        "at_least_one": True,
        "stop_after_first": only_one,
    }
    if written.opener:
        around = [{"type": "const_string", "value": text} for text in (written.opener, written.closer)]
        calls = {"type": "sequence", "elements": [around[0], calls, around[1]]}
    with writing("tools"):
        return StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": calls}))
