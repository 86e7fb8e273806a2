"""`running_fleet`: a router and its workers, the product's own, in one event loop of virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec

from pdserve.common.errors import ConfigError, InternalError
from pdserve.common.net.rpc import transported_by
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.common.settings.kv_store_url import MooncakeUrl
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.common.worker_identity import WorkerRole
from pdserve.decode.decode_servicer import decode_calls
from pdserve.engine.client.inproc_client import InprocClient
from pdserve.engine.engine_thread import ENGINE_FAILED, in_event_loop
from pdserve.engine.runner.loading.loaded_model import LoadedModel, load_outline
from pdserve.engine.runner.pool.block_store import BlockStore
from pdserve.engine.runner.pool.disk_store import DiskStore
from pdserve.engine.runner.pool.open_store import disk_bytes, store_context
from pdserve.kv_transfer.connector_set import ConnectorSet, join_shapes
from pdserve.models.model_impl import read_model_config
from pdserve.prefill.prefill_servicer import prefill_calls
from pdserve.router.bodies.client_bodies import ClientBodies
from pdserve.router.requests.inference import Inference
from pdserve.router.requests.preparation import Preparation
from pdserve.router.service import running_inference
from pdserve.simulator.fleet_store import FleetStore, SharedStore
from pdserve.simulator.memory_rpc import LATENCY_S, MemoryRpc
from pdserve.simulator.number_tokenizer import number_tokenizer
from pdserve.simulator.step_times import StepTimes
from pdserve.simulator.virtual_engine import VirtualEngine, engine_thread_of
from pdserve.simulator.virtual_tiers import DISK_LINK, HOST_LINK, VirtualFolder
from pdserve.simulator.virtual_time import VirtualTime
from pdserve.simulator.virtual_transfer import Line, Link, VirtualConnector, VirtualPool
from pdserve.text.tokenization.tokenizer import Tokenizer
from pdserve.worker.transfers.worker_transfers import TransferMemory, WorkerTransfers
from pdserve.worker.worker import Worker

CALLS = {WorkerRole.PREFILL: prefill_calls, WorkerRole.DECODE: decode_calls}
MEET_S = 60.0
"""Virtual seconds for the router to meet all workers."""
NOT_SIMULATED = MappingProxyType({"lora_modules": None, "lora_dir": None})
"""Settings of workers that a simulation refuses -> the values that it takes."""
_ONE_ROLE = ConfigError("workers of a simulation are started for one role")


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Equal workers of one role."""

    settings: WorkerSettings
    """Their section is their role."""
    count: int
    times: StepTimes
    """Of the whole worker, with all of its ranks."""
    link: Link
    """Network card of each rank, in each direction."""
    host: Link = HOST_LINK
    """Between each rank's device and host memory, in each direction."""
    disk: Link = DISK_LINK
    """Of the worker's disk, which all ranks share."""
    draft_acceptance: float | None = None
    """The part of drafts that is accepted, of those whose predecessors are; None: `speculative_config` is refused."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet."""

    folder: Path
    """The model's: a config.json, and a tokenizer if there is one; no weights are read."""
    router: RouterSettings
    workers: Sequence[WorkerPlan]
    latency_s: float = LATENCY_S
    """Seconds of a message from one service to another."""

    def tokenizer(self) -> Tokenizer:
        """The model's, or as `number_tokenizer`. Raises: ConfigError, UnsupportedModel."""
        if (self.folder / "tokenizer.json").is_file():
            return Tokenizer.from_folder(self.folder)
        settings = self.workers[0].settings
        config = read_model_config(self.folder, settings.dtype, settings.model_impl)
        return number_tokenizer(self.folder, config.vocab_size)


