"""The router as a service: composes, starts and stops its parts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Set
from pathlib import Path

from pdserve.common.address.descriptors import default_max_connections
from pdserve.common.address.host_address import host_and_port
from pdserve.common.hub_name import is_hub_name
from pdserve.common.net.connection_gate import ConnectionLimits
from pdserve.common.net.connection_watch import ConnectionWatch
from pdserve.common.net.http_server import HttpServer, listening_socket
from pdserve.common.net.rpc import bind
from pdserve.common.net.tls_renewal import TlsRenewal
from pdserve.common.processes.allocator import return_large_blocks
from pdserve.common.processes.memory_return import MemoryReturn
from pdserve.common.processes.shutdown import Shutdown
from pdserve.common.security.deployment_key import DeploymentKey, is_loopback
from pdserve.common.security.tls import ServerTls, TlsIdentity
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import describe
from pdserve.common.tasks.background_task import background_task
from pdserve.common.tasks.first_done import first_done
from pdserve.router.bodies.client_bodies import ClientBodies, model_len_of
from pdserve.router.grpc_front.front_grpc import GrpcFront
from pdserve.router.http_front.front_http import HttpFront
from pdserve.router.placement.prefix_index import PrefixIndex
from pdserve.router.requests.inference import Inference
from pdserve.router.requests.preparation import Preparation
from pdserve.router.requests.remote_images import RemoteImages
from pdserve.router.responses.redis_response_store import make_response_store
from pdserve.router.responses.response_store import ResponseStore
from pdserve.router.telemetry.serving_metrics import serving_metrics
from pdserve.router.tenants.fleet_usage import make_fleet_usage
from pdserve.router.workers.fleet import Directory, Fleet, IsStarting, nobody_starts
from pdserve.router.workers.redis_discovery import make_directory
from pdserve.router.workers.worker_watcher import CompatibilityCheck
from pdserve.text.audio.audio_processor import AudioProcessor
from pdserve.text.images.image_processor import ImageProcessor
from pdserve.text.tokenization.tokenizer import Tokenizer

log = logging.getLogger(__name__)

STARTING_WORKER_TIMEOUT_S = 300.0
"""Longest wait of a request for a worker while `up` starts one again; it is 5 s for any other worker."""

KEEP_ALIVE_S = 75
_LAST_WORDS_S = 1.0
"""Seconds in which errors at the end of a drain must reach their clients."""


async def run_router(
    settings: RouterSettings,
    *,
    model_folder: Path,
    ready: Callable[[str, str], None] | None = None,
    shutdown: Shutdown | None = None,
    addresses: Directory | None = None,
    is_starting: IsStarting = nobody_starts,
) -> None:
    """Serve until SIGTERM or SIGINT; then wait for open streams, at most `drain_s`, or until a second signal.

    ready: called once with the HTTP and the gRPC address (host:port) when both front ends listen. Workers may start
    later. shutdown: if given, the caller handles signals, and its events take their place. addresses: finds workers in
    place of Redis, which finds them if it is in the settings. is_starting: asked before a request gives up its wait for a worker.
    Raises: ConfigError for a model folder, key or port that cannot be used.
    """
    log.info("settings: %s", describe(settings))
    return_large_blocks()
    key, is_development_key = settings.key()
    if is_development_key:
        log.warning("no deployment key: using the public development key, which is safe only on this machine")
    models = _model_names(settings, model_folder)
    model_len = model_len_of(model_folder)
    tokenizer = Tokenizer.from_folder(model_folder, parse_special=settings.parse_special)
    images = ImageProcessor.from_folder(model_folder, settings.limits.images())
    audio = AudioProcessor.from_folder(model_folder)
    bodies = ClientBodies(settings, model_len, has_media=images is not None or audio is not None)
    remote_images = None
    if images is not None and (domains := settings.media_domains()):
        remote_images = RemoteImages(
            domains, settings.limits.image_fetch_timeout_s, bodies.max_request_bytes, bodies.budget.max_bytes
        )
    preparation = Preparation(
        tokenizer, key, model_len, images, settings.limits.max_held_image_bytes, remote_images, audio
    )
    try:
        tls = settings.tls()
        async with running_inference(
            settings, models, preparation, bodies, key, tls, addresses=addresses, is_starting=is_starting
        ) as inference:
            if not settings.asks_for_keys and not is_loopback(settings.host) and settings.no_auth:
                log.warning("no_auth: every client that reaches %s is served without an API key", settings.host)
            front = settings.front_tls()
            renewal = TlsRenewal(settings, tls, front, settings.front_tls)
            renewal.log_expiry()
            inference.telemetry.watch_tls(renewal.expiries)
            responses = make_response_store(settings, key)
            tasks = {
                background_task("api_keys", inference.keys.follow),
                background_task("certificates", renewal.run),
                background_task("loop_lag", inference.telemetry.loop_lag.run),
                background_task("memory", MemoryReturn().run),
            }
            try:
                async with serving_metrics(settings, inference.telemetry.exposition):
                    await _serve(inference, responses, front, ready, shutdown)
            finally:
                await _cancelled(tasks)
                await responses.close()
                await inference.telemetry.close()
    finally:
        preparation.close()
        bodies.close()
        if remote_images is not None:
            await remote_images.close()


@contextlib.asynccontextmanager
async def running_inference(
    settings: RouterSettings,
    models: tuple[str, ...],
    preparation: Preparation,
    bodies: ClientBodies,
    key: DeploymentKey,
    tls: TlsIdentity | None = None,
    *,
    addresses: Directory | None = None,
    is_starting: IsStarting = nobody_starts,
) -> AsyncIterator[Inference]:
    """A router without its front ends: the fleet that it follows, and what it does about it while requests are served.

    addresses, is_starting: as of `run_router`.
    """
    index = PrefixIndex()
    directory = make_directory(settings, index, key)
    expected = CompatibilityCheck(key=key, tokenizer_fingerprint=preparation.tokenizer.fingerprint)
    async with Fleet(
        settings.prefill, settings.decode, expected, index if directory is None else None, directory or addresses,
        tls.client if tls is not None else None, insecure=settings.insecure, is_starting=is_starting,
        starting_timeout_s=STARTING_WORKER_TIMEOUT_S,
    ) as fleet:  # fmt: skip
        inference = Inference(models, settings, fleet, preparation, index, bodies)
        if directory is not None:
            inference.telemetry.watch_redis(directory.breaker, lambda: directory.counts)
        tasks = set()
        if settings.block_moves != "never":
            tasks.add(background_task("cache_moves", inference.cache_moves.run))
        if settings.rebalance != "never":
            tasks.add(background_task("rebalancing", inference.rebalancing.run))
        if settings.role_switch != "never":
            tasks.add(background_task("role_switching", inference.role_switching.run))
        if (usage := make_fleet_usage(settings, key, inference.admission.tenants)) is not None:
            tasks.add(background_task("usage", usage.run))
        try:
            yield inference
        finally:
            await _cancelled(tasks)


async def _cancelled(tasks: Set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def _model_names(settings: RouterSettings, model_folder: Path) -> tuple[str, ...]:
    # the folder of a model of the hub is named by its revision
    own_name = settings.model if is_hub_name(settings.model) else model_folder.resolve().name
    return settings.served_model_name or (own_name,)


async def _serve(
    inference: Inference,
    responses: ResponseStore,
    tls: ServerTls | None,
    ready: Callable[[str, str], None] | None,
    shutdown: Shutdown | None,
) -> None:
    settings = inference.settings
    signals: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if shutdown is None:
        shutdown = Shutdown()
        signals = shutdown.on_signals()
    max_connections = settings.limits.max_connections or default_max_connections(num_servers=2)
    limits = ConnectionLimits(
        total=max_connections, per_address=settings.limits.max_connections_per_address or max(1, max_connections // 2)
    )
    with listening_socket(settings.host, settings.port, reuse_port=settings.reuse_port) as http_socket:
        grpc_front = GrpcFront(inference, max_connections, reuse_port=settings.reuse_port)
        grpc_port = bind(grpc_front.server, settings.host, settings.grpc_port, tls)
        http_server = HttpServer(HttpFront(inference, responses).app, KEEP_ALIVE_S, _LAST_WORDS_S, tls, limits)
        with signals:
            await grpc_front.start()
            watching = background_task("connections", ConnectionWatch(grpc_port, limits.per_address).run)
            http_task = asyncio.create_task(http_server.serve(sockets=[http_socket]))
            try:
                # a server that is stopped before it has started would leave its socket open
                await first_done(http_server.listening.wait(), asyncio.shield(http_task))
                if ready is not None:
                    ready(
                        host_and_port(settings.host, http_socket.getsockname()[1]),
                        host_and_port(settings.host, grpc_port),
                    )
                await first_done(shutdown.stop.wait(), asyncio.shield(http_task))
                inference.admission.close()
                grpc_front.leave()
                await _drain(inference, settings.drain_s, shutdown)
            finally:
                inference.admission.close()
                inference.admission.expel()
                http_server.stop()
                watching.cancel()
                await grpc_front.stop(_LAST_WORDS_S)
                await http_task


async def _drain(inference: Inference, drain_s: float, shutdown: Shutdown) -> None:
    """Refuse new requests; running ones may finish."""
    shutdown.announce_drain(inference.admission.num_requests, drain_s)
    await first_done(inference.admission.emptied(), shutdown.hurry.wait(), timeout_s=drain_s)
