"""`WorkerWatcher`: one address of the fleet, with a channel and a watch stream that is opened again whenever it ends."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import grpc.aio
import msgspec

from pdserve.common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KeyMismatch,
    PdServeError,
    ProtocolMismatch,
    WorkerLost,
)
from pdserve.common.kv_events import KvCacheEvents, KvEventSink, apply_change
from pdserve.common.net.rpc import failed_to_shake_hands, make_channel
from pdserve.common.net.service_channel import ServiceChannel
from pdserve.common.request.known_adapters import NO_ADAPTERS, KnownAdapters
from pdserve.common.security.call_proof import CallSigner
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.security.tls import ClientTls
from pdserve.common.worker_identity import WorkerIdentity, WorkerRole
from pdserve.router.workers.watch import OfferedAdapters, watch
from pdserve.router.workers.worker import RemoteWorker, WorkerLoad, WorkerState

log = logging.getLogger(__name__)

RECONNECT_S = 0.5
_REFUSALS = (KeyMismatch, ProtocolMismatch, InvalidRequest)
"""Errors of a watch whose worker answers, but cannot be used."""
FIRST_MESSAGE_TIMEOUT_S = 5.0
TICK_STILL_S = 3.0
"""Seconds after which an engine_tick that does not move means that the engine stalls."""


class CompatibilityCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Values that must be equal at a worker and this router."""

    key: DeploymentKey
    """The deployment key; a worker proves that it has the key before it gets requests."""
    tokenizer_fingerprint: str

    def mismatch(self, identity: WorkerIdentity, role: WorkerRole) -> str | None:
        """The reason why a worker cannot be used at an address of `role`, with both values; None if it can. What counts is the role
        with which it was started."""
        if identity.role is not role:
            return f"its role is {identity.role_name}, but the address was given as {role.value}"
        if identity.tokenizer_fingerprint != self.tokenizer_fingerprint:
            return (
                f"its tokenizer differs: fingerprint {identity.tokenizer_fingerprint} there, "
                f"{self.tokenizer_fingerprint} here; router and workers need the same model folder"
            )
        return None


