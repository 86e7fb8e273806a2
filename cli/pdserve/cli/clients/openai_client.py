"""A small client of `/v1/chat/completions`, for the first question of `pdserve up` with a picture."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx

from pdserve.cli.clients.grpc_client import ClientMessage, Delta
from pdserve.common.errors import PdServeError, PeerError, WorkerLost, from_code
from pdserve.common.request.engine_types import FinishReason
from pdserve.common.timeline import Timeline

_TIMEOUT_S = 600.0
_EVENT = "data: "
_FINISH_REASONS = {str(reason): reason for reason in FinishReason}


class OpenAIClient:
    """`async with OpenAIClient(url) as client: async for delta in client.chat([...])`"""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """url: ends with `/v1`."""
        headers = {"x-pdserve-timeline": "1"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._client = httpx.AsyncClient(headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        self._url = url

    async def __aenter__(self) -> OpenAIClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._client.aclose()

    async def chat(self, turns: Sequence[ClientMessage], **sampling: float | int | None) -> AsyncIterator[Delta]:
        """Continue a conversation. sampling: fields of the request; None is absent. Raises: PdServeError of the answer."""
        body = {name: value for name, value in sampling.items() if value is not None} | {
            "messages": [_message(turn) for turn in turns], "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        try:
            async with self._client.stream("POST", f"{self._url}/chat/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise _error(json.loads(await answer.aread()))
                async for line in answer.aiter_lines():
                    if line.startswith(_EVENT) and line != f"{_EVENT}[DONE]":
                        yield _delta(json.loads(line.removeprefix(_EVENT)))
        except httpx.HTTPError as error:
            raise WorkerLost(f"no answer from {self._url}: {error or type(error).__name__}") from error
        except json.JSONDecodeError as error:
            raise PeerError(f"the answer of {self._url} cannot be read: {error}") from error


def _message(turn: ClientMessage) -> dict[str, Any]:
    if turn.image_url is None:
        return {"role": turn.role, "content": turn.content}
    parts = [{"type": "image_url", "image_url": {"url": turn.image_url}}, {"type": "text", "text": turn.content}]
    return {"role": turn.role, "content": parts}


def _delta(event: Mapping[str, Any]) -> Delta:
    """Raises: the `PdServeError` of an event with one."""
    if "error" in event:
        raise _error(event)
    [choice] = event.get("choices") or [{}]
    usage = event.get("usage") or {}
    times = Timeline()
    times.merge((event.get("pdserve") or {}).get("moments", {}))
    return Delta(
        text=(choice.get("delta") or {}).get("content") or "",
        finish_reason=_FINISH_REASONS.get(choice.get("finish_reason") or ""),
        num_prompt_tokens=usage.get("prompt_tokens", 0),
        num_output_tokens=usage.get("completion_tokens", 0),
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        timeline=times,
    )


def _error(answer: Mapping[str, Any]) -> PdServeError:
    given = answer.get("error") or {}
    return from_code(str(given.get("code")), str(given.get("message")), given.get("param"))
