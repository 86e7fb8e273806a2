"""Faults at random moments under load, alone or two at once: every answer stays what an undisturbed run gives.

The kill matrix holds a worker in a known phase; here nothing is held, so faults meet each other's aftermath: a worker
that comes back, a cache that others filled, a transfer that goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.draft_heads import DraftHeadModel
from tests.support.models.family_checkpoints import (
    make_chunked_model,
    make_latent_model,
    make_mixed_model,
    make_state_model,
    make_windowed_model,
)
from tests.support.models.lora_adapters import adapter_flags
from tests.support.models.real_weights import real_folder
from tests.support.processes.cluster_processes import running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.mooncake_master import mooncake_master
from tests.support.processes.prepared_children import ENGINE_PROCESS, RANK_1

from .chaos_load import ALL_REMOTE, FLAGS, MOVES, Load
from .prepared_worker import PREPARED_WORKER
from .worker_faults import (
    PART_KILLED,
    PART_STOPPED,
    WAYS,
    WORKERS,
    check_whole,
    hurt,
    parts_of,
    role_of,
)

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(600)]

PIECES = {"decode-2": ("--stream-interval=3",)}
"""An answer that goes on elsewhere may come in pieces of another size."""
HOST_TIER = ("num_blocks=60", "kv_host_mib=16")
"""Pools of a few sequences, and behind them room for all blocks."""
BLOCKS_OF_GROUPS, NUM_GROUPS = 16, 4
"""Memory of all layers, and the groups of the model with windows: the pool has 64 blocks, of which the longest sequence has 40."""
DRAFTS = {"num_speculative_tokens": 3, "disable_by_batch_size": 6}
"""None while many sequences run; they are of the model itself, and so nearly always right, or of its draft head."""
DISK = (*HOST_TIER, "kv_disk_gib=0.1", "kv_disk_path={folder}/disk")
STORE = (*HOST_TIER, "kv_store={store}")
WRITTEN = "pdserve_kv_store_blocks_written_total"
LOADED = "pdserve_kv_host_blocks_loaded_total"
ACCEPTED = "pdserve_spec_decode_num_accepted_tokens_total"
OF_PARTS = (*WAYS, PART_KILLED, PART_STOPPED)


@dataclass(frozen=True)
class Run:
    """A cluster, and its faults."""

    seed: int
    connector: str = "tcp"
    at_once: int = 1
    placement: Sequence[str] = ()
    settings: Sequence[str] = ()
    """Given to all workers; `{folder}` is a folder of the run, `{store}` the address of a shared store."""
    adapters: Sequence[str] = ()
    drafts: bool = False
    model: str = "llama"
    """One of `MODELS`."""
    lacking: Sequence[str] = ()
    """Workers without the draft head of the model."""
    parts: frozenset[str] = frozenset()
    """Names of the processes that each worker has beside its first one."""
    moves: bool = False
    """Running sequences and cached blocks move all the time."""
    num_rounds: int = 10
    used: Sequence[str] = ()
    """Counters of workers that show that the feature was in use."""
    without: Sequence[str] = ()
    """Requests whose texts depend on whether a token was prefilled or decoded: sums in another order change roundings to 8 bits,
    and log-probabilities of this model by up to 0.12."""

    def flags(self, model: Path, worker: str, folder: Path, store: str) -> list[str]:
        places = {"folder": folder, "store": store}
        settings = [f"connector={self.connector}", *(setting.format(**places) for setting in self.settings)]
        if self.model == "windows":
            settings.append(f"num_blocks={BLOCKS_OF_GROUPS}")
        if self.drafts:
            settings.append(f"speculative_config={json.dumps(DRAFTS | {'model': str(model)})}")
        if self.model == "head" and worker not in self.lacking:
            settings.append(f"speculative_config={json.dumps(DRAFTS | {'method': 'mtp'})}")
        return [f"--{setting}" for setting in settings]


MODELS: dict[str, Callable[[Path], Path]] = {
    "real": lambda folder: real_folder("smollm2"),
    "head": lambda folder: DraftHeadModel(folder).folder,
    "windows": make_windowed_model,
    "latent": make_latent_model,
    "states": lambda folder: make_state_model(folder, "qwen3_next"),
    "states alone": lambda folder: make_state_model(folder, "mamba2"),
    "mixed": make_mixed_model,
    "chunks": make_chunked_model,
}
"""Of each kind of KV cache groups one: name -> makes it in a folder. Not among them: `llama`."""
_NAMES = ("one", "two", "three")
_PROCESS, _RANKS = frozenset({ENGINE_PROCESS}), frozenset({RANK_1})
# a worker whose engine has processes of its own starts in seconds, so there are fewer rounds
RUNS = {
    "tcp": Run(1, num_rounds=15),
    "nixl-remote": Run(2, "nixl", placement=ALL_REMOTE, num_rounds=15),
    "tcp-remote-two": Run(3, at_once=2, placement=ALL_REMOTE, num_rounds=15),
    "nixl-two": Run(4, "nixl", at_once=2, num_rounds=15),
    "tcp-remote-tier": Run(5, placement=ALL_REMOTE, settings=HOST_TIER, num_rounds=15, used=(LOADED,)),
    "tcp-tier-disk": Run(27, settings=DISK, num_rounds=15, used=(LOADED, WRITTEN)),
    "tcp-tier-store": Run(32, settings=STORE, num_rounds=15, used=(LOADED, WRITTEN)),
    "nixl-remote-tier-store-two": Run(
        33, "nixl", at_once=2, placement=ALL_REMOTE, settings=STORE, num_rounds=15, used=(LOADED, WRITTEN)
    ),
    "adapters": Run(5, adapters=_NAMES, num_rounds=15),
    "adapters-remote-two": Run(6, at_once=2, placement=ALL_REMOTE, adapters=_NAMES, num_rounds=15),
    "drafts": Run(7, drafts=True, used=(ACCEPTED,)),
    "drafts-nixl-two": Run(8, "nixl", at_once=2, placement=ALL_REMOTE, drafts=True, used=(ACCEPTED,)),
    "head": Run(19, model="head", used=(ACCEPTED,)),
    "head-lacking-remote-two": Run(
        20, at_once=2, placement=ALL_REMOTE, model="head", lacking=("prefill-2", "decode-2"), used=(ACCEPTED,)
    ),
    "ranks": Run(9, settings=("tensor_parallel_size=2",), parts=_RANKS, num_rounds=6),
    "ranks-drafts-tier-remote-two": Run(
        15,
        at_once=2,
        placement=ALL_REMOTE,
        settings=("tensor_parallel_size=2", *HOST_TIER),
        drafts=True,
        parts=_RANKS,
        num_rounds=6,
        used=(ACCEPTED, LOADED),
    ),
    "engine-process": Run(10, settings=("engine_process=true",), parts=_PROCESS, num_rounds=6),
    "engine-process-nixl-two": Run(
        11, "nixl", at_once=2, placement=ALL_REMOTE, settings=("engine_process=true",), parts=_PROCESS, num_rounds=6
    ),
    "int8-weights": Run(12, settings=("quantization=int8",), without=("penalties",)),
    "int8-cache": Run(13, settings=("kv_cache_dtype=int8",)),
    "int8-remote-two": Run(
        14,
        at_once=2,
        placement=ALL_REMOTE,
        settings=("quantization=int8", "kv_cache_dtype=int8"),
        without=("penalties",),
    ),
    "real-weights": Run(16, model="real", num_rounds=6),
    "groups": Run(17, model="windows"),
    "groups-tier-remote-two": Run(
        18, at_once=2, placement=ALL_REMOTE, model="windows", settings=("kv_host_mib=16",), used=(LOADED,)
    ),
    "latent-remote-two": Run(21, at_once=2, placement=ALL_REMOTE, model="latent"),
    "states": Run(22, model="states"),
    "states-remote-two": Run(23, at_once=2, placement=ALL_REMOTE, model="states"),
    "states-alone": Run(24, model="states alone"),
    "mixed-remote-two": Run(25, at_once=2, placement=ALL_REMOTE, model="mixed"),
    "chunks-remote-two": Run(26, at_once=2, placement=ALL_REMOTE, model="chunks"),
    "moves": Run(27, moves=True),
    "moves-nixl-remote-two": Run(28, "nixl", at_once=2, placement=ALL_REMOTE, moves=True),
    "moves-drafts-tier": Run(29, moves=True, drafts=True, settings=HOST_TIER, used=(ACCEPTED, LOADED)),
    "moves-states-two": Run(30, at_once=2, model="states", moves=True),
    "moves-head-lacking": Run(31, moves=True, model="head", lacking=("decode-2",), used=(ACCEPTED,)),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
async def test_i4_faults_at_random_moments_change_no_answer(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path, run: Run
) -> None:
    if run.connector == "nixl":
        pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    base = (
        tiny_checkpoints("llama", num_hidden_layers=4)
        if run.model == "llama"
        else MODELS[run.model](tmp_path / "model")
    )
    model, draw = str(base), random.Random(run.seed)
    lora = adapter_flags(tmp_path / "adapters", base, *run.adapters) if run.adapters else ()
    ways = OF_PARTS if run.parts else WAYS
    with ExitStack() as stack:
        master = stack.enter_context(mooncake_master(tmp_path)) if STORE[-1] in run.settings else None
        store = "" if master is None else master.url(segment_mib=16)
        cluster = stack.enter_context(running_cluster(tmp_path, PREPARED_WORKER))
        for name in WORKERS:
            flags = ["--model", model, *FLAGS, *run.flags(base, name, tmp_path, store), *PIECES.get(name, ()), *lora]
            cluster.launch_worker(role_of(name), *flags, name=name)
        addresses: dict[str, Any] = {"prefill": [], "decode": []}
        for name in WORKERS:
            cluster.wait_for_worker(cluster.services[name])
            addresses[role_of(name)].append(cluster.services[name].address)
            assert run.parts == set(parts_of(cluster.services[name]).values())
            if run.model == "windows":
                assert cluster.load(cluster.services[name]).blocks_total == BLOCKS_OF_GROUPS * NUM_GROUPS
        moves = MOVES if run.moves else ()
        cluster.start_router("--model", model, *run.placement, *moves, **addresses)
        async with InferenceClient(cluster.router.address) as client:
            load = Load(
                client,
                run.seed,
                sessions=run.placement != ALL_REMOTE,
                models=("", *run.adapters),
                without=run.without,
            )
            await load.learn()
            load.begin()
            for _ in range(run.num_rounds):
                await asyncio.sleep(draw.uniform(0.0, 0.6))
                if master is not None and draw.random() < 0.3:
                    master.kill()
                    await asyncio.to_thread(master.start)
                victims = [draw.choice(WORKERS[:2]), draw.choice(WORKERS[2:])]  # never all of a role
                faults = [(cluster.services[name], draw.choice(ways)) for name in draw.sample(victims, run.at_once)]
                with load.sessions_may_be_lost(any(victim.role == "decode" for victim, _ in faults)):
                    await asyncio.gather(*(hurt(cluster, victim, way, draw) for victim, way in faults))
                    await load.answered()
            await load.end()
        assert load.num_answers > 10 * run.num_rounds
        assert load.num_sessions or run.placement == ALL_REMOTE
        for name in run.used:
            assert sum(cluster.metric(cluster.services[worker], name) for worker in WORKERS) > 0, name
        moved = cluster.metric(cluster.router, "pdserve_migrations_total", 'outcome="moved"')
        assert not run.moves or moved > 5 * run.num_rounds
        check_whole(cluster)
