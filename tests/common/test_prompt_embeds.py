"""`from_safetensors`: a file of one tensor, read without torch, and everything else refused before it costs anything."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save

from pdserve.common.block_hash import BlockHasher, request_extras
from pdserve.common.errors import InvalidRequest, PromptTooLong
from pdserve.common.request.prompt_embeds import PromptEmbeds, from_safetensors
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.engine.prompt_embeds_values import verify_finite
from pdserve.engine.runner.inputs.prompt_embeds_table import embeds_tensor

ROWS = torch.arange(24, dtype=torch.float32).view(6, 4) / 7


def file_of(header: object, data: bytes = b"") -> bytes:
    written = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + data


def tensor(dtype: str = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_safetensors_writes(dtype: torch.dtype) -> None:
    rows = ROWS.to(dtype)
    embeds = from_safetensors(save({"any name": rows}, metadata={"format": "pt"}), "prompt_embeds", 6)
    assert (embeds.num_tokens, embeds.hidden_size) == (6, 4)
    assert torch.equal(embeds_tensor(embeds), rows)
    embeds.verify(6, 4)
    verify_finite(embeds)
    bare = embeds.without_data()
    assert (bare.data, bare.digest) == (b"", embeds.digest)
    bare.verify(6, 4)
    assert PromptEmbeds.of(6, 4, embeds.dtype, embeds.data[:-1] + b"\x01").digest != embeds.digest


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has 0 bytes, which is no safetensors file"),
        (b"\xff" * 20, "its header has 18446744073709551615 bytes, at most 4096 are read"),
        (file_of(b"{" + b" " * 5000), "its header has 5001 bytes"),
        (file_of(b"\x80\x04."), "is no safetensors header"),
        (file_of(b"[" * 3000), "is no safetensors header"),
        (file_of({}), "has 0 tensors, exactly 1 is needed"),
        (file_of({"a": tensor(), "b": tensor()}, bytes(24)), "has 2 tensors, exactly 1 is needed"),
        (file_of({"a": 3}), "is no safetensors header"),
        (file_of({"a": tensor("I64")}, bytes(24)), "has the dtype 'I64'; F32, F16, BF16 are possible"),
        (file_of({"a": tensor(shape=[6])}, bytes(24)), r"has the shape \[6\]; \[tokens, hidden size\] is needed"),
        (file_of({"a": tensor(shape=[0, 6])}, bytes(24)), r"has the shape \[0, 6\]"),
        (file_of({"a": tensor(shape=[-2, -3])}, bytes(24)), r"has the shape \[-2, -3\]"),
        (file_of({"a": tensor(offsets=[0, 20])}, bytes(24)), "2 x 3 numbers of float32 are 24 bytes"),
        (file_of({"a": tensor()}, bytes(23)), "has 23 bytes of numbers"),
        (file_of({"a": tensor(shape=[2, 1 << 60])}, bytes(24)), "numbers of float32 are 9223372036854775808 bytes"),
    ],
)
def test_other_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        from_safetensors(data, "prompt_embeds", 6)
    assert refused.value.field == "prompt_embeds"


def test_more_rows_than_the_model_has_tokens() -> None:
    with pytest.raises(PromptTooLong, match=r"prompt_embeds\[1\] has 6 rows; the model's length is 5 tokens"):
        from_safetensors(save({"a": ROWS}), "prompt_embeds[1]", 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 5}, "rows of 5 numbers, the model's hidden size is 4"),
        ({"num_tokens": 7}, "has 7 rows, and prompt_token_ids 6 tokens"),
        ({"dtype": "float16"}, "has 96 bytes, which is not 6 x 4 numbers of float16"),
        ({"digest": bytes(16)}, "digest is not that of its bytes"),
    ],
)
def test_a_peers_embeds_are_checked(changes: dict[str, Any], message: str) -> None:
    embeds = PromptEmbeds.of(6, 4, "float32", ROWS.numpy().tobytes())
    fields = {name: getattr(embeds, name) for name in embeds.__struct_fields__} | changes
    with pytest.raises(InvalidRequest, match=message):
        PromptEmbeds(**fields).verify(6, 4)


def test_roots_and_digests_depend_on_the_embeddings() -> None:
    hasher = BlockHasher(DeploymentKey(b"a key for tests, 16 or more"), 4)
    roots = {
        hasher.root("model", **fields)
        for fields in ({}, {"embeds_digest": b"1" * 16}, {"embeds_digest": b"2" * 16}, {"tenant": "31" * 16},
                       {"tenant": "t", "embeds_digest": b"1" * 16})
    }  # fmt: skip
    assert len(roots) == 5
    digests = {hasher.request_digest(bytes(16), [], [0, 0], request_extras("", digest)) for digest in (b"", b"1" * 16)}
    assert len(digests) == 2
