"""Full chunks in two parts: torch's fused attention within the chunk, our kernel over the keys before it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.triton.attention import fused_attention as module
from pdserve.kernels.triton.attention.attention_configs import Prefill, attention_configs
from pdserve.kernels.triton.attention.fused_attention import fused_attention
from pdserve.kernels.triton.attention.triton_attention import TritonAttentionBackend
from pdserve.kernels.triton.launch_configs import architecture
from tests.kernels.attention_contract import AttentionContract
from tests.support.kernels.attention_cases import TOLERANCES, check_step, make_case, make_spec
from tests.support.kernels.compiled_kernels import TARGETS, recorded_launches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = (4, 2, 16)
MULTIPLE = attention_configs(architecture(torch.device(DEVICE)), 16).full_chunk
FULL = 8 * MULTIPLE if DEVICE == "cpu" else MULTIPLE


@pytest.mark.slow
class TestTwoPartPrefill(AttentionContract):
    device = DEVICE

    def make_backend(self, kv_cache: Tensor) -> TritonAttentionBackend:
        return TritonAttentionBackend(kv_cache, "sdpa")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_full_and_other_chunks_beside_decode_rows(dtype: torch.dtype) -> None:
    prefills = [(17, FULL), (20, FULL + 1), (0, FULL), (5, MULTIPLE)]
    case = make_case(decodes=[3, 20], prefills=prefills, heads=HEADS, block_size=16, dtype=dtype).to(DEVICE)
    check_step(TritonAttentionBackend(case.kv_cache, "sdpa"), case, make_spec(HEADS))


@pytest.mark.parametrize(("options", "context"), [({}, 0), ({}, 37), ({"causal": False}, 37)])
def test_a_step_of_one_full_chunk_alone(options: dict[str, Any], context: int) -> None:
    """The output of such a step is the fused kernel's own tensor."""
    case = make_case(decodes=[], prefills=[(context, FULL)], heads=(7, 1, 8), block_size=16, dtype=torch.float16)
    case = case.to(DEVICE)
    check_step(TritonAttentionBackend(case.kv_cache, "sdpa"), case, make_spec((7, 1, 8), **options))


@pytest.mark.parametrize(
    ("options", "prefills", "expected"),
    [
        ({}, [(9, FULL)], [(True, 1)]),
        ({}, [(0, FULL)], []),
        ({}, [(9, FULL + 1)], [(False, 1)]),
        ({}, [(9, FULL), (0, FULL), (9, FULL + 1), (0, 2)], [(False, 2), (True, 1)]),
        ({"window": 8 + FULL}, [(9, FULL), (7, FULL)], [(False, 1), (True, 1)]),
        ({"softcap": 3.0}, [(9, FULL), (0, FULL)], [(False, 2)]),
        ({"sinks": True}, [(9, FULL), (0, FULL)], [(False, 2)]),
    ],
)
def test_which_chunks_take_two_parts(
    options: dict[str, Any], prefills: list[tuple[int, int]], expected: list[tuple[bool, int]]
) -> None:
    """The prefill launches of a step: whether each joins, and for how many sequences."""
    case = make_case(decodes=[3], prefills=prefills, heads=HEADS, block_size=16, dtype=torch.float16).to(DEVICE)
    plan = TritonAttentionBackend(case.kv_cache, "sdpa").plan(case.batch, make_spec(HEADS, **options))
    with recorded_launches() as launches:
        plan.attend(case.layer, case.q, case.k, case.v)
    found = [
        (launch.arguments["JOIN"], len({int(sequence) for sequence in launch.arguments["tiles"][:, 0]}))
        for launch in launches
        if launch.kernel.__name__ == "attend_tiles"
    ]
    assert found == expected


def test_without_the_setting_the_table_chooses() -> None:
    case = make_case(decodes=[], prefills=[(9, FULL)], heads=HEADS, block_size=16, dtype=torch.float16).to(DEVICE)
    table = attention_configs(architecture(torch.device(DEVICE)), HEADS[2]).prefill
    cases: list[tuple[Prefill | None, bool]] = [(None, table == "sdpa"), ("triton", False), ("sdpa", True)]
    for prefill, in_two_parts in cases:
        plan = TritonAttentionBackend(case.kv_cache, prefill).plan(case.batch, make_spec(HEADS))
        with recorded_launches() as launches:
            plan.attend(case.layer, case.q, case.k, case.v)
        assert [launch.arguments["JOIN"] for launch in launches] == [in_two_parts]


def test_two_parts_are_chosen_where_they_were_measured() -> None:
    """docs/gpu.md: an H200's fused kernels are faster than ours within a full chunk."""
    assert [name for name in TARGETS if attention_configs(name, 128).prefill == "sdpa"] == ["sm_90"]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_fused_kernel_gives_the_logarithm_of_its_denominators(dtype: torch.dtype, causal: bool) -> None:
    q, k, v = torch.randn(48, 8, 16).to(DEVICE, dtype).split((4, 2, 2), 1)
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.7, causal=causal)
    attend = fused_attention(spec, torch.zeros(1, dtype=dtype, device=DEVICE), ("cudnn", "flash"))
    if attend is None:
        pytest.skip(f"no fused kernel computes {dtype} here")
    out, lse = attend(q, k, v, spec)
    scores = torch.einsum("qhd,khd->qhk", q.double(), k.double().repeat_interleave(2, 1)) * 0.7
    if causal:
        hidden = torch.ones(48, 48, dtype=torch.bool, device=DEVICE).triu(1)
        scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
    assert lse.dtype is torch.float32
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-4, rtol=1e-4)
    expected = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v.double().repeat_interleave(2, 1))
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


class PretendedCache:
    """A cache on a GPU, as far as the choice of a kernel looks at it."""

    is_cpu = False

    def new_empty(self, size: tuple[int, ...]) -> Tensor:
        return torch.empty(size)


@pytest.mark.parametrize(
    ("options", "supported", "enabled", "expected"),
    [
        ({}, {"cudnn", "flash"}, {"cudnn", "flash"}, "_cudnn"),
        ({}, {"cudnn", "flash"}, {"flash"}, "_flash"),
        ({}, {"flash"}, {"cudnn", "flash"}, "_flash"),
        ({}, {"cudnn"}, {"flash"}, None),
        ({"head_dim": 20}, {"cudnn", "flash"}, {"cudnn", "flash"}, None),
        ({"softcap": 1.0}, {"cudnn", "flash"}, {"cudnn", "flash"}, None),
        ({"sinks": True}, {"cudnn", "flash"}, {"cudnn", "flash"}, None),
    ],
)
def test_the_first_kernel_of_a_gpu_that_is_supported_and_enabled(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    supported: set[str],
    enabled: set[str],
    expected: str | None,
) -> None:
    asked: list[tuple[int, ...]] = []

    def supports(name: str, params: Any) -> bool:
        asked.append((params.query.shape[1], params.key.shape[1], params.is_causal, params.enable_gqa))
        return name in supported

    monkeypatch.setattr(
        module,
        "_ON_GPUS",
        {
            name: (attend, lambda params, name=name: supports(name, params), lambda name=name: name in enabled)
            for name, (attend, _, _) in module._ON_GPUS.items()
        },
    )
    spec = make_spec(HEADS, **options)
    found = fused_attention(spec, PretendedCache(), ("cudnn", "flash"))  # type: ignore[arg-type]
    assert (found and found.__name__) == expected
    assert set(asked) <= {(4, 2, True, True)}
