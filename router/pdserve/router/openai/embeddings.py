"""OpenAI's `/v1/embeddings`: request and response."""

from __future__ import annotations

import base64
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from pdserve.common.request.pooling_params import PoolingParams, PoolingType
from pdserve.router.openai.answer_head import AnswerHead
from pdserve.router.openai.pooled_inputs import PooledInputs
from pdserve.router.requests.preparation import CallFields, ClientRequest

EncodingFormat = Literal["float", "base64"]
PART_BYTES = 1 << 18
_encode = msgspec.json.Encoder().encode


class EmbeddingBody(PooledInputs, forbid_unknown_fields=True, kw_only=True):
    dimensions: int | None = None
    encoding_format: EncodingFormat | None = None
    # extensions
    pooling_type: PoolingType | None = None
    normalize: bool | None = None

    def requests(self, call: CallFields) -> list[ClientRequest]:
        """One request per input. Raises: InvalidRequest."""
        pooling = PoolingParams(
            pooling_type=self.pooling_type or "last",
            normalize=self.normalize is not False,
            dimensions=self.dimensions,
        )
        return self.pooled_by(pooling, call)


def embeddings_parts(
    vectors: Sequence[array[float]], head: AnswerHead, encoding_format: EncodingFormat | None
) -> Iterator[bytes]:
    """The JSON body of an answer in parts of about `PART_BYTES`; it may have 80 MiB in all."""
    fields = head.fields("embd")
    usage = fields.pop("usage")
    data = bytearray(_encode(fields)[:-1] + b',"data":[')
    for index, vector in enumerate(vectors):
        written = _base64(vector) if encoding_format == "base64" else vector.tolist()
        data += b"," if index else b""
        data += _encode({"object": "embedding", "index": index, "embedding": written})
        if len(data) >= PART_BYTES:
            yield bytes(data)
            data.clear()
    yield bytes(data) + b"]," + _encode({"usage": usage})[1:]


def _base64(vector: array[float]) -> str:
    """The vector as base64 of little-endian float32."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
