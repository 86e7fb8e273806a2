"""Messages from rank 0 to the processes of the other ranks, and one back, as msgpack values.

rank 0 -> rank   `StartRank`, once; then per engine `NewEngine`, `WarmUp`, and per step `ExecuteModel`, `SampleTokens`
                 and, with drafts, `ReadRuns`; with a host-memory tier `CopyBlocks` and `EndCopies`
rank -> rank 0   `RankFailed`, last

No step is answered: the ranks meet in the operations of a `RankGroup`, and results come from rank 0. The end of the socket is the
end of the peer.
"""

from __future__ import annotations

import msgspec

from pdserve.common.request.multimodal import without_pixels
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.settings.kv_store_url import MooncakeUrl
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings, WorkerSettings
from pdserve.engine.scheduler_output import RequestFailure, SchedulerOutput


class StartRank(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Load this rank's part of a model."""

    folder: str
    settings: WorkerSettings
    rank: int
    store: str
    """File through which the ranks find each other."""
    wait_s: float
    """Seconds that a step waits for another rank."""
    section: str = ""
    """The worker's role: `WorkerSettings.section`."""
    has_transfers: bool = False
    """A second socket follows, as a descriptor with one byte."""

    def settings_of_role(self) -> WorkerSettings:
        """The settings, of the worker's role."""
        kinds = {kind.section: kind for kind in (WorkerSettings, PrefillSettings, DecodeSettings)}
        return kinds[self.section](**{name: getattr(self.settings, name) for name in WorkerSettings.__struct_fields__})


class DiskOptions(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Of a `DiskStore` below host memory."""

    folder: str
    """Has a folder for each rank."""
    max_bytes: int
    """Of each rank."""
    key: bytes
    """With which blocks are sealed."""


class MooncakeOptions(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Of a `MooncakeStore` below host memory."""

    url: MooncakeUrl
    prefix: str
    """Of the names of its blocks."""
    key: bytes
    """With which blocks are sealed."""


StoreOptions = DiskOptions | MooncakeOptions


class NewEngine(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget the batch: a new engine takes over the pool."""

    store: StoreOptions | None = None
    """Of the store below host memory; None without one."""


class ExecuteModel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Begin a step."""

    scheduled: SchedulerOutput
    reads_first: bool
    """True if rank 0 has read the tokens of the step before."""


class SampleTokens(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End the step."""

    late_req_ids: list[str] | None
    """`GrammarOutput.late_req_ids`; None without a grammar."""


class ReadRuns(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read the tokens of a step with drafts (rank 0 has found out how many stand) or tentative states, or one after which a draft
    head drafts."""

    num_tokens: dict[str, int]
    """req_id -> tokens that the step added to the sequence."""
    drafts: bool
    """True if rank 0 now drafts with the model's draft head, which all ranks share."""
    writes_states: bool
    """The step has tentative states, and the ranks meet after they are written."""


class CopyBlocks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy blocks to the rank's part of the tiers, and begin to copy others back. The ranks meet after the stores."""

    kv_stores: list[list[tuple[int, int]]]
    kv_loads: dict[int, list[list[tuple[int, int]]]]
    kv_reads: dict[int, list[tuple[bytes, int, int]]]
    kv_writes: dict[int, tuple[bytes, tuple[int, int]]]
    kv_clear: bool
    """All as of `SchedulerOutput`."""

    @classmethod
    def of(cls, scheduled: SchedulerOutput) -> CopyBlocks:
        return cls(**{name: getattr(scheduled, name) for name in cls.__struct_fields__})

    def scheduled(self) -> SchedulerOutput:
        """A step that only copies."""
        return SchedulerOutput(**{name: getattr(self, name) for name in self.__struct_fields__})


class EndCopies(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Wait for loads and writes that have ended at rank 0. The ranks meet after them, and agree on those that are whole."""

    copy_ids: list[int]


class WarmUp(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Prepare what later steps replay."""


class RankFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The error that ended a rank."""

    failure: RequestFailure


ToRank = StartRank | NewEngine | ExecuteModel | SampleTokens | ReadRuns | CopyBlocks | EndCopies | WarmUp
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(RankFailed).decode
encode = msgspec.msgpack.Encoder().encode


def without_sampling(scheduled: SchedulerOutput) -> SchedulerOutput:
    """The step for a rank that does not sample: of the sampling parameters only those that decide which logits are computed.

    The others stay at rank 0, with functions of the caller among the logits processors.
    """
    if not scheduled.scheduled_new_reqs:
        return scheduled
    new_reqs = [
        msgspec.structs.replace(
            new,
            sampling_params=SamplingParams(prompt_logprobs=new.sampling_params.prompt_logprobs),
            eos_token_ids=(),
            # `scheduled_encoder_inputs` has those that a step encodes
            mm_features=without_pixels(new.mm_features),
        )
        for new in scheduled.scheduled_new_reqs
    ]
    return msgspec.structs.replace(scheduled, scheduled_new_reqs=new_reqs)
