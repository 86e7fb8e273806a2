"""`FleetEndpoint`: a simulated router as an end point of a benchmark."""

from __future__ import annotations

from collections.abc import AsyncIterator

from pdserve.cli.bench.endpoints import Chunk, Prompt, RequestFailed
from pdserve.common.errors import PdServeError
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.router.requests.inference import Inference
from pdserve.router.requests.preparation import ClientRequest
from pdserve.text.prompt import TokenInput


class FleetEndpoint:
    """An `Endpoint` for prompts of token ids, which needs no front end."""

    def __init__(self, router: Inference, timeout_s: float) -> None:
        """timeout_s: limit of each request, virtual seconds."""
        self._router = router
        self._timeout_s = timeout_s

    async def stream(self, prompt: Prompt, output_tokens: int) -> AsyncIterator[Chunk]:
        """As of `Endpoint`; the answer has exactly `output_tokens` tokens."""
        assert prompt.token_ids is not None
        request = ClientRequest(
            request_id="",
            prompt_token_ids=[],
            sampling_params=SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False),
            prompt=TokenInput(prompt.token_ids),
            field="prompt",
            max_tokens=output_tokens,
            timeout_s=self._timeout_s,
        )
        try:
            async with self._router.generation([request], stream=True) as generation:
                stream = generation.stream
                while not stream.ended or stream.num_bytes:
                    await stream.until_ready()
                    for output in stream.take_now():
                        yield Chunk(has_output=bool(output.token_ids), token_ids=tuple(output.token_ids))
                stream.take_now()  # raises what has ended it
                usage = generation.usage
                yield Chunk(
                    prompt_tokens=usage.prompt_tokens,
                    output_tokens=usage.completion_tokens,
                    cached_tokens=usage.cached_tokens,
                )
        except PdServeError as error:
            raise RequestFailed(error.code, error.message) from error

    async def close(self) -> None:
        """No effect."""
