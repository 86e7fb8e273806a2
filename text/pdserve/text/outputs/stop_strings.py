"""Finds stop strings in text that arrives in pieces; the result does not depend on the pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """An Aho-Corasick automaton over a request's stop strings: one step per character for any number of them.

    Immutable once built, so the n sequences of a request share one. Building costs their total length.
    A state is the longest suffix of the text so far that begins some stop string, or is one.
    """

    __slots__ = ("_edges", "_fail", "_rank", "ending", "first_chars", "held_length")

    def __init__(self, stops: Sequence[str]) -> None:
        self._edges: list[dict[str, int]] = [{}]
        self._fail: list[int] = [0]
        self.held_length: list[int] = [0]
        """Per state: length in characters of the longest suffix that more text could complete to a stop string."""
        self.ending: list[str | None] = [None]
        """Per state: the stop string that ends in it; of several, the first in the given order."""
        self._rank: dict[str | None, int] = {None: len(stops)}
        for rank, stop in enumerate(stops):
            if stop:
                self._rank.setdefault(stop, rank)
                self._insert(stop)
        self._link()
        self.first_chars = frozenset(self._edges[0])
        """Characters that leave the start state."""

    def step(self, state: int, char: str) -> int:
        """The state after one more character; amortised constant time."""
        edges = self._edges
        while (following := edges[state].get(char)) is None:
            if not state:
                return 0
            state = self._fail[state]
        return following

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self._edges[state].get(char)
            if following is None:
                following = len(self._edges)
                self._edges[state][char] = following
                self._edges.append({})
                self._fail.append(0)
                self.held_length.append(self.held_length[state] + 1)
                self.ending.append(None)
            state = following
        self.ending[state] = stop

    def _link(self) -> None:
        """Set the failure links, breadth first: a link depends on links of shallower states."""
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            if not self._edges[state]:
                # A complete stop string cannot be extended, only a suffix of it. (Used if a match did not count.)
                self.held_length[state] = self.held_length[self._fail[state]]
            for char, following in self._edges[state].items():
                self._fail[following] = self.step(self._fail[state], char)
                # A stop string that is a suffix of this state ends here, too.
                shorter = self.ending[self._fail[following]]
                if self._rank[shorter] < self._rank[self.ending[following]]:
                    self.ending[following] = shorter
                queue.append(following)


class StopStringMatcher:
    """Releases text as soon as it cannot be part of a stop string.

    The match is the stop string that is completed first; of several that are completed by the same character, the first in the
    request's list.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "matched")

    def __init__(self, stops: Sequence[str] | StopAutomaton, include_in_output: bool = False) -> None:
        self._automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(stops)
        self._include = include_in_output
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; no text is released after it."""

    def feed(self, text: str, *, suppressed: bool = False) -> str:
        """Add text; return the text that can be released now, which may be earlier text.

        suppressed: a match that is completed within this text does not count (`min_tokens`); a match that begins here and is
        completed later does.
        """
        if self.matched is not None:
            return ""
        automaton = self._automaton
        state = self._state
        if not state and automaton.first_chars.isdisjoint(text):
            return text
        pending = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            state = automaton.step(state, char)
            stop = automaton.ending[state]
            if stop is not None and not suppressed:
                self.matched = stop
                self._held = ""
                return pending[: end if self._include else end - len(stop)]
        self._state = state
        release = len(pending) - automaton.held_length[state]
        self._held = pending[release:]
        return pending[:release]

    def flush(self) -> str:
        """End the text; return the text that was held back. Empty after a match."""
        held, self._held, self._state = self._held, "", 0
        return held
