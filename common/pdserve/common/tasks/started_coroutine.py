"""`start`: runs a coroutine at once, up to its first wait, so that one that needs no wait needs no task."""

from __future__ import annotations

import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any


def start(coroutine: Coroutine[Any, Any, None]) -> Awaitable[None] | None:
    """Run until it ends or waits. None if it has ended; else the rest of it, which a task must await.

    The part before the first wait runs outside of any task. Raises: as the coroutine.
    """
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        return None
    return _rest(coroutine, waits_for)


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    try:
        while True:
            try:
                sent = yield waits_for
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:
                waits_for = coroutine.throw(error)
            else:
                waits_for = coroutine.send(sent)
    except StopIteration:
        return
