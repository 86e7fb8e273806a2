"""`place`: chooses the workers of an attempt, by pure functions over the state of the workers.

Decode is chosen first, then prefill among the workers whose blocks decode can read. Costs are in blocks of 16 tokens,
independent of a worker's block size, so that workers of one model can be compared:

    load  = prompt tokens still to compute there + 1/4 * tokens in the blocks that its running requests hold
    cost  = load + 2 * tokens of this prompt that are not cached there

This prompt's own tokens count twice, because this request and later ones wait for them. A held block has a weight of 1/4, because
reading it in each step costs less than computing it. With a weight of 1, one running request would outweigh the prefix that it
shares with the next, and prefixes would be spread over all workers.

    kv_aware       lowest cost         least_loaded   lowest load         round_robin    the next in turn

Where a worker would have to load the request's adapter, 64 blocks are added to its load.

Of workers with equal cost, the one that this router has used least is chosen.

D prefills although a prefill worker exists, if the estimates say that it is faster. With u tokens of the prompt uncached at D, and
the workers' measured rates in prompt tokens per second:

    local(u)  = (waiting at D + u * (2 + requests at D)) / rate of D
    remote(u) = (waiting at P + uncached at P) / rate of P + u * bytes of a token / bandwidth

Neither contains a step's cost apart from its prompt tokens: both need a step.

While D prefills, every request at D stalls, so the time counts once for each of them, once for the prompt itself, and once for
requests that arrive meanwhile: with an idle D and an idle P of equal speed, P prefills. The attempt contains the u at which both
estimates are equal, and D compares it with its actual cache. An unknown rate is taken to be that of the other worker. If both are
unknown, D prefills at most the last block of a prompt whose other blocks it has.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import msgspec

from pdserve.common.errors import InternalError
from pdserve.common.kv_events import WorkerKey
from pdserve.common.kv_layout import KvLayout
from pdserve.common.protocol import works_with
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.workers.worker import LoadEstimate, RemoteWorker

LocalPrefill = Literal["never", "auto", "always"]
PolicyName = Literal["kv_aware", "least_loaded", "round_robin"]

COST_BLOCK_TOKENS = 16
"""The unit of cost."""
HELD_WEIGHT = 0.25
UNCACHED_WEIGHT = 2.0
LORA_LOAD_BLOCKS = 64
"""Cost of an adapter's way into a slot of a worker, where another one may lose its own."""
_DECODE_GROWTH_BLOCKS = 1
"""Expected load that a request adds at decode before the next report."""


class PlacementHint(enum.Enum):
    """Restriction of the next placement by earlier attempts of the request."""

    ANY = "any"
    LOCAL = "local"
    """Decode prefills, because a transfer failed before."""
    REMOTE = "remote"
    """Use a prefill worker, because decode required one or evicted the request."""
    SESSION = "session"
    """Decode prefills a prompt of any length, because the KV of a session is never transferred."""


class BlockRead(msgspec.Struct, frozen=True, kw_only=True):
    """Cached blocks that one worker reads from another."""

    source: RemoteWorker
    limit_s: float
    """Seconds after which the reader does without what has not come."""


