"""`ServedModels`: the names that clients may give as `model`: those of the base model, and the adapters of live workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from pdserve.common.errors import ModelNotFound, WorkerLost
from pdserve.common.kv_events import WorkerKey
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.tenants.client import ANYBODY, Client
from pdserve.router.workers.fleet import Fleet
from pdserve.router.workers.worker import RemoteWorker

_SHOWN_NAMES = 32
"""Names in the error for an unknown one, at most."""
_MAX_SEEN = 4096
REPORT_S = 1.0
"""A worker reports a changed adapter at once; its refusal of a request may overtake the report."""


class ServedModels:
    """`lora_name` may be called in any thread."""

    def __init__(self, names: tuple[str, ...], fleet: Fleet) -> None:
        """names: of the base model, at least one; the first stands in responses."""
        self.names = names
        self._fleet = fleet
        self._seen: dict[str, None] = {}
        """Adapters that workers have offered, those that were offered last at the end."""
        fleet.listeners.append(self._see)

    @property
    def base(self) -> str:
        return self.names[0]

    def base_names(self, client: Client = ANYBODY) -> list[str]:
        """Names of the base model that the client's key allows."""
        return [name for name in self.names if client.may_ask(name)]

    def adapters(self, client: Client = ANYBODY) -> list[str]:
        """Names of the adapters that some live worker offers and the client's key allows, without names of the base model."""
        offered = {name for worker in self._workers() for name in worker.adapters}
        return sorted(filter(client.may_ask, offered.difference(self.names)))

    def lora_name(self, model: str | None, client: Client = ANYBODY) -> str:
        """The adapter that a client's `model` names; "" for the base model, which None and "" mean, too.

        Raises: ModelNotFound, also for a name that the client's key does not allow.
        """
        if not model:
            if not self.base_names(client):
                allowed = self.adapters(client)
                only = f"only {self._served(client)}" if allowed else "none of the models that are served here"
                raise ModelNotFound(f"model is missing, and this API key allows {only}")
            return ""
        if not client.may_ask(model):
            raise self.unknown(model, client)
        if model in self.names:
            return ""
        if self._may_come_back(model) or any(model in worker.adapters for worker in self._workers()):
            return model
        raise self.unknown(model, client)

    def unknown(self, model: str, client: Client = ANYBODY) -> ModelNotFound:
        """The error for a name that is not served, or not to this client."""
        return ModelNotFound(f"model {model[:80]!r} is not served here; this router serves {self._served(client)}")

    def _served(self, client: Client) -> str:
        names, adapters = self.base_names(client), self.adapters(client)
        more = f" and {len(adapters) - _SHOWN_NAMES} more" if len(adapters) > _SHOWN_NAMES else ""
        shown = f"adapters {', '.join(map(repr, adapters[:_SHOWN_NAMES]))}{more}" if adapters else ""
        served = ", ".join(map(repr, names))
        return f"{served}, and with {shown}" if served and shown else served or shown or "no model to this API key"

    async def with_adapter(
        self, request: GenerationRequest, timeout_s: float, roles: Sequence[WorkerRole] = tuple(WorkerRole)
    ) -> GenerationRequest:
        """The request with the content of its adapter: the one that it has, while a live worker offers that.

        Waits for a worker that offers the adapter. Raises: ModelNotFound after `timeout_s`; WorkerLost while one that may is
        absent.
        """
        if not (name := request.lora_name) or self._is_offered(name, request.lora_fingerprint):
            return request
        fingerprint = await self._fleet.wait_for_worker(lambda: self.fingerprint(name, roles), timeout_s)
        if fingerprint is None and self._may_come_back(name):
            raise WorkerLost(f"no live worker offers the adapter {name!r}, and some workers are absent").for_clients()
        if fingerprint is None:
            raise self.unknown(name)
        return msgspec.structs.replace(request, lora_fingerprint=fingerprint)

    async def after_refusal(
        self,
        request: GenerationRequest,
        refused_by: Collection[WorkerKey],
        timeout_s: float,
        roles: Sequence[WorkerRole] = tuple(WorkerRole),
    ) -> GenerationRequest:
        """The request with the content that its adapter has now, after `refused_by` had lost the one that they offered.

        Waits `REPORT_S` for their reports, unless another worker offers the same content. Raises: as `with_adapter`.
        """

        def is_current() -> bool | None:
            name, content = request.lora_name, request.lora_fingerprint
            offering = [worker.key for worker in self._workers() if worker.adapters.get(name) == content]
            return True if not offering or any(key not in refused_by for key in offering) else None

        await self._fleet.wait_for(is_current, REPORT_S)
        return await self.with_adapter(request, timeout_s, roles)

    def fingerprint(self, lora_name: str, roles: Sequence[WorkerRole] = tuple(WorkerRole)) -> str | None:
        """The content that a new request with this adapter gets; None while no live worker of these roles offers it.

        Workers differ while a folder is being replaced: a content that every role has comes first, then the one that most workers
        have.
        """
        offered = [(role, worker.adapters[lora_name]) for role in roles for worker in self._fleet.workers(role)
                   if lora_name in worker.adapters]  # fmt: skip
        if not offered:
            return None
        num_workers = Counter(fingerprint for _, fingerprint in offered)
        num_roles = Counter(fingerprint for _, fingerprint in set(offered))
        decodes = {fingerprint for role, fingerprint in offered if role is WorkerRole.DECODE}
        return max(num_workers, key=lambda one: (num_roles[one], one in decodes, num_workers[one], one))

    def _is_offered(self, lora_name: str, fingerprint: str) -> bool:
        return any(worker.adapters.get(lora_name) == fingerprint for worker in self._workers())

    def _may_come_back(self, lora_name: str) -> bool:
        """True for an adapter that workers have offered, while a worker is absent: its end does not make the name unknown."""
        return lora_name in self._seen and bool(self._fleet.absent())

    def _see(self) -> None:
        for worker in self._workers():
            for name in worker.adapters:
                self._seen.pop(name, None)
                self._seen[name] = None
        for name in list(self._seen)[: max(0, len(self._seen) - _MAX_SEEN)]:
            del self._seen[name]

    def _workers(self) -> list[RemoteWorker]:
        return [worker for role in WorkerRole for worker in self._fleet.workers(role)]
