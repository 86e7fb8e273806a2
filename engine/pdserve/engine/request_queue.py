"""`RequestQueue`: first come, first served, with removal from anywhere in constant time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from pdserve.engine.request import Request


class RequestQueue:
    """Requests in the order in which they will be tried."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def append(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def prepend(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> bool:
        """Take it out; False when it was not here."""
        return self._requests.pop(request.request_id, None) is not None

    def first(self, count: int) -> list[Request]:
        """The first `count` requests: what one step looks at, however many wait behind them."""
        return list(islice(self._requests.values(), count))

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and request.request_id in self._requests
