"""One greedy tenant beside nine quiet ones, on a simulated clock: the router's admission in front of a simulated engine.

The engine steps as in `paced_worker.py`: `STEP_S`, and `TOKEN_S` per token; decoding sequences come first, then prompts in order of
arrival, at most `STEP_TOKENS` per step. Only the router decides how long the nine wait, so the results are the same on every
machine. `fairness.py` measures the same with processes on a real machine.

Usage: python benchmarks/fair_share.py [--seconds 600] [--out results/fair_share.txt]
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from paced_worker import STEP_S, TOKEN_S

from pdserve.common.errors import Overloaded
from pdserve.router.admission.admission import Admission
from pdserve.router.admission.place import AdmissionLimits, Capacity, Cost, Place
from pdserve.router.tenants.client import Client

NUM_QUIET, NUM_PLACES, STEP_TOKENS, GREEDY_AT_ONCE = 9, 64, 512, 160
PROMPT_TOKENS, OUTPUT_TOKENS = (32, 96), (16, 48)
WARM_UP_S = 20.0
SEED = 11


@dataclass(eq=False)
class Asked:
    """One request of a tenant."""

    tenant: str
    came_s: float
    prompt: int
    output: int
    left: int = 0
    """Prompt tokens still to compute."""
    produced: int = 0
    placed_s: float = 0.0
    first_s: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    place: Place | None = None


class World:
    """Admission, engine and clock."""

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.draw = random.Random(seed)
        self.done: list[Asked] = []
        self.num_refused = 0
        self._prompts: deque[Asked] = deque()
        self._decoding: list[Asked] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.door = Admission(
            AdmissionLimits(max_queued_requests=1024, queue_timeout_s=1e9),
            lambda: Capacity(
                num_requests=NUM_PLACES,
                waiting_tokens=sum(asked.left for asked in self._prompts),
                prefill_tokens_per_s=1 / TOKEN_S,
            ),
            num_tenants=lambda: NUM_QUIET + 1,
            clock=lambda: self.now_s,
        )

    def ask(self, tenant: str) -> Asked | None:
        """Make a request; None if it is refused."""
        client, expel = Client(key_name=tenant, tenant=tenant), lambda: None
        asked = Asked(tenant, self.now_s, self.draw.randint(*PROMPT_TOKENS), self.draw.randint(*OUTPUT_TOKENS))
        try:
            self.door.enter(1, expel, client=client)
        except Overloaded:
            self.num_refused += 1
            return None
        task = asyncio.create_task(self._serve(asked, client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self.door.leave(1, expel, client=client))
        return asked

    async def _serve(self, asked: Asked, client: Client) -> None:
        async with self.door.place(Cost(num_tokens=asked.prompt, max_tokens=asked.output), client=client) as place:
            asked.placed_s, asked.place, asked.left = self.now_s, place, asked.prompt
            self._prompts.append(asked)
            place.placed()
            await asked.ended.wait()
        self.done.append(asked)

    async def settle(self) -> None:
        """Run the event loop until nothing more happens at the current time."""
        for _ in range(8):
            await asyncio.sleep(0)

    def begin_step(self) -> tuple[float, list[Asked]]:
        """(seconds of the step, sequences that get a token at its end)."""
        budget = STEP_TOKENS - len(self._decoding)
        num_tokens, ready = len(self._decoding), list(self._decoding)
        while self._prompts and budget:
            asked = self._prompts[0]
            chunk = min(asked.left, budget)
            asked.left -= chunk
            budget -= chunk
            num_tokens += chunk
            if not asked.left:
                ready.append(self._prompts.popleft())
        return STEP_S + TOKEN_S * num_tokens, ready

    def end_step(self, ready: list[Asked]) -> None:
        """Give each of these sequences a token."""
        for asked in ready:
            asked.produced += 1
            if asked.place is not None:
                asked.place.produced(1)
            if asked.produced == 1:
                asked.first_s = self.now_s
                self._decoding.append(asked)
            if asked.produced == asked.output:
                self._decoding.remove(asked)
                asked.ended.set()
        self.door.recheck()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def run(seconds: float, per_s: float, *, greedy: bool) -> World:
    """per_s: requests of each quiet tenant."""
    world, arrivals = World(SEED), random.Random(SEED)
    coming = [(arrivals.expovariate(per_s), f"quiet-{number}") for number in range(NUM_QUIET)] if per_s else []
    heapq.heapify(coming)
    open_greedy: list[Asked] = []
    while world.now_s < seconds:
        step_s, ready = world.begin_step()
        end_s = world.now_s + step_s
        while coming and coming[0][0] < end_s:
            world.now_s, tenant = heapq.heappop(coming)
            world.ask(tenant)
            heapq.heappush(coming, (world.now_s + arrivals.expovariate(per_s), tenant))
            await world.settle()
        world.now_s = end_s
        world.end_step(ready)
        await world.settle()
        open_greedy = [asked for asked in open_greedy if not asked.ended.is_set()]
        while greedy and len(open_greedy) < GREEDY_AT_ONCE and (asked := world.ask("greedy")) is not None:
            open_greedy.append(asked)
        await world.settle()
    await world.close()
    return world


def part_of(values: list[float], part: float) -> float:
    return sorted(values)[int(part * len(values))] if values else 0.0


def line(name: str, done: list[Asked]) -> str:
    ttft = [asked.first_s - asked.came_s for asked in done]
    queue = [asked.placed_s - asked.came_s for asked in done]
    shown = "  ".join(f"p{part * 100:g} {part_of(ttft, part) * 1e3:7.1f} ms" for part in (0.5, 0.9, 0.99))
    return (
        f"{name:<28} served {len(done):6d}  TTFT {shown}  queue in the router p99 {part_of(queue, 0.99) * 1e3:7.1f} ms"
    )


async def measure(seconds: float) -> list[str]:
    """The lines of the result."""
    alone = await run(WARM_UP_S + 60.0, 0.0, greedy=True)
    requests_per_s = sum(asked.came_s > 0 and asked.first_s > WARM_UP_S for asked in alone.done) / 60.0
    per_s = 0.5 * requests_per_s / (NUM_QUIET + 1)
    worlds = {greedy: await run(seconds, per_s, greedy=greedy) for greedy in (False, True)}
    quiet = {
        greedy: [asked for asked in world.done if asked.tenant != "greedy" and asked.came_s > WARM_UP_S]
        for greedy, world in worlds.items()
    }
    others = [asked for asked in worlds[True].done if asked.tenant == "greedy" and asked.came_s > WARM_UP_S]
    p99 = {greedy: part_of([asked.first_s - asked.came_s for asked in done], 0.99) for greedy, done in quiet.items()}
    tokens = {
        "of the nine": sum(asked.prompt + asked.output for asked in quiet[True]),
        "of the greedy": sum(asked.prompt + asked.output for asked in others),
    }
    return [
        f"the greedy tenant alone: {requests_per_s:.1f} requests/s; each of the {NUM_QUIET} offers {per_s:.2f} requests/s",
        line("nine without the greedy one", quiet[False]),
        line("nine beside the greedy one", quiet[True]),
        line("the greedy one beside them", others),
        f"TTFT p99 of the nine: {p99[True] / p99[False]:.2f} times that without the greedy one",
        ", ".join(f"{number} tokens {name}" for name, number in tokens.items()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shape = (
        f"simulated {options.seconds:g} s: {NUM_PLACES} places, steps of {STEP_S * 1e3:g} ms and {TOKEN_S * 1e3:g} ms for each "
        f"of at most {STEP_TOKENS} tokens, prompts of {PROMPT_TOKENS[0]} to {PROMPT_TOKENS[1]} tokens, outputs of "
        f"{OUTPUT_TOKENS[0]} to {OUTPUT_TOKENS[1]}"
    )
    text = "\n".join([shape, "", *asyncio.run(measure(options.seconds))]) + "\n"
    sys.stdout.write(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