class WorkerWatcher:
    """Keeps a watch open to one address. `worker` is the current epoch there, or None."""

    def __init__(
        self,
        address: str,
        role: WorkerRole,
        expected: CompatibilityCheck,
        changed: Callable[[WorkerWatcher], None],
        held: KvEventSink | None = None,
        tls: ClientTls | None = None,
        *,
        found: bool = False,
    ) -> None:
        """changed: called after `worker`, its state or `refused` changed.

        held: receives the worker's blocks; None if the directory does that. found: True if the address comes from a directory. The
        worker's identity must then contain it, since another process could relay the answers of a worker elsewhere.
        """
        self.address = address
        self.address_role = role
        """The role with which a worker is started here."""
        self.worker: RemoteWorker | None = None
        self.refused: str | None = None
        """The reason why the worker at this address is refused; None if it is not."""
        self._expected = expected
        self._changed = changed
        self._held = held
        self._tls = tls
        self._found = found
        self._signer = CallSigner(expected.key)
        self._channel: grpc.aio.Channel | None = None
        self._tick: tuple[int, int] | None = None
        """(epoch, engine_tick) last seen, also across reconnects."""
        self._tick_moved_at = 0.0
        self._last_warning = ""
        self._adapters = NO_ADAPTERS
        """Adapters that the watched worker offers."""

    @property
    def role(self) -> WorkerRole | None:
        """The role of the worker, or without one that of the address."""
        return self.address_role if self.worker is None else self.worker.role

    async def keep(self) -> None:
        """Watch until cancelled."""
        self._channel = make_channel(self.address, self._tls)
        try:
            while True:
                try:
                    await self._watch_once(self._channel)
                    cause = "its watch stream ended"
                except PdServeError as error:
                    cause = f"its watch stream broke: {error.message}"
                    refusal = error.message if isinstance(error, _REFUSALS) else None
                    if isinstance(error, DeadlineExceeded):
                        self._warn(f"the handshake with the worker at {self.address} timed out: {error.message}")
                else:
                    refusal = None
                self._note_refusal(refusal, cause)
                self._mark_lost(cause)
                await asyncio.sleep(RECONNECT_S * random.uniform(0.7, 1.3))
        finally:
            if self.worker is not None:
                self.worker.mark_lost("the router leaves")
            await self._channel.close()

    def _note_refusal(self, refusal: str | None, cause: str) -> None:
        """Record and log the end of a watch. refusal: the reason why the worker cannot be used, if it answered. cause: the
        error."""
        before = self.refused
        self.refused = refusal
        if refusal is not None:
            self._warn(f"the worker at {self.address} is refused: {refusal}")
        elif self.worker is None and failed_to_shake_hands(cause):
            self.refused = cause
            if before is None:
                # otherwise this could not be distinguished from a worker that has not started
                self._warn(
                    f"no {self.address_role.value} worker is reached at {self.address}: {cause}; do both sides have TLS, "
                    "certificates of one CA, and there one made out to this host or to tls_server_name?"
                )
        if self.refused != before:
            self._changed(self)

    def check_tick(self, still_since: float) -> None:
        """Mark the worker lost if its tick has not moved since `still_since`, in loop time; it is live again when the tick
        moves."""
        if self.worker is not None and self._tick_moved_at < still_since:
            self._mark_lost(f"its engine_tick has not moved for {TICK_STILL_S:g} s", stalled=True)

    def extend_deadline(self, seconds: float) -> None:
        """Extend the time limit by the seconds for which the router was suspended."""
        self._tick_moved_at += seconds

    async def _watch_once(self, channel: grpc.aio.Channel) -> None:
        first = None
        self._adapters = NO_ADAPTERS
        events = watch(channel, self._expected.key, self.address, blocks=self._held is not None)
        try:
            try:
                async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
                    first = await anext(events, None)
            except TimeoutError:
                raise WorkerLost(f"no message within {FIRST_MESSAGE_TIMEOUT_S:g} s") from None
            if not isinstance(first, WorkerIdentity):
                raise WorkerLost("its first message was not its identity")
            self.refused = self._objection(first)
            if self.refused is not None:
                self._warn(f"worker {first.worker_id} at {self.address} is refused: {self.refused}")
                self._changed(self)
            async for event in events:
                if self.refused is not None:
                    continue
                if isinstance(event, WorkerLoad):
                    self._take_load(first, event, channel)
                elif isinstance(event, OfferedAdapters):
                    self._take_adapters(event.known)
                elif isinstance(event, KvCacheEvents) and self._held is not None:
                    apply_change(self._held, first.key, event)
        finally:
            await events.aclose()
            if self._held is not None and isinstance(first, WorkerIdentity):
                self._held.cleared(first.key)

    def _objection(self, identity: WorkerIdentity) -> str | None:
        if self._found and identity.address != self.address:
            return f"it says that it is reached at {identity.address}"
        return self._expected.mismatch(identity, self.address_role)

    def _take_load(self, identity: WorkerIdentity, load: WorkerLoad, channel: grpc.aio.Channel) -> None:
        tick = (identity.epoch, load.engine_tick)
        moved = tick != self._tick
        self._tick = tick
        if moved:
            self._tick_moved_at = asyncio.get_running_loop().time()
        if self.worker is not None:
            before, role = self.worker.state, self.worker.role
            self.worker.report(load)
            if self.worker.state is not before:
                log.info("worker %s is %s", self.worker, self.worker.state.value)
            if self.worker.role is not role:
                log.info("worker %s has the role %s now", self.worker, self.worker.role_name)
            if (self.worker.state, self.worker.role) != (before, role):
                self._changed(self)
        elif moved:
            service = ServiceChannel(channel, self._signer, identity.key)
            self.worker = RemoteWorker(identity, service, load, self._adapters)
            self._last_warning = ""
            log.info("%s worker %s joined", self.worker.role_name, self.worker)
            self._changed(self)

    def _take_adapters(self, known: KnownAdapters) -> None:
        self._adapters = known
        if self.worker is not None:
            self.worker.adapters = known
            self._changed(self)

    def _mark_lost(self, cause: str, *, stalled: bool = False) -> None:
        if self.worker is None:
            return
        worker, self.worker = self.worker, None
        if worker.state is WorkerState.DRAINING and not stalled:
            log.info("%s worker %s has drained and left: %s", worker.role_name, worker, cause)
        else:
            log.warning("%s worker %s is lost: %s", worker.role_name, worker, cause)
        worker.mark_lost(cause, stalled=stalled)
        self._changed(self)

    def _warn(self, message: str) -> None:
        """Log a warning once, not at each retry of the address."""
        if message != self._last_warning:
            self._last_warning = message
            log.warning("%s", message)