@contextlib.asynccontextmanager
async def running_fleet(plan: FleetPlan, time: VirtualTime) -> AsyncIterator[Inference]:
    """Start the workers, then the router; all have met when this yields. Raises: ConfigError, UnsupportedModel."""
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(transported_by(MemoryRpc(plan.latency_s)))
        addresses: dict[str, list[str]] = {"prefill": [], "decode": []}
        store = FleetStore()
        for each in plan.workers:
            verify_simulated(each)
            outline = load_outline(plan.folder, each.settings)
            for _ in range(each.count):
                worker = _worker(plan, each, outline, time, store)
                stack.push_async_callback(worker.stop)
                await worker.start()
                addresses[each.settings.section].append(worker.identity.address)
        settings = msgspec.structs.replace(plan.router, **{role: tuple(of_role) for role, of_role in addresses.items()})
        model_len = outline.max_model_len
        preparation = Preparation(plan.tokenizer(), DEVELOPMENT_KEY, model_len)
        stack.callback(preparation.close)
        bodies = ClientBodies(settings, model_len)
        stack.callback(bodies.close)
        inference = await stack.enter_async_context(
            running_inference(settings, (plan.folder.name,), preparation, bodies, DEVELOPMENT_KEY)
        )
        stack.push_async_callback(inference.telemetry.close)
        fleet = inference.fleet

        def have_met() -> bool | None:
            return all(len(fleet.workers(role)) == len(addresses[role.value]) for role in WorkerRole) or None

        if await fleet.wait_for_worker(have_met, MEET_S) is None:
            raise InternalError(f"the router has not met all workers within {MEET_S:g} s")
        yield inference


def verify_simulated(plan: WorkerPlan) -> None:
    """Raises: ConfigError for what is not simulated, and would change the times."""
    for name, default in NOT_SIMULATED.items():
        if (value := getattr(plan.settings, name)) != default:
            raise ConfigError(f"{name} is {value!r}, which is not simulated yet")
    if plan.settings.speculative_config is not None and plan.draft_acceptance is None:
        raise ConfigError(
            "speculative_config is set, and nothing says which part of the drafts is accepted: --draft-acceptance"
        )


def _worker(fleet: FleetPlan, plan: WorkerPlan, outline: LoadedModel, time: VirtualTime, shared: FleetStore) -> Worker:
    settings = plan.settings
    pools = [
        VirtualPool(shape.block_bytes, count)
        for shape, count in zip(outline.layout.shapes, outline.kv_cache_config.num_blocks, strict=True)
    ]
    cards = [Line(plan.link) for _ in range(settings.tensor_parallel_size)]
    # rank 0 has the first connectors, as in a worker whose other ranks are processes
    (first, *of_rank_0), *others = [[_connectors(card, pool) for pool in pools] for card in cards]
    connectors = join_shapes([first, *of_rank_0])
    connectors.join(
        {(rank, shape): each for rank, shapes in enumerate(others, 1) for shape, each in enumerate(shapes)}, first.names
    )
    transfers = WorkerTransfers(settings, TransferMemory(outline.layout, connectors, pools), DEVELOPMENT_KEY)
    store: BlockStore | None = None
    if settings.kv_disk_path is not None:
        folder = VirtualFolder(time, plan.disk, settings.tensor_parallel_size)
        store = DiskStore(folder, disk_bytes(settings))
    elif settings.kv_store is not None:
        ranks = settings.tensor_parallel_size
        shared.add_segment(ranks * MooncakeUrl.parse(settings.kv_store).segment_mib << 20)
        store = SharedStore(
            shared, time, store_context(settings, outline.layout), ranks, fleet.latency_s, cards[0], Line(plan.link)
        )
    source = VirtualEngine(
        outline, settings, DEVELOPMENT_KEY, time, plan.times, transfers, plan.host, store, plan.draft_acceptance or 0.0
    )
    engine = InprocClient(
        source, in_event_loop(asyncio.get_running_loop()), transfers, lambda _: ENGINE_FAILED, engine_thread_of(time)
    )
    return Worker(settings, WorkerRole(settings.section), engine, DEVELOPMENT_KEY, CALLS, other=_ONE_ROLE)


def _connectors(card: Line, pool: VirtualPool) -> ConnectorSet:
    """Of one shape of blocks on one rank."""
    connectors = ConnectorSet([VirtualConnector("tcp", card)])
    connectors.serve(pool)
    return connectors
