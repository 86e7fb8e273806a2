"""`in_background`: runs a call that may hang in a daemon thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def in_background(call: Callable[[], Result], name: str) -> queue.SimpleQueue[Result]:
    """Start a call; returns a queue that receives its result. The call should not raise: then the queue stays empty.

    A thread pool is not used, because the interpreter waits for its threads at exit, and a name service may block for minutes.
    """
    answer: queue.SimpleQueue[Result] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(call()), name=f"doctor-{name}", daemon=True).start()
    return answer
