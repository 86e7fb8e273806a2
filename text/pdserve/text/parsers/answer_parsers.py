"""`AnswerParsers`: which parsers a deployment has for its model's answers; `AnswerParser` parses one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdserve.common.errors import ConfigError
from pdserve.text.parsers.deltas import Delta, TextDelta, joined
from pdserve.text.parsers.reasoning_parser import REASONING_TAGS, ReasoningParser, ReasoningTags
from pdserve.text.parsers.tool_call_parser import HERMES_CALLS, TOOL_FORMATS, ForcedCalls, ToolCallParser, ToolFormat
from pdserve.text.tokenization.tokenizer import Tokenizer

_CALLS_IN_TEMPLATES = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ('{"name": function name, "parameters":', "llama3_json"),
    ("<|python_tag|>", "llama3_json"),
    ("[func_name1(", "pythonic"),
    ("<|python_start|>", "pythonic"),
)
"""(text in a chat template, the parser of the calls that it asks for); the first that is found counts."""
_REASONING_IN_TEMPLATES = (("</think>", "qwen3"), ("[/THINK]", "mistral"), ("</seed:think>", "seed_oss"))
_PROMPT_END_TOKENS = 32
"""Tokens at the end of a prompt among which the opening tag of reasoning is looked for."""


class AnswerParser:
    """Parses the text of one choice: reasoning first, then calls of tools in the rest."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolCallParser | None) -> None:
        self.reasoning = reasoning
        self.tools = tools

    def feed(self, text: str, *, is_last: bool, is_cut: bool = False) -> list[Delta]:
        """New output from the next piece of text. is_last: the text ends with it. is_cut: and the model had not ended it."""
        if self.reasoning is None:
            parts: list[Delta] = [TextDelta(text)] if text else []
        else:
            parts = [*self.reasoning.feed(text), *(self.reasoning.flush() if is_last else ())]
        if self.tools is None:
            return joined(parts)
        deltas: list[Delta] = []
        for part in parts:
            deltas += self.tools.feed(part.text) if isinstance(part, TextDelta) else [part]
        return joined(deltas + (self.tools.flush(is_cut=is_cut) if is_last else []))

    @property
    def ends_with_calls(self) -> bool:
        """True if there is a call, and the text so far does not end within one."""
        return self.tools is not None and self.tools.num_calls > 0 and not self.tools.is_in_call


@dataclass(frozen=True)
class AnswerParsers:
    """Made once per router."""

    tool_format: ToolFormat | None
    """None: calls remain text."""
    reasoning_tags: ReasoningTags | None
    """None: reasoning remains text."""
    tokenizer: Tokenizer

    @classmethod
    def of(cls, tokenizer: Tokenizer, tool_call_parser: str, reasoning_parser: str) -> AnswerParsers:
        """The parsers that the settings of these names ask for. Raises: ConfigError for an unknown name."""
        if tool_call_parser == "auto":
            tool_call_parser = _named_by(_CALLS_IN_TEMPLATES, tokenizer.tool_template_source) or "hermes"
        if reasoning_parser == "auto":
            source = tokenizer.chat_template_source
            reasoning_parser = _named_by(_REASONING_IN_TEMPLATES, source) or "none"
        tool_format = None if tool_call_parser == "none" else TOOL_FORMATS.get(tool_call_parser)
        if tool_format is None and tool_call_parser != "none":
            raise ConfigError(
                f"tool_call_parser is {tool_call_parser!r:.80}, one of auto, none, {', '.join(TOOL_FORMATS)} is needed"
            )
        return cls(tool_format, _reasoning_tags(reasoning_parser), tokenizer)

    @property
    def forced_calls(self) -> ForcedCalls:
        """Texts that a grammar writes around forced calls: the model's own, or those of Hermes where no grammar can write them."""
        return (self.tool_format.forced if self.tool_format is not None else None) or HERMES_CALLS

    @property
    def forced_format(self) -> ToolFormat:
        """The form of an answer of forced calls."""
        own = self.tool_format
        if own is None or own.forced is None:
            return TOOL_FORMATS["hermes"]
        return replace(own, opener=own.forced.opener or own.opener)

    def has_special_markers(self, tool_format: ToolFormat | None, tags: ReasoningTags | None) -> bool:
        """True if some text that these need is a special token, which `skip_special_tokens` leaves out of answers."""
        needed = () if tool_format is None else tool_format.markers
        return any(self.tokenizer.is_special(text) for text in (*needed, *(tags or ())))

    def opens_reasoning(self, prompt_token_ids: list[int] | None) -> bool:
        """True if the prompt ends with the opening tag, as some chat templates write it."""
        if self.reasoning_tags is None or not prompt_token_ids:
            return False
        end = self.tokenizer.decode(prompt_token_ids[-_PROMPT_END_TOKENS:], skip_special_tokens=False)
        return end.rstrip().endswith(self.reasoning_tags.begin)


def _named_by(table: tuple[tuple[str, str], ...], source: str) -> str | None:
    return next((name for text, name in table if text in source), None)


def _reasoning_tags(name: str) -> ReasoningTags | None:
    """Raises: ConfigError."""
    if name == "none":
        return None
    if (tags := REASONING_TAGS.get(name)) is not None:
        return tags
    if len(name) > 2 and name[0] + name[-1] in ("<>", "[]"):
        return ReasoningTags(name, f"{name[0]}/{name[1:]}")
    raise ConfigError(
        f"reasoning_parser is {name!r:.80}, one of auto, none, {', '.join(REASONING_TAGS)} or an opening tag in angle or "
        "square brackets is needed"
    )
