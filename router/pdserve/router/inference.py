"""What both front ends serve: the model, and generations over the fleet."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from pdserve.common.errors import InvalidRequest, NotFound
from pdserve.common.settings import RouterSettings
from pdserve.router.admission import Admission
from pdserve.router.client_stream import ClientStream
from pdserve.router.fleet import Fleet
from pdserve.router.generation import Generation
from pdserve.router.poison import PoisonList
from pdserve.router.preparation import ClientRequest, Limits, Preparation
from pdserve.router.request_run import RequestRun
from pdserve.router.worker import WorkerRole
from pdserve.text.tokenizer import Tokenizer

MAX_PROMPTS = 128
"""Prompts in one request."""


class Inference:
    """One model behind both front ends."""

    def __init__(self, model: str, settings: RouterSettings, fleet: Fleet, preparation: Preparation) -> None:
        self.model = model
        self.settings = settings
        self.fleet = fleet
        self.admission = Admission(settings.max_queued_requests)
        self._preparation = preparation
        self._poison = PoisonList()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._preparation.tokenizer

    @property
    def healthy(self) -> bool:
        """Whether some request could be served now."""
        if self.admission.closed or not self.fleet.workers(WorkerRole.DECODE):
            return False
        return self.settings.local_prefill != "never" or bool(self.fleet.workers(WorkerRole.PREFILL))

    def limits(self) -> Limits | None:
        """None until a worker is known."""
        return Limits.of(worker for role in WorkerRole for worker in self.fleet.workers(role))

    def model_fingerprint(self) -> str:
        """Of the first live worker; empty until one is known."""
        workers = [worker for role in WorkerRole for worker in self.fleet.workers(role)]
        return workers[0].identity.layout.model_fingerprint if workers else ""

    def check_model(self, name: str | None) -> None:
        """Raises: NotFound for another model's name; None and "" mean whichever is served."""
        if name and name != self.model:
            raise NotFound(f"model {name!r} is not served here; this router serves {self.model!r}")

    def generation(self, requests: Sequence[ClientRequest], *, stream: bool) -> Generation:
        """A generation with one choice a request; it starts when its context is entered.

        stream: whether the client reads as it goes; otherwise what is unread has no limit but `max_tokens`.
        Raises: InvalidRequest for too many prompts.
        """
        if not 0 < len(requests) <= MAX_PROMPTS:
            raise InvalidRequest(f"prompt has {len(requests)} entries, 1 to {MAX_PROMPTS} are allowed", "prompt")
        request_id = uuid.uuid4().hex
        client_stream = ClientStream(len(requests), self.settings.max_unread_bytes if stream else None)
        runs = [
            RequestRun(
                request_id if len(requests) == 1 else f"{request_id}-{choice}",
                choice,
                request,
                client_stream,
                fleet=self.fleet,
                preparation=self._preparation,
                poison=self._poison,
                settings=self.settings,
            )
            for choice, request in enumerate(requests)
        ]
        return Generation(request_id, client_stream, runs, self.admission)
