"""`EngineCoreClient`: commands to an engine and its outputs. All of them are values, so the engine may run in another process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pdserve.common.request.engine_types import EngineCoreOutputs, EngineCoreRequest, StreamingUpdate
from pdserve.engine.engine_info import EngineInfo


class EngineCoreClient(Protocol):
    """An engine with one front end, which takes outputs by `get_output` or by `get_output_async`, never by both.

    A request that the engine refuses ends like one that fails: its only output has the error's code, message and field.
    """

    @property
    def info(self) -> EngineInfo: ...

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Its id is one that no open request has. Raises: WorkerLost or Cancelled after the engine's end."""

    def resume_request(self, update: StreamingUpdate) -> None:
        """Queue a session's next turn. A refused one ends the session. Raises: as `add_request`."""

    def finish_session(self, request_id: str) -> None:
        """End a session after the turns that were queued. Harmless when it had ended, and after the engine's end."""

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests: their sequences end with finish reason `ABORT`. Harmless for unknown ones and after the engine's end."""

    def end_sequence(self, request_id: str, index: int) -> None:
        """One sequence has ended where its text is made. Harmless when it had ended, and after the engine's end."""

    def get_output(self) -> EngineCoreOutputs:
        """The results of the next step that has any. Blocks; call it while a request is open.

        Raises, after the outputs that had arrived: WorkerLost with the text of the error that ended the engine; every open
        request is lost then. Cancelled after `close`.
        """

    async def get_output_async(self) -> EngineCoreOutputs:
        """The same without blocking the event loop, which is that of the first call."""

    def utility(self, name: str, *args: Any) -> Any:
        """Call a function of `utilities.py` in the engine, between two steps; blocks. args, result: msgpack values.

        Raises: InvalidRequest for an unknown name or wrong arguments, InternalError when the function failed; as `get_output`.
        """

    async def utility_async(self, name: str, *args: Any) -> Any:
        """The same without blocking the event loop."""

    def close(self) -> None:
        """End the engine after the step it is in, and everything that was started for it. Harmless when called again."""
