"""`in_background`: a call that may hang, in a thread that dies with the process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def in_background(call: Callable[[], Result], name: str) -> queue.SimpleQueue[Result]:
    """Start a call that raises nothing: its result arrives through the queue; a call that raises delivers none.

    Not in a thread pool: the interpreter waits for its threads, and a name service may block one for minutes.
    """
    answer: queue.SimpleQueue[Result] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(call()), name=f"doctor-{name}", daemon=True).start()
    return answer
