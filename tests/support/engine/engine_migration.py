"""A sequence that another engine continues, with the messages that worker and router would exchange."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import msgspec

from pdserve.common.request.engine_types import EngineCoreRequest, Migration
from pdserve.engine.request import Request
from pdserve.engine.scheduler.kv_messages import (
    HoldReturned,
    Landed,
    Migrating,
    ReceiveInto,
    Revoke,
    Settled,
    SourceFinished,
    Want,
)
from tests.support.engine.engine_harness import Harness
from tests.support.engine.pool_blocks import block_at, places_of

_names = itertools.count(1)


@dataclass
class Moved:
    """A sequence that has ended at its source, and the request that continues it."""

    message: Migrating
    request: EngineCoreRequest
    token_ids: list[int]
    """Prompt and output."""

    @property
    def migration(self) -> Migration:
        return self.message.migration


def end_here(source: Harness, request_id: str, index: int = 0, *, without_draft_head: bool = False) -> Moved | None:
    """Let a sequence end after its next token; None if that ended it anyway."""
    sequence = next(each for each in source.scheduler.requests.values() if _is(each, request_id, index))
    core, prompt = sequence.core, sequence.core.sent_prompt_token_ids
    source.scheduler.migrate(request_id, index, without_draft_head=without_draft_head)
    for _ in range(200):
        source.step()
        moved = [message for message in source.outbox.take() if isinstance(message, Migrating)]
        if moved:
            break
        if (answer := source.answers.get(source.key(request_id, index))) and answer.finish_reason is not None:
            return None
    [message] = moved
    assert (message.core_request_id, message.index) == (request_id, index)
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    if sequence.index != index:  # it was forked from this one
        output = source.answers[source.key(request_id, index)].token_ids
    migration, hasher = message.migration, source.hasher
    assert migration.token_id == output[-1]
    assert migration.num_sent_tokens == len(prompt) + len(output) - 1
    given = [*core.prompt_token_ids, *output[:-1]]
    fields = {"block_hashes": hasher.extend(core.hash_root, given)}
    if (prompts := source.config.encoder_decoder) is not None:
        fields = prompts.hashed(prompt, output[:-1], core.hash_root, hasher, core.mm_features)
    request = msgspec.structs.replace(
        core,
        request_id=f"moved-{next(_names)}",
        sequence_stem="",
        output_token_ids=output[:-1],
        index=index,
        n=1,
        remote_prefill=True,
        without_draft_head=migration.without_draft_head,
        block_source=None,
        prefill_here=False,
        **fields,
    )
    return Moved(message, request, [*prompt, *output])


def _is(sequence: Request, request_id: str, index: int) -> bool:
    return sequence.core.request_id == request_id and (sequence.index == index or sequence.num_sequences > 1)


def go_on(source: Harness, target: Harness, moved: Moved) -> str:
    """Let the target receive the sequence; returns its name there."""
    name = target.submit(moved.request)
    for _ in range(200):
        target.step()
        if rooms := [message for message in target.outbox.take() if isinstance(message, ReceiveInto)]:
            break
    [room] = rooms
    source.core.apply(Want(moved.message.request_id, room.first_index))
    settled = source.outbox.take()
    if len(room.hold):
        [blocks] = settled
        assert isinstance(blocks, Settled)
        assert (blocks.first_index, len(blocks.hold)) == (room.first_index, len(room.hold))
        for to, origin in zip(places_of(room.hold), places_of(blocks.hold), strict=True):
            block_at(target, to).copy_(block_at(source, origin))
        target.core.apply(Landed(name, len(room.hold)))
        source.core.apply(HoldReturned(moved.message.request_id, blocks.hold))
    target.core.apply(SourceFinished(name, moved.migration.num_sent_tokens, (moved.migration.token_id,)))
    target.core.apply(HoldReturned(name, room.hold))
    source.core.apply(Revoke(moved.message.request_id))
    return name
