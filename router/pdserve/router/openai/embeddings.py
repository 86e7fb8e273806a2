"""OpenAI's `/v1/embeddings`: request and response."""

from __future__ import annotations

import base64
import struct
from array import array
from collections.abc import Iterator
from typing import Literal

import msgspec

from pdserve.common.request.pooling_params import PoolingParams, PoolingType
from pdserve.router.openai.caller_fields import verify_caller
from pdserve.router.openai.prompts import OpenAIPrompts, as_prompts, num_prompts
from pdserve.router.requests.fields.request_limits import MAX_EMBEDDING_INPUTS
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.router.requests.usage import Usage
from pdserve.text.prompt import Truncation

EncodingFormat = Literal["float", "base64"]
PART_BYTES = 1 << 18
_encode = msgspec.json.Encoder().encode


class EmbeddingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    input: OpenAIPrompts
    model: str | None = None
    dimensions: int | None = None
    encoding_format: EncodingFormat | None = None
    user: str | None = None
    # extensions
    pooling_type: PoolingType | None = None
    normalize: bool | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None

    def requests(self, call: CallFields) -> list[ClientRequest]:
        """One request per input. Raises: InvalidRequest."""
        verify_caller(self)
        num_prompts(self.input, "input", MAX_EMBEDDING_INPUTS)
        prompts = as_prompts(self.input, "input")
        pooling = PoolingParams(
            pooling_type=self.pooling_type or "last",
            normalize=self.normalize is not False,
            dimensions=self.dimensions,
        )
        pooling.verify()
        truncation = Truncation.of(self.truncate_prompt_tokens, self.truncation_side)
        return [
            ClientRequest(
                prompt=prompt,
                field="input" if len(prompts) == 1 else f"input[{place}]",
                pooling_params=pooling,
                cache_salt=self.cache_salt or None,
                truncation=truncation,
                **call._asdict(),
            )
            for place, prompt in enumerate(prompts)
        ]


def embeddings_parts(
    vectors: list[array[float]], usage: Usage, model: str, encoding_format: EncodingFormat | None
) -> Iterator[bytes]:
    """The JSON body of an answer in parts of about `PART_BYTES`; it may have 80 MiB in all."""
    data = bytearray(b'{"object":"list","data":[')
    for index, vector in enumerate(vectors):
        written = _base64(vector) if encoding_format == "base64" else vector.tolist()
        data += b"," if index else b""
        data += _encode({"object": "embedding", "index": index, "embedding": written})
        if len(data) >= PART_BYTES:
            yield bytes(data)
            data.clear()
    rest = {
        "model": model,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "total_tokens": usage.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
    }
    yield bytes(data) + b"]," + _encode(rest)[1:]


def _base64(vector: array[float]) -> str:
    """The vector as base64 of little-endian float32."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
