"""The `input` of a response: items of a conversation, and the chat messages that they become for the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.router.bodies.ignored_fields import IgnoredFields
from pdserve.router.bodies.request_body import MAX_CONTAINERS, convert_part, shown
from pdserve.text.templates.tool_prompt import parsed_arguments

FIELD = "input"
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_TYPES = ("input_text", "output_text", "text")


class _Item(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str = "message"
    id: str | None = None
    status: str | None = None


class MessageItem(_Item, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | list[dict[str, Any]]
    phase: str | None = None


class FunctionCallItem(_Item, forbid_unknown_fields=True, kw_only=True):
    call_id: str
    name: str
    arguments: str
    parsed_arguments: Any = None
    """The client library's own reading of `arguments`; without effect."""


class FunctionCallOutputItem(_Item, forbid_unknown_fields=True, kw_only=True):
    call_id: str
    output: str | list[dict[str, Any]]


class ReasoningItem(_Item, forbid_unknown_fields=True, kw_only=True):
    summary: list[dict[str, Any]] = []
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


KINDS: Mapping[str, type[_Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}


class _TextPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    text: str
    annotations: list[Any] | None = None
    parsed: Any = None
    """The client library's own reading of `text`; without effect."""
    logprobs: list[Any] | None = None


class _RefusalPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    refusal: str


def as_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of an `input`; a string is a user's message."""
    if isinstance(given, list):
        return given
    return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]


def as_messages(
    items: Sequence[Mapping[str, Any]],
    instructions: str | None = None,
    *,
    num_before: int = 0,
    ignored: IgnoredFields | None = None,
) -> list[dict[str, Any]]:
    """Chat messages of a conversation.

    num_before: items of earlier responses at the beginning, which errors do not count. ignored: as in `parse_body`.
    Raises: InvalidRequest naming the item and its field.
    """
    messages = _Messages(instructions, ignored)
    for place, item in enumerate(items):
        where = f"{FIELD}[{place - num_before}]" if place >= num_before else f"previous_response_id, item {place}"
        messages.add(item, where)
    return messages.all


class _Messages:
    """Collects messages.

    System messages at the beginning are one, since many templates know only one, and `developer` is `system` to them. A call
    belongs to the assistant's message directly before it, if there is one; reasoning to the assistant's message after it.
    """

    def __init__(self, instructions: str | None, ignored: IgnoredFields | None) -> None:
        self._messages: list[dict[str, Any]] = []
        self._system = [instructions] if instructions else []
        self._ignored = ignored
        self._reasoning: list[str] = []
        self._call_ids: set[str] = set()
        self._num_containers = 0
        """Objects and arrays in arguments, at most."""

    @property
    def all(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": "\n\n".join(self._system)}] if self._system else []
        return system + self._messages

    def add(self, item: Mapping[str, Any], where: str) -> None:
        """Raises: InvalidRequest."""
        match _typed(item, where, self._ignored):
            case MessageItem(role=role, content=content):
                self._add_message(role, content, where)
            case FunctionCallItem() as call:
                self._add_call(call, where)
            case FunctionCallOutputItem(call_id=call_id, output=output):
                if call_id not in self._call_ids:
                    raise InvalidRequest(
                        f"{where}.call_id is {shown(call_id)}, but no function_call before it has this call_id", FIELD
                    )
                text = self._text(output, f"{where}.output")
                self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case ReasoningItem(content=list() as content):
                self._reasoning.append(self._text(content, f"{where}.content"))

    def _add_message(self, role: str, content: str | list[dict[str, Any]], where: str) -> None:
        if role not in _ROLES:
            raise InvalidRequest(f"{where}.role is {shown(role)}, one of {', '.join(_ROLES)} is needed", FIELD)
        text = self._text(content, f"{where}.content")
        if role == "assistant":
            self._add_assistant(text)
            return
        if role == "user":
            self._messages.append({"role": "user", "content": text})
        elif not self._messages:
            self._system.append(text)
        else:
            self._messages.append({"role": "system", "content": text})

    def _add_assistant(self, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        if self._reasoning:
            message["reasoning_content"] = "\n".join(self._reasoning)
            self._reasoning = []
        self._messages.append(message)
        return message

    def _add_call(self, call: FunctionCallItem, where: str) -> None:
        self._num_containers += call.arguments.count("{") + call.arguments.count("[")
        if self._num_containers > MAX_CONTAINERS:
            raise InvalidRequest(
                f"{where}.arguments has with those before it more than {MAX_CONTAINERS} objects and arrays", FIELD
            )
        parsed = parsed_arguments(call.arguments)
        # how a text that is no object is told depends on the template
        arguments = call.arguments if parsed is None else parsed
        last = self._messages[-1] if self._messages and not self._reasoning else {}
        if last.get("role") != "assistant":
            last = self._add_assistant("")
        function = {"name": call.name, "arguments": arguments}
        last.setdefault("tool_calls", []).append({"id": call.call_id, "type": "function", "function": function})
        self._call_ids.add(call.call_id)

    def _text(self, content: str | list[dict[str, Any]], where: str) -> str:
        if isinstance(content, str):
            return content
        return "\n".join(self._part(part, f"{where}[{place}]") for place, part in enumerate(content))

    def _part(self, part: dict[str, Any], where: str) -> str:
        kind = part.get("type")
        if kind == "refusal":
            return convert_part(_without_nulls(part), _RefusalPart, where, self._ignored).refusal
        if kind not in (*_TEXT_TYPES, "reasoning_text"):
            raise InvalidRequest(f"{where}.type is {shown(kind)}; this model takes only text", FIELD)
        return convert_part(_without_nulls(part), _TextPart, where, self._ignored).text


def _without_nulls(given: Mapping[str, Any]) -> dict[str, Any]:
    """A client library writes null for each field that it knows and that an item of an answer does not have."""
    return {name: value for name, value in given.items() if value is not None}


def _typed(item: Mapping[str, Any], where: str, ignored: IgnoredFields | None) -> _Item:
    """The type is checked first, so that an item of another type is refused by its name and not by that of a field."""
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in KINDS:
        raise InvalidRequest(f"{where}.type is {shown(kind)}, one of {', '.join(KINDS)} is needed", FIELD)
    return convert_part({**_without_nulls(item), "type": kind}, KINDS[kind], where, ignored)


def page_of_items(
    response_id: str, items: Sequence[Mapping[str, Any]], *, limit: int, after: str | None, is_newest_first: bool
) -> dict[str, Any]:
    """A page of a stored response's input. after: id of the item before the page. Raises: InvalidRequest for an unknown one."""
    listed = [_listed(item, f"{response_id.removeprefix('resp_')}_{place}") for place, item in enumerate(items)]
    if is_newest_first:
        listed.reverse()
    first = 0
    if after is not None:
        place = next((place for place, item in enumerate(listed) if item["id"] == after), None)
        if place is None:
            raise InvalidRequest(f"after is {shown(after)}, which is no item of this response", "after")
        first = place + 1
    page = listed[first : first + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": first + limit < len(listed),
    }


def _listed(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    """An item with an id, and with parts where it has a text. place: tells it from all others."""
    kind = item.get("type") or "message"
    listed = {"status": "completed", **item, "type": kind, "id": item.get("id") or f"{_ID_PREFIXES[kind]}_{place}"}
    if kind == "message" and isinstance(text := item.get("content"), str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        listed["content"] = [{"type": part, "text": text, **({"annotations": []} if part == "output_text" else {})}]
    return listed
