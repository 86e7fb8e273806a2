"""`NamedCall`: reads one of Mistral's calls after `[TOOL_CALLS]`, in the forms of its older and newer models."""

from __future__ import annotations

import re

from pdserve.text.parsers.json_call import JsonCall

_MAX_HEAD_CHARS = 256
_HEAD = re.compile(r"\s*([\w.-]{1,64})\s*(?:\[CALL_ID\][^\[\]{}]{0,64})?(?:\[ARGS\])?\s*")
"""Everything between the tag and the arguments' object: the name, and in some models an id."""
_WITH_NULL = re.compile(r"([\w.-]{1,64})\s*(?:\[CALL_ID\][^\[\]{}]{0,64})?\[ARGS\]\s*null")


class NamedCall:
    """`f{...}`, `f[ARGS]{...}`, `f[ARGS]null`, `f[CALL_ID]id[ARGS]{...}`, or an entry of a list, `[{"name": "f", ...}`.

    Attributes: as those of `JsonCall`.
    """

    def __init__(self) -> None:
        self._head: str | None = ""
        """Text before the first brace; None once that has been read."""
        self._call = JsonCall()
        self._has_failed = False

    @property
    def name(self) -> str | None:
        return self._call.name

    @property
    def failed(self) -> bool:
        return self._has_failed or self._call.failed

    @property
    def complete(self) -> bool:
        return self._call.complete

    @property
    def has_begun(self) -> bool:
        return self._call.has_begun

    def take_arguments(self) -> str:
        """The arguments' text since the last call."""
        return self._call.take_arguments()

    def read(self, text: str) -> int:
        """Read text; returns the number of characters read, which is smaller if the call is complete or has failed."""
        if self._head is None:
            return self._call.read(text)
        head, brace, _ = text.partition("{")
        # white space has no limit, and is not kept
        num_before = len(self._head)
        self._head = (self._head + head).lstrip()
        if (null := _WITH_NULL.match(self._head)) is not None and null.end() <= _MAX_HEAD_CHARS:
            self._call = JsonCall.of_arguments(null[1])
            self._call.read("{}")
            num_dropped = num_before + len(head) - len(self._head)
            return null.end() + num_dropped - num_before
        if (surplus := len(self._head) - _MAX_HEAD_CHARS) > 0:
            self._has_failed = True
            return len(head) - surplus
        if not brace:
            return len(text)
        self._call = self._opened(self._head)
        self._head = None
        if self._has_failed:
            return len(head)
        return len(head) + self._call.read(text[len(head) :])

    def _opened(self, head: str) -> JsonCall:
        """The reader of the object after this head."""
        if head.strip() in ("", "["):
            return JsonCall()
        if (found := _HEAD.fullmatch(head)) is None:
            self._has_failed = True
            return JsonCall()
        return JsonCall.of_arguments(found[1])
