"""`ChatFields`: the fields of a chat that make its prompt, for both front ends."""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.router.bodies.request_body import shown
from pdserve.router.requests.fields.request_limits import MAX_MESSAGES
from pdserve.router.requests.fields.tools import NamedTool, ToolBody, ToolUse, tool_use
from pdserve.text.parsers.tool_call_parser import ForcedCalls
from pdserve.text.prompt import ChatInput

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ChatFields(msgspec.Struct, kw_only=True):
    """Fields of a chat by OpenAI's and vLLM's names; None: not given."""

    messages: list[dict[str, Any]]
    tools: list[ToolBody] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None

    def prompt(self, forced_calls: ForcedCalls) -> tuple[ChatInput, ToolUse]:
        """The prompt, and the effect of the tools. forced_calls: texts around the calls that `tool_choice` forces.

        Raises: InvalidRequest naming the field.
        """
        if not self.messages:
            raise InvalidRequest("messages is empty, at least one message is needed", "messages")
        if len(self.messages) > MAX_MESSAGES:
            raise InvalidRequest(
                f"messages must be at most {MAX_MESSAGES} messages, not {len(self.messages)}", "messages"
            )
        use = tool_use(self.tools, self.tool_choice, self.parallel_tool_calls, forced_calls)
        verify_continuation(self.continue_final_message, self.add_generation_prompt)
        prompt = ChatInput(
            self.messages,
            self.add_generation_prompt is not False and not self.continue_final_message,
            self._template_variables(),
            tools=use.tools,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=bool(self.add_special_tokens),
        )
        return prompt, use

    def _template_variables(self) -> dict[str, Any]:
        """Variables for the chat template; `chat_template_kwargs` come last. Raises: InvalidRequest."""
        named: dict[str, Any] = {} if self.documents is None else {"documents": self.documents}
        if (effort := self.reasoning_effort) is not None:
            verify_effort(effort, "reasoning_effort")
            named["reasoning_effort"] = effort
        return named | (self.chat_template_kwargs or {})


def verify_effort(effort: str, field: str) -> None:
    """Raises: InvalidRequest."""
    if effort not in REASONING_EFFORTS:
        raise InvalidRequest(f"{field} is {shown(effort)}, one of {', '.join(REASONING_EFFORTS)} is needed", field)


def verify_continuation(continue_final_message: bool | None, add_generation_prompt: bool | None) -> None:
    """Raises: InvalidRequest for a chat that asks for both."""
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true: a prompt ends with one or the other",
            "continue_final_message",
        )
