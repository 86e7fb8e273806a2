"""`OutputItems`: the items of one answer, and the events by which they come about."""

from __future__ import annotations

import uuid
from typing import Any

from pdserve.text.parsers.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta

_PREFIXES = {
    TextDelta: "response.output_text",
    ReasoningDelta: "response.reasoning_text",
    ToolCallDelta: "response.function_call_arguments",
}


class OutputItems:
    """Text is a message, and so are reasoning and each call an item of their own; a delta of another kind begins the next item."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        """Without the one that is open."""
        self._kind: type[Delta] | None = None
        """Kind of the open item; None if none is."""
        self._item: dict[str, Any] = {}
        self._pieces: list[str] = []

    @property
    def is_text(self) -> bool:
        """True if text may follow without a further item after one of another kind: a message is open, or there is no item yet."""
        return self._kind is TextDelta or (self._kind is None and not self.items)

    def add(self, delta: Delta, logprobs: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Events of new output, without their numbers. logprobs: of a text."""
        events: list[dict[str, Any]] = []
        if delta.name is not None if isinstance(delta, ToolCallDelta) else type(delta) is not self._kind:
            events += self.close("completed")
            events += self._open(delta)
        piece = delta.arguments if isinstance(delta, ToolCallDelta) else delta.text
        if piece or logprobs:
            self._pieces.append(piece)
            more: dict[str, Any] = {"logprobs": logprobs or []} if isinstance(delta, TextDelta) else {}
            events.append(self._event("delta", delta=piece, **more))
        return events

    def close(self, status: str) -> list[dict[str, Any]]:
        """Events of the end of the open item, if there is one."""
        kind, item, content = self._kind, self._item, "".join(self._pieces)
        if kind is None:
            return []
        item["status"] = status
        if kind is ToolCallDelta:
            item["arguments"] = content
            events = [self._event("done", arguments=content, name=item["name"])]
        else:
            part = _part(kind, content)
            item["content"] = [part]
            more: dict[str, Any] = {"logprobs": []} if kind is TextDelta else {}
            events = [
                self._event("done", text=content, **more),
                self._part_event("response.content_part.done", part),
            ]
        events.append({"type": "response.output_item.done", "output_index": len(self.items), "item": item})
        self.items.append(item)
        self._kind, self._item, self._pieces = None, {}, []
        return events

    def _open(self, delta: Delta) -> list[dict[str, Any]]:
        self._kind, self._item = type(delta), _new_item(delta)
        added = {"type": "response.output_item.added", "output_index": len(self.items), "item": dict(self._item)}
        if isinstance(delta, ToolCallDelta):
            return [added]
        return [added, self._part_event("response.content_part.added", _part(type(delta), ""))]

    def _event(self, verb: str, **fields: Any) -> dict[str, Any]:
        """An event about the text, reasoning or arguments of the open item."""
        place: dict[str, Any] = {"item_id": self._item["id"], "output_index": len(self.items)}
        if self._kind is not ToolCallDelta:
            place["content_index"] = 0
        kind = _PREFIXES[self._kind or TextDelta]
        return {"type": f"{kind}.{verb}", **place, **fields}

    def _part_event(self, name: str, part: dict[str, Any]) -> dict[str, Any]:
        place = {"item_id": self._item["id"], "output_index": len(self.items), "content_index": 0}
        return {"type": name, **place, "part": part}


def _new_item(delta: Delta) -> dict[str, Any]:
    drawn = uuid.uuid4().hex
    if isinstance(delta, ToolCallDelta):
        return {
            "id": f"fc_{drawn}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": f"call_{drawn}",
            "name": delta.name,
            "arguments": "",
        }
    if isinstance(delta, ReasoningDelta):
        return {"id": f"rs_{drawn}", "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
    return {"id": f"msg_{drawn}", "type": "message", "status": "in_progress", "role": "assistant", "content": []}


def _part(kind: type[Delta], text: str) -> dict[str, Any]:
    """The only part of a message or of reasoning."""
    if kind is ReasoningDelta:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