class BlockMove(BlockRead, frozen=True, kw_only=True):
    """Blocks that the worker of an attempt reads from another one before it computes the rest."""

    num_blocks: int
    """Places of the prompt that the source has and the reader has not, by their reports."""
    num_bytes: int
    """Of the blocks in these places."""
    num_tokens: int
    """Tokens of the prompt's beginning that the reader has afterwards."""
    base_s: float
    """`move` without the spread."""
    move_s: float
    compute_s: float | None
    """None if the reader's rate is unknown."""

    @property
    def pays(self) -> bool:
        """True if it is expected to take less time than computing the blocks."""
        return self.compute_s is not None and self.move_s < self.compute_s


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A worker with its load and its cached part of one prompt."""

    worker: RemoteWorker
    num_tokens: int
    """Tokens of the prompt, and the positions of its sound with their padding."""
    overlap_blocks: int = 0
    """Blocks of the prompt's longest prefix that it has, including blocks of prompts that were just routed there."""
    confirmed_blocks: int = 0
    """The part of it that the worker has reported."""
    loads_adapter: bool = False
    """True if it would have to load the request's adapter, by its last report."""
    move: BlockMove | None = None
    """Blocks that it would read from another worker, if it computed the prompt."""

    @property
    def block_size(self) -> int:
        return self.worker.identity.layout.block_size

    @property
    def uncached_tokens(self) -> int:
        """Tokens of this prompt to compute, at least its last one; a move counts as what could be computed in its time."""
        num_tokens = self.num_tokens - self.overlap_blocks * self.block_size
        if self.move is not None:
            num_tokens -= self.move.num_blocks * self.block_size
            num_tokens += int(self.move.move_s * self.worker.prefill_tokens_per_s)
        return max(1, num_tokens)

    @property
    def unconfirmed_tokens(self) -> int:
        """Uncached tokens, counting only blocks that the worker has reported."""
        return max(1, self.num_tokens - self.confirmed_blocks * self.block_size)

    @property
    def load_blocks(self) -> float:
        tokens = self.worker.waiting_tokens + HELD_WEIGHT * self.worker.held_blocks * self.block_size
        return tokens / COST_BLOCK_TOKENS + (LORA_LOAD_BLOCKS if self.loads_adapter else 0)

    @property
    def cost_blocks(self) -> float:
        return self.load_blocks + UNCACHED_WEIGHT * self.uncached_tokens / COST_BLOCK_TOKENS

    def _held_blocks(self, num_cached: int) -> int:
        """Blocks of this prompt after the first `num_cached` places, of all KV cache groups together."""
        return self.worker.num_prompt_blocks(self.num_tokens, num_cached)

    def share(self, *, prefills: bool, grows: bool) -> LoadEstimate:
        """Load that this prompt adds to the worker. prefills: it is computed here. grows: it is decoded here."""
        growth = _DECODE_GROWTH_BLOCKS if grows else 0
        return LoadEstimate(
            calls=1,
            tokens=self.uncached_tokens if prefills else 0,
            all_blocks=self._held_blocks(0) + growth,
            new_blocks=self._held_blocks(self.overlap_blocks) + growth,
        )


Policy = Callable[[Sequence[Candidate], int], Candidate]
"""(candidates, at least one; number of earlier choices for their role) -> the chosen candidate"""


def kv_aware(candidates: Sequence[Candidate], turn: int) -> Candidate:
    """The candidate with the lowest cost."""
    return min(candidates, key=lambda candidate: (candidate.cost_blocks, candidate.worker.num_placed))


def least_loaded(candidates: Sequence[Candidate], turn: int) -> Candidate:
    """The candidate with the lowest load, regardless of its cache."""
    return min(candidates, key=lambda candidate: (candidate.load_blocks, candidate.worker.num_placed))


def round_robin(candidates: Sequence[Candidate], turn: int) -> Candidate:
    """The candidates in turn."""
    return sorted(candidates, key=lambda candidate: candidate.worker.key)[turn % len(candidates)]


POLICIES: Mapping[PolicyName, Policy] = {
    "kv_aware": kv_aware,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
}


class Estimates(msgspec.Struct, frozen=True, kw_only=True):
    """Expected time of prefilling at decode and at prefill, seconds; see the module's formulas."""

    local_s: float | None = None
    """None while both rates are unknown."""
    remote_s: float | None = None
    """None while both rates are unknown."""
    limit_tokens: int = 0
    """Uncached tokens up to which decode should prefill itself."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt's workers. Without `prefill`, decode prefills; without `decode`, only one token is requested."""

    prefill: RemoteWorker | None = None
    decode: RemoteWorker | None = None
    prefill_share: LoadEstimate = LoadEstimate(calls=1)
    decode_share: LoadEstimate = LoadEstimate(calls=1)
    prefill_here: bool = False
    """True if no prefill worker is live, so that decode must not require one."""
    local_prefill_tokens: int | None = None
    """Tokens uncached at decode up to which decode should prefill itself; None: the choice is final."""
    estimates: Estimates | None = None
    """Estimates of local and remote prefill, if they were compared."""
    move: BlockMove | None = None
    """Cached blocks of the prompt that the worker that computes it reads from another one."""
    source: RemoteWorker | None = None
    """The worker whose sequence `decode` continues; without `prefill`."""

    @property
    def kind(self) -> str:
        """`remote`, `local`, `migration` or `prefill-only`."""
        if self.decode is None:
            return "prefill-only"
        if self.source is not None:
            return "migration"
        return "local" if self.prefill is None else "remote"

    @property
    def layout(self) -> KvLayout:
        """Layout of the workers' blocks; both have the same."""
        return self._last.identity.layout

    @property
    def sampler_version(self) -> int:
        """Sampler version of the worker that samples the last token."""
        return self._last.identity.sampler_version

    @property
    def sampler_versions(self) -> set[int]:
        """Sampler versions of all workers that sample: prefill the first token, decode the others."""
        return {worker.identity.sampler_version for worker in (self.prefill, self.decode) if worker is not None}

    @property
    def _last(self) -> RemoteWorker:
        worker = self.decode or self.prefill
        if worker is None:
            raise InternalError("a placement without workers")
        return worker


class PlacementRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of a placement, other than the state of the workers."""

    policy: PolicyName = "kv_aware"
    local_prefill: LocalPrefill = "auto"
    hint: PlacementHint = PlacementHint.ANY
    blamed: Collection[WorkerKey] = ()
    """Workers to avoid while there are others."""
    sampler_version: int | None = None
    """Prefer workers with this sampler version, so that a sampled text continues as it began; None: no preference."""
    data_parallel_rank: int | None = None
    """Prefer decode workers of this rank, after the other preferences; None: no preference."""
    turns: Mapping[WorkerRole, int] = {}
    """Role -> number of earlier choices."""
    bytes_per_s: float = 1e9
    """Bandwidth of KV transfers."""


def place(
    max_tokens: int, *, prefill: Sequence[Candidate], decode: Sequence[Candidate], rules: PlacementRules
) -> Placement | None:
    """Workers for a prompt, or None while none can serve it.

    prefill, decode: live workers.
    """
    if rules.hint is PlacementHint.SESSION:
        if rules.local_prefill == "never":
            return None
        at = choose(decode, WorkerRole.DECODE, rules)
        return None if at is None else Placement(decode=at.worker, decode_share=at.share(prefills=True, grows=True))
    if max_tokens == 1 and rules.local_prefill != "always":
        # instead of a blamed prefill worker, decode prefills if it may
        if alone := place_prefill(prefill, rules, strict=bool(decode) and rules.local_prefill != "never"):
            return alone
        if rules.local_prefill == "never":
            return None
    if rules.local_prefill == "never":
        decode = [candidate for candidate in decode if compatible_prefill_workers(candidate, prefill)]
    chosen = choose(decode, WorkerRole.DECODE, rules)
    if chosen is None:
        return None
    sources = compatible_prefill_workers(chosen, prefill)
    decode_share = chosen.share(prefills=True, grows=True)
    here = Placement(decode=chosen.worker, decode_share=decode_share, move=chosen.move)
    if not sources:
        return msgspec.structs.replace(here, prefill_here=True)
    may_prefill = _may_prefill(chosen, rules)
    if may_prefill and (rules.local_prefill == "always" or rules.hint is PlacementHint.LOCAL):
        return here
    must = rules.local_prefill == "never" or rules.hint is PlacementHint.REMOTE
    source = choose(sources, WorkerRole.PREFILL, rules, strict=not must)
    if source is None:
        return here
    if must:
        return _remote(source, chosen)
    estimates = estimate(chosen, source, rules.bytes_per_s)
    if may_prefill and _prefers_local(chosen, estimates):
        return msgspec.structs.replace(here, local_prefill_tokens=estimates.limit_tokens, estimates=estimates)
    remote = _remote(source, chosen)
    return msgspec.structs.replace(remote, local_prefill_tokens=estimates.limit_tokens, estimates=estimates)


def place_migration(source: RemoteWorker, decode: Sequence[Candidate], rules: PlacementRules) -> Placement | None:
    """A decode worker that continues a sequence of another one; None if there is none.

    decode: those that may be chosen.
    """
    chosen = choose(
        [each for each in decode if each.worker is not source and _can_read(each, source)], WorkerRole.DECODE, rules
    )
    if chosen is None:
        return None
    return Placement(decode=chosen.worker, decode_share=chosen.share(prefills=False, grows=True), source=source)


def place_prefill(prefill: Sequence[Candidate], rules: PlacementRules, *, strict: bool = False) -> Placement | None:
    """A prefill worker for a request without tokens to decode, regardless of `local_prefill`; None if there is none."""
    chosen = choose(prefill, WorkerRole.PREFILL, rules, strict=strict)
    if chosen is None:
        return None
    prefill_share = chosen.share(prefills=True, grows=False)
    return Placement(prefill=chosen.worker, prefill_share=prefill_share, move=chosen.move)


def choose(
    candidates: Sequence[Candidate], role: WorkerRole, rules: PlacementRules, *, strict: bool = False
) -> Candidate | None:
    """The policy's choice. A blamed worker is chosen only if there is no other, and never with `strict`."""
    fresh = [candidate for candidate in candidates if candidate.worker.key not in rules.blamed]
    left = fresh if fresh or strict else candidates
    alike = [candidate for candidate in left if candidate.worker.identity.sampler_version == rules.sampler_version]
    left = alike or left
    if role is WorkerRole.DECODE and (rank := rules.data_parallel_rank) is not None:
        left = [candidate for candidate in left if candidate.worker.identity.data_parallel_rank == rank] or left
    return POLICIES[rules.policy](left, rules.turns.get(role, 0)) if left else None


