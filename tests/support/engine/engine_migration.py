"""A sequence that another engine continues, with the messages that worker and router would exchange."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

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
from tests.support.engine.pool_blocks import copy_blocks

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
    assert message.migration.token_id == output[-1]
    assert message.migration.num_sent_tokens == len(prompt) + len(output) - 1
    request = resumed(source, core, f"moved-{next(_names)}", index, output[:-1], message.migration)
    return Moved(message, request, [*prompt, *output])


def resumed(
    engine: Harness,
    core: EngineCoreRequest,
    name: str,
    index: int,
    output: list[int],
    migration: Migration | None = None,
) -> EngineCoreRequest:
    """The request that goes on after this output of a sequence. core: of any attempt at it. migration: its blocks come from there;
    None: they are computed."""
    hashes = engine.hasher.extend(core.hash_root, [*core.prompt_token_ids, *output])
    fields: dict[str, Any] = {"block_hashes": hashes}
    if (prompts := engine.config.encoder_decoder) is not None:
        sent, features = core.sent_prompt_token_ids, core.mm_features
        fields = prompts.hashed(sent, output, core.hash_root, engine.hasher, features)
    return msgspec.structs.replace(
        core,
        request_id=name,
        sequence_stem="",
        output_token_ids=output,
        index=index,
        n=1,
        remote_prefill=migration is not None,
        without_draft_head=migration is not None and migration.without_draft_head,
        block_source=None,
        prefill_here=migration is None,
        **fields,
    )


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
        copy_blocks(source, blocks.hold, target, room.hold)
        target.core.apply(Landed(name, len(room.hold)))
        source.core.apply(HoldReturned(moved.message.request_id, blocks.hold))
    target.core.apply(SourceFinished(name, moved.migration.num_sent_tokens, (moved.migration.token_id,)))
    target.core.apply(HoldReturned(name, room.hold))
    source.core.apply(Revoke(moved.message.request_id))
    return name
