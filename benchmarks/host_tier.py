"""Milliseconds to the first token of a prompt whose blocks have left the pool: loaded from a tier or computed, in turns.

Usage: python benchmarks/host_tier.py [--model FOLDER] [--load-format dummy] [--lengths 64 256 1024 2048] [--rounds 7] [--threads 1]
                                      [--decoding 4] [--host-mib 1024] [--disk FOLDER]

Loaded: the prompt was served before, then another took the whole pool, and with `--disk` others all of host memory: then it is read
from the disk, or from what the operating system caches of it. Computed: the same prompt with another salt, so that nothing of it is
found. `store`: a prompt computed in a full pool, over the same in an engine without tiers; the difference is the copy of the blocks
that it displaces; both engines use one pool, so their texts mean nothing. The last columns are a step's milliseconds of other
sequences that decode meanwhile (`--decoding`): medians of steps while a load is under way and of steps without one, and the time of
the load.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

from conditions import conditions
from msgspec.structs import replace as replace_settings

from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.client.loaded_engine import local_hasher
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.make_engine_core import make_engine_core
from pdserve.engine.ranks.rank_messages import StoreOptions
from pdserve.engine.runner.loading.loaded_model import LoadedModel, load_model
from pdserve.engine.runner.pool.open_store import StoreClaim
from pdserve.models.model_folder import model_folder

DISK_GIB = 4.0


class Asker:
    """Prompts for one engine; each name is used once."""

    def __init__(self, core: EngineCore, vocab_size: int) -> None:
        self.core = core
        self._vocab_size = vocab_size
        self._hasher = local_hasher(core.config.block_size)
        self._count = 0

    def add(self, seed: int, num_tokens: int, salt: str = "", max_tokens: int = 1) -> str:
        draw = random.Random(seed)
        prompt = [draw.randrange(3, self._vocab_size) for _ in range(num_tokens)]
        root = self._hasher.root("host tier", salt)
        self._count += 1
        name = f"r{self._count}"
        self.core.add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
                hash_root=root,
                block_hashes=self._hasher.extend(root, prompt),
                prefill_here=True,
            )
        )
        return name

    def first_token_ms(self, seed: int, num_tokens: int, salt: str = "") -> float:
        """Serve a prompt alone."""
        started = time.perf_counter()
        self.add(seed, num_tokens, salt)
        while self.core.scheduler.requests:
            self.core.step()
        return (time.perf_counter() - started) * 1e3

    def settle(self) -> None:
        """Until nothing is written to a disk any more."""
        while self.core.has_work:
            self.core.step()
            time.sleep(0.001)

    @property
    def num_loaded(self) -> int:
        """Blocks that came from a tier."""
        tier, store = self.core.scheduler.pool.tier, self.core.scheduler.pool.store
        return (0 if tier is None else tier.num_loaded) + (0 if store is None else store.num_read)


def make_core(loaded: LoadedModel, settings: WorkerSettings, store: StoreOptions | None = None) -> EngineCore:
    return make_engine_core(
        loaded.engine_config(settings),
        loaded.decoder,
        loaded.kv_caches,
        local_hasher(settings.block_size),
        loaded.decoder.config.vocab_size,
        host_caches=loaded.host_caches,
        store=store,
    )


def steps_during_load(asker: Asker, seed: int, num_tokens: int, num_decoding: int) -> tuple[float, float, float]:
    """(milliseconds of a step during a load, of one without, of the load) while other sequences decode."""
    names = {asker.add(10**6 + number, 16, max_tokens=64) for number in range(num_decoding)}
    for _ in range(8):
        asker.core.step()
    during, without = list[float](), list[float]()
    began = time.perf_counter()
    asker.add(seed, num_tokens)
    loading_s = 0.0
    while len(without) < 20:
        started = time.perf_counter()
        asker.core.step()
        step_ms = (time.perf_counter() - started) * 1e3
        if asker.core.is_loading:
            during.append(step_ms)
            loading_s = time.perf_counter() - began
        elif loading_s:
            without.append(step_ms)
    for name in names:
        asker.core.abort_request(name)
    while asker.core.has_work:
        asker.core.step()
    return statistics.median(during), statistics.median(without[2:]), loading_s * 1e3


def measure(args: argparse.Namespace, folder: Path, length: int) -> None:
    num_blocks = 2 * -(-length // 16) + 40
    settings = WorkerSettings(
        load_format=args.load_format,
        num_threads=args.threads,
        num_blocks=num_blocks,
        kv_host_mib=args.host_mib,
        kv_disk_path=args.disk,
        kv_disk_gib=0.0 if args.disk is None else DISK_GIB,
        max_model_len=num_blocks * 16,
        max_num_batched_tokens=512,
        max_num_seqs=16,
    )
    loaded = load_model(folder, settings)
    vocab_size = loaded.decoder.config.vocab_size
    claim = None if args.disk is None else StoreClaim(settings, loaded.layout, DEVELOPMENT_KEY)
    asker = Asker(make_core(loaded, settings, None if claim is None else claim.options), vocab_size)
    plain, plain_settings = replace(loaded, host_caches=()), replace_settings(settings, kv_disk_path=None)
    times: dict[str, list[float]] = {"loaded": [], "computed": [], "full": [], "full without": []}
    meanwhile: list[tuple[float, float, float]] = []
    fresh = 1000
    asker.first_token_ms(1, length)
    asker.first_token_ms(1, length)
    without = Asker(make_core(plain, plain_settings), vocab_size)
    # what is in host memory has to leave it, too
    num_displaced = 1 if claim is None else 1 - (-loaded.host_caches[0].shape[0] // num_blocks)

    def displace(one: Asker) -> None:
        nonlocal fresh
        for _ in range(num_displaced):
            fresh += 1
            one.first_token_ms(fresh, num_blocks * 16 - 1)
            one.settle()

    displace(asker)
    displace(without)
    for turn in range(args.rounds + 1):
        before = asker.num_loaded
        times["loaded"].append(asker.first_token_ms(1, length))
        assert asker.num_loaded - before >= (length - 1) // 16, "it was not loaded"
        displace(asker)
        before = asker.num_loaded
        times["computed"].append(asker.first_token_ms(1, length, f"turn {turn}"))
        assert asker.num_loaded == before
        displace(asker)
        for name, one in (("full", asker), ("full without", without)):
            fresh += 1
            times[name].append(one.first_token_ms(fresh, length))
        if args.decoding:
            meanwhile.append(steps_during_load(asker, 1, length, args.decoding))
            displace(asker)
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    num_bytes = (length - 1) // 16 * loaded.layout.place_bytes
    during, usual, load_ms = (
        (statistics.median(column) for column in zip(*meanwhile[1:], strict=True)) if meanwhile else (math.nan,) * 3
    )
    print(
        f"{length:6} | {num_bytes / 2**20:7.1f} | {medians['loaded']:8.2f} | {medians['computed']:8.2f} | "
        f"{medians['computed'] / medians['loaded']:6.1f} | {medians['full'] / medians['full without']:.3f} | "
        f"{during:6.2f} | {usual:6.2f} | {load_ms:6.2f}",
        flush=True,
    )
    for one in (asker, without):
        one.core.scheduler.check(idle=True)
        one.core.executor.close()
    loaded.close()
    if claim is not None:
        claim.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--decoding", type=int, default=4)
    parser.add_argument("--host-mib", type=int, default=1024)
    parser.add_argument("--disk", help="a folder; --host-mib then is a few blocks, so that they leave host memory soon")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    folder = model_folder(args.model)
    for name, value in conditions().items():
        print(f"{name}: {value}")
    print(args)
    print(
        "tokens | MiB | loaded, ms | computed, ms | ratio | store | step during, ms | step without, ms | load meanwhile, ms"
    )
    for length in args.lengths:
        measure(args, folder, length)


if __name__ == "__main__":
    main()
