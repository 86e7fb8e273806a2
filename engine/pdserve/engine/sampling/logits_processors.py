"""`LogitsProcessors`: plug-ins that change logits, installed at the server and named by requests.

A plug-in is an entry point of the group `pdserve.logits_processors`: a callable without parameters that makes a `LogitsProcessor`.
Requests name it by its entry point's name. A request cannot contain code, and an installed plug-in is imported only if the setting
`logits_processors` names it, since any dependency may define entry points.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from torch import Tensor

from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.common.request.sampling_params import NamedLogitsProcessor
from pdserve.engine.arrays import IntArray

ENTRY_POINT_GROUP = "pdserve.logits_processors"


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """One sequence that requests a plug-in, before its next token. The arrays are read-only."""

    args: Mapping[str, Any]
    """The request's arguments, JSON values that `check` accepted."""
    prompt_token_ids: IntArray
    output_token_ids: IntArray


class LogitsProcessor(Protocol):
    """A plug-in, without state per sequence: prefill, decode, and an engine after a preemption each pass the whole sequence."""

    def check(self, args: Mapping[str, Any], vocab_size: int) -> None:
        """Called once per request, in any thread. Raises: ValueError naming the invalid argument."""

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        """Change logits `[R, V]` float32 in place; row r belongs to `rows[r]`. Called once per step, in the engine thread.

        Tokens that an earlier stage excluded remain excluded. An exception or a NaN ends the request of that row.
        """


class LogitsProcessors:
    """The loaded plug-ins of an engine."""

    def __init__(self, loaded: Mapping[str, LogitsProcessor] | None = None) -> None:
        self._loaded = dict(loaded or {})

    @classmethod
    def from_entry_points(cls, names: Sequence[str]) -> LogitsProcessors:
        """Load the plug-ins of these entry points, and import no others.

        Raises: ConfigError naming a plug-in that is not installed, is installed twice, or cannot be made.
        """
        if not names:
            return cls()
        offered: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=ENTRY_POINT_GROUP):
            offered.setdefault(point.name, []).append(point)
        return cls({name: _make(name, offered) for name in names})

    @property
    def names(self) -> list[str]:
        return sorted(self._loaded)

    def __getitem__(self, name: str) -> LogitsProcessor:
        return self._loaded[name]

    def verify(self, asked: Sequence[NamedLogitsProcessor], vocab_size: int, passed_over: Collection[str] = ()) -> None:
        """Raises: InvalidRequest for a name that is not loaded, listing the loaded names, or for invalid arguments.

        passed_over: names that are not checked, but count in the places that errors name.
        """
        for place, one in enumerate(asked):
            if one.name in passed_over:
                continue
            processor = self._loaded.get(one.name)
            if processor is None:
                known = f"loaded here: {', '.join(self.names)}" if self._loaded else "none is loaded here"
                raise InvalidRequest(
                    f"logits_processors[{place}].name is {one.name!r}, which is not known; {known}", "logits_processors"
                )
            try:
                processor.check(one.args, vocab_size)
            except Exception as error:
                raise InvalidRequest(
                    f"logits_processors[{place}].args were refused by {one.name!r}: {error}", "logits_processors"
                ) from error


def _make(name: str, offered: Mapping[str, Sequence[EntryPoint]]) -> LogitsProcessor:
    """Raises: ConfigError."""
    points = offered.get(name, ())
    if len(points) != 1:
        found = (
            f"is installed {len(points)} times: {', '.join(point.value for point in points)}"
            if points
            else "is not installed"
        )
        raise ConfigError(
            f"logits_processors names {name!r}, which {found}; installed: {', '.join(sorted(offered)) or 'none'}"
        )
    [point] = points
    try:
        processor: LogitsProcessor = point.load()()
    except Exception as error:
        raise ConfigError(
            f"logits processor {name!r} ({point.value}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return processor
