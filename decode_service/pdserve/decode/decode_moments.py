"""The engine's moment -> those of the timeline, for a decode call."""

from __future__ import annotations

from pdserve.common import timeline

REMOTE_MOMENTS = {
    "queued": (timeline.DECODE_QUEUED,),
    "kv_reserved": (timeline.KV_RESERVED,),
    "kv_first_landed": (timeline.KV_FIRST_LANDED,),
    "kv_landed": (timeline.KV_LANDED,),
    "scheduled": (timeline.DECODE_STARTED,),
    "finished": (timeline.DECODE_FINISHED,),
}
LOCAL_MOMENTS = {
    "queued": (timeline.PREFILL_QUEUED,),
    "kv_reserved": (timeline.BLOCKS_RESERVED,),
    "kv_landed": (timeline.BLOCKS_LANDED,),
    "scheduled": (timeline.PREFILL_STARTED,),
    "first_token": (timeline.PREFILL_COMPUTED, timeline.DECODE_STARTED),
    "finished": (timeline.DECODE_FINISHED,),
}
"""The prompt is prefilled here."""