def compatible_prefill_workers(decode: Candidate, prefill: Sequence[Candidate]) -> list[Candidate]:
    """The prefill workers whose KV blocks `decode` can read."""
    return [candidate for candidate in prefill if _can_read(decode, candidate.worker)]


def _can_read(reader: Candidate, source: RemoteWorker) -> bool:
    own, other = reader.worker.identity, source.identity
    return not other.layout.differences(own.layout) and works_with(other.protocol_version, own.protocol_version)


def estimate(decode: Candidate, source: Candidate, bytes_per_s: float) -> Estimates:
    """Compare prefilling at `decode` with prefilling at `source`; see the module's formulas."""
    local_rate, remote_rate = decode.worker.load.prefill_tokens_per_s, source.worker.load.prefill_tokens_per_s
    # who never computes a prompt is never measured: both are taken for equally fast until one of them is
    local_rate, remote_rate = local_rate or remote_rate, remote_rate or local_rate
    uncached, token_bytes = decode.unconfirmed_tokens, _moved_token_bytes(decode)
    limit = decode.block_size
    local_s = remote_s = None
    if local_rate > 0:
        queue_s = decode.worker.waiting_tokens / local_rate
        local_token_s = (2 + decode.worker.num_requests) / local_rate
        local_s = queue_s + uncached * local_token_s
    if remote_rate > 0:
        prefill_s = (source.worker.waiting_tokens + source.uncached_tokens) / remote_rate
        moved_token_s = token_bytes / bytes_per_s
        remote_s = prefill_s + uncached * moved_token_s
        if local_rate > 0:
            limit = max(limit, _break_even(prefill_s - queue_s, local_token_s - moved_token_s, decode.num_tokens))
    cap = decode.worker.identity.max_local_prefill_tokens
    return Estimates(local_s=local_s, remote_s=remote_s, limit_tokens=limit if cap is None else min(limit, cap))


def _moved_token_bytes(decode: Candidate) -> float:
    """Bytes that a transfer moves per token of the prompt that `decode` has not reported."""
    layout = decode.worker.identity.layout
    if layout.group_windows == (0,):
        return layout.total_place_bytes / layout.block_size
    # blocks outside a window stay where they are
    num_blocks = layout.num_prompt_blocks(decode.num_tokens, decode.confirmed_blocks)
    return num_blocks * layout.total_place_bytes / layout.num_groups / decode.unconfirmed_tokens


def _break_even(ahead_s: float, token_s: float, num_tokens: int) -> int:
    """The most tokens u, up to `num_tokens`, with u * token_s <= ahead_s."""
    if token_s <= 0:
        return num_tokens if num_tokens * token_s <= ahead_s else 0
    return max(0, min(num_tokens, int(ahead_s / token_s)))


def _prefers_local(decode: Candidate, estimates: Estimates) -> bool:
    if decode.unconfirmed_tokens > estimates.limit_tokens:
        return False
    if decode.confirmed_blocks and decode.unconfirmed_tokens <= decode.block_size:
        return True
    return estimates.local_s is not None and estimates.remote_s is not None and estimates.local_s <= estimates.remote_s


def _may_prefill(decode: Candidate, rules: PlacementRules) -> bool:
    if rules.local_prefill == "never" or rules.hint is PlacementHint.REMOTE:
        return False
    cap = decode.worker.identity.max_local_prefill_tokens
    return cap is None or decode.unconfirmed_tokens <= cap


def _remote(source: Candidate, decode: Candidate) -> Placement:
    return Placement(
        prefill=source.worker,
        decode=decode.worker,
        prefill_share=source.share(prefills=True, grows=False),
        decode_share=decode.share(prefills=False, grows=True),
        move=source.move,
    )
