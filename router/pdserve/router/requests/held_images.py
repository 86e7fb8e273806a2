"""`HeldImages`: bounds the images that the router keeps until their requests end, for further attempts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.common.errors import Overloaded
from pdserve.common.request.generation_request import GenerationRequest


class HeldImages:
    """Used on the event loop alone."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of all requests together."""
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Bytes that are kept now."""

    def add(self, request: GenerationRequest) -> None:
        """Count a request's images, within `ending`. Raises: Overloaded, with the images dropped."""
        num_bytes = _size(request)
        if self.num_bytes + num_bytes > self._max_bytes:
            request.mm_features = []
            raise Overloaded(
                f"images of {num_bytes} bytes, and those of other requests have {self.num_bytes} of {self._max_bytes} bytes "
                "(max_held_image_bytes)"
            )
        self.num_bytes += num_bytes

    @contextmanager
    def ending(self, request: GenerationRequest) -> Iterator[None]:
        """Context of a request; at its end the images are dropped."""
        try:
            yield
        finally:
            self.num_bytes -= _size(request)
            request.mm_features = []


def _size(request: GenerationRequest) -> int:
    return sum(len(feature.data) for feature in request.mm_features)
