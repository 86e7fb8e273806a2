"""`CallerLogitsProcessors`: functions of the caller as logits processors, in addition to the installed plug-ins.

Requests carry names and no code, and a function has a name from the registration until the last reference to its
`LogitsCallable`, which the request's owner keeps. An engine in another process never sees one.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.sampling_params import NamedLogitsProcessor
from pdserve.engine.sampling.logits_processors import LogitsProcessor, LogitsProcessors, LogitsRow

LogitsFunction = Callable[[list[int], Tensor], Tensor] | Callable[[list[int], list[int], Tensor], Tensor]
"""(output token ids, logits `[V]`) -> logits `[V]`, or the same with the prompt's token ids first; as in vLLM."""
_numbers = itertools.count()


class LogitsCallable:
    """A function in the form of a plug-in."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.name = f"{getattr(function, '__name__', type(function).__name__)}#{next(_numbers)}"
        self._function = function
        self._takes_prompt = _num_parameters(function) == 3

    def check(self, args: Mapping[str, Any], vocab_size: int) -> None: ...

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        for place, row in enumerate(rows):
            output = row.output_token_ids.tolist()
            prompt = [row.prompt_token_ids.tolist()] if self._takes_prompt else []
            changed = self._function(*prompt, output, logits[place])
            if changed.shape != logits[place].shape:
                raise ValueError(f"it returned logits of shape {list(changed.shape)}, not {list(logits[place].shape)}")
            logits[place] = changed


class _Forgotten:
    """The processor of a request whose owner has left, until the engine has ended it."""

    def check(self, args: Mapping[str, Any], vocab_size: int) -> None: ...

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None: ...


class CallerLogitsProcessors(LogitsProcessors):
    """The installed plug-ins, and functions of requests."""

    def __init__(self, installed: LogitsProcessors, *, takes_functions: bool) -> None:
        """takes_functions: True if the engine runs in this process."""
        super().__init__()
        self._installed = installed
        self._takes_functions = takes_functions
        self._functions: WeakValueDictionary[str, LogitsCallable] = WeakValueDictionary()

    def register(self, function: Callable[..., Tensor], place: int) -> LogitsCallable:
        """The function under a name that requests may have, as long as the result is referenced.

        place: in the caller's `logits_processors`. Raises: InvalidRequest where the engine runs in another process.
        """
        if not self._takes_functions:
            raise InvalidRequest(
                f"logits_processors[{place}] is a function, which an engine in a process of its own (engine_process) cannot "
                "call",
                "logits_processors",
            )
        named = LogitsCallable(function)
        self._functions[named.name] = named
        return named

    @property
    def names(self) -> list[str]:
        return self._installed.names

    def __getitem__(self, name: str) -> LogitsProcessor:
        function = self._functions.get(name)
        if function is not None:
            return function
        try:
            return self._installed[name]
        except KeyError:
            return _Forgotten()

    def verify(self, asked: Sequence[NamedLogitsProcessor], vocab_size: int, passed_over: Collection[str] = ()) -> None:
        self._installed.verify(asked, vocab_size, {*passed_over, *self._functions})


def _num_parameters(function: Callable[..., Any]) -> int:
    """Parameters without a default; 2 where they are not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    return sum(parameter.default is inspect.Parameter.empty for parameter in parameters)
