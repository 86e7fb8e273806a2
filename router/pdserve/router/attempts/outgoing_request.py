"""`OutgoingRequest`: a request in the form that each worker takes, encoded once for both calls of an attempt."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.multimodal import without_pixels
from pdserve.common.request.protocol_3 import LAST_VERSION, request_to_version_3, turn_to_version_3
from pdserve.common.request.request_bytes import encode_request
from pdserve.router.workers.worker import Worker


class OutgoingRequest:
    """A request as its workers get it, encoded once. The time left until its deadline is read at the first use."""

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
    def _data(self) -> bytes:
        return encode_request(self.request)

    def fields(self, worker: Worker, *, version_3: str = "request") -> dict[str, Any]:
        """The field of a call's message that holds the request. version_3: name of the field in that version.

        Raises: InvalidRequest for a worker of that version, if the prompt is embeddings.
        """
        if worker.identity.protocol_version > LAST_VERSION:
            return {"generation_request": self._data}
        if self.request.prompt_embeds is not None:
            raise InvalidRequest(
                f"prompt_embeds is given, and worker {worker} has protocol version {worker.identity.protocol_version}, which "
                "takes token ids alone",
                "prompt_embeds",
            )
        convert = turn_to_version_3 if version_3 == "next" else request_to_version_3
        return {version_3: convert(self.request)}
