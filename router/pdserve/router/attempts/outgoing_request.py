"""`OutgoingRequest`: a request in the form that workers take, encoded once for both calls of an attempt."""

from __future__ import annotations

import functools

import msgspec

from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.multimodal import without_pixels
from pdserve.common.request.wire.request_bytes import encode_request


class OutgoingRequest:
    """A request as its workers get it. The time left until its deadline is read at the first use of `data`."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request

    def for_receiver(self) -> OutgoingRequest:
        """For a worker that gets the prompt's KV: without the numbers of embeddings and the pixels of images."""
        embeds, features = self.request.prompt_embeds, self.request.mm_features
        if embeds is None and not features:
            return self
        without = None if embeds is None else embeds.without_data()
        return OutgoingRequest(
            msgspec.structs.replace(self.request, prompt_embeds=without, mm_features=without_pixels(features))
        )

    @functools.cached_property
    def data(self) -> bytes:
        """`Submission.request`."""
        return encode_request(self.request)
