"""`PromptEmbeds`: a prompt as embeddings in place of token ids, checked without torch, and its form in a safetensors file."""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import msgspec

from pdserve.common.errors import InvalidRequest, PromptTooLong

EmbedsDtype = Literal["float32", "float16", "bfloat16"]
_DTYPES: dict[str, EmbedsDtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Name in a safetensors header -> dtype."""
_ITEM_BYTES: dict[EmbedsDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 4096
"""Limit of the header of a file with one tensor."""
EMBEDS_DIGEST_BYTES = 16
PLACEHOLDER = 0
"""Token id in place of each embedding."""


class PromptEmbeds(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Embeddings `[num_tokens, hidden_size]`, in the order of the rows."""

    num_tokens: int
    hidden_size: int
    dtype: EmbedsDtype
    digest: bytes
    """Covers the other fields and all numbers; an input of `hash_root` and of the request digest."""
    data: bytes = b""
    """The numbers, little endian; empty at a worker that gets the prompt's KV and computes none of it."""

    @classmethod
    def of(cls, num_tokens: int, hidden_size: int, dtype: EmbedsDtype, data: bytes) -> PromptEmbeds:
        """With its digest."""
        digest = _digest(num_tokens, hidden_size, dtype, data)
        return cls(num_tokens=num_tokens, hidden_size=hidden_size, dtype=dtype, digest=digest, data=data)

    def without_data(self) -> PromptEmbeds:
        return msgspec.structs.replace(self, data=b"")

    def placeholders(self) -> list[int]:
        """Token ids of a prompt of as many tokens."""
        return [PLACEHOLDER] * self.num_tokens

    def verify(self, num_tokens: int, hidden_size: int) -> None:
        """Check a peer's embeddings against the request and the model, and their digest. num_tokens: of the request's prompt.

        Raises: InvalidRequest naming the value and what is needed.
        """
        self.verify_shape(num_tokens, hidden_size)
        if self.data and self.digest != _digest(self.num_tokens, self.hidden_size, self.dtype, self.data):
            raise InvalidRequest("prompt_embeds.digest is not that of its bytes", "prompt_embeds")

    def verify_shape(self, num_tokens: int, hidden_size: int) -> None:
        """The part of `verify` that reads no number."""
        if self.hidden_size != hidden_size:
            raise InvalidRequest(
                f"prompt_embeds has rows of {self.hidden_size} numbers, the model's hidden size is {hidden_size}",
                "prompt_embeds",
            )
        if self.num_tokens != num_tokens:
            raise InvalidRequest(
                f"prompt_embeds has {self.num_tokens} rows, and prompt_token_ids {num_tokens} tokens", "prompt_embeds"
            )
        if self.data and len(self.data) != self.num_tokens * self.hidden_size * _ITEM_BYTES[self.dtype]:
            raise InvalidRequest(
                f"prompt_embeds has {len(self.data)} bytes, which is not {self.num_tokens} x {self.hidden_size} "
                f"numbers of {self.dtype}",
                "prompt_embeds",
            )


def _digest(num_tokens: int, hidden_size: int, dtype: str, data: bytes) -> bytes:
    head = f"{num_tokens} {hidden_size} {dtype} ".encode()
    return hashlib.blake2b(head + data, digest_size=EMBEDS_DIGEST_BYTES).digest()


class _Tensor(msgspec.Struct):
    """A tensor in a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def from_safetensors(data: bytes, field: str, max_tokens: int) -> PromptEmbeds:
    """The only tensor of a safetensors file. field: the client's name of it. max_tokens: rows, at most.

    Costs no more than the bytes. Raises: InvalidRequest, PromptTooLong.
    """
    if len(data) < _LENGTH_BYTES:
        raise InvalidRequest(f"{field} has {len(data)} bytes, which is no safetensors file", field)
    size = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if size > min(MAX_HEADER_BYTES, len(data) - _LENGTH_BYTES):
        raise InvalidRequest(
            f"{field} is no safetensors file of one tensor: its header has {size} bytes, at most {MAX_HEADER_BYTES} are read",
            field,
        )
    begin = _LENGTH_BYTES + size
    try:
        header = msgspec.json.decode(data[_LENGTH_BYTES:begin], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        tensors = [msgspec.json.decode(raw, type=_Tensor) for raw in header.values()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{field} has a header that is no safetensors header: {error!s:.200}", field) from None
    if len(tensors) != 1:
        raise InvalidRequest(f"{field} has {len(tensors)} tensors, exactly 1 is needed", field)
    [tensor] = tensors
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequest(f"{field} has the dtype {tensor.dtype[:20]!r}; {', '.join(_DTYPES)} are possible", field)
    if len(tensor.shape) != 2 or min(tensor.shape) < 1:
        raise InvalidRequest(
            f"{field} has the shape {list(tensor.shape[:8])}; [tokens, hidden size] is needed, both at least 1", field
        )
    num_tokens, hidden_size = tensor.shape
    if num_tokens > max_tokens:
        raise PromptTooLong(f"{field} has {num_tokens} rows; the model's length is {max_tokens} tokens", field)
    num_bytes = math.prod(tensor.shape) * _ITEM_BYTES[dtype]
    if tensor.data_offsets != (0, num_bytes) or len(data) - begin != num_bytes:
        raise InvalidRequest(
            f"{field} has {len(data) - begin} bytes of numbers at {list(tensor.data_offsets)}; {num_tokens} x {hidden_size} "
            f"numbers of {dtype} are {num_bytes} bytes",
            field,
        )
    return PromptEmbeds.of(num_tokens, hidden_size, dtype, data[begin:])
