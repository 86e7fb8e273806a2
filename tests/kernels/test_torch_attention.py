"""The torch back end: the contract, and what is its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from pdserve.kernels.attention import decode_attention, prefill_attention
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.attention.kv_pages import KvPages
from pdserve.kernels.attention.prefill_attention import PrefillChunk, plan_prefill
from pdserve.kernels.attention.torch_attention import TorchAttentionBackend
from tests.kernels.attention_contract import AttentionContract, LatentAttentionContract
from tests.support.engine.pretend_device import PretendTensor, host_copy, pretended_device
from tests.support.kernels.attention_cases import check_step, make_case, make_spec, run_step


class TestTorchAttention(AttentionContract):
    def make_backend(self, kv_cache: Tensor) -> TorchAttentionBackend:
        return TorchAttentionBackend(kv_cache)


class TestTorchLatentAttention(LatentAttentionContract):
    def make_backend(self, kv_cache: Tensor) -> TorchAttentionBackend:
        return TorchAttentionBackend(kv_cache)


def test_a_distance_bias_comes_alone() -> None:
    for options in ({"window": 5}, {"softcap": 2.0}, {"causal": False}):
        with pytest.raises(ValueError, match="a distance bias comes with causal attention"):
            make_spec((2, 2, 8), distance_bias=True, **options)


def test_large_batches_are_gathered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = (4, 2, 8)
    block_bytes = 2 * 2 * 16 * 8 * 4
    monkeypatch.setattr(decode_attention, "_GATHER_BYTES", 7 * block_bytes)
    for decodes in ([48] * 5, [20, 60, 100, 48, 200, 1]):
        case = make_case(decodes=decodes, prefills=[], heads=heads, block_size=16, dtype=torch.float32)
        check_step(TorchAttentionBackend(case.kv_cache), case, make_spec(heads))
        groups = decode_attention.plan_decode(case.batch, decodes, KvPages(case.kv_cache), make_spec(heads))
        assert [group.start for group in groups] == [0, *(group.stop for group in groups[:-1])]
        assert all(group.source.out.nbytes <= 8 * block_bytes or group.stop == group.start + 1 for group in groups)


@pytest.mark.parametrize("window", [None, 40])
def test_the_branches_for_accelerators(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, lengths are not read back and tails are cleared by index; the arithmetic runs anywhere."""
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda _: False))
    heads = (6, 2, 8)
    for decodes in ([300, 16, 17, 1], [50], [33, 33]):
        case = make_case(decodes=decodes, prefills=[(20, 41), (0, 9)], heads=heads, block_size=16, dtype=torch.float32)
        check_step(TorchAttentionBackend(case.kv_cache), case, make_spec(heads, window=window))


@pytest.mark.parametrize("window", [None, 40])
def test_scores_of_long_contexts_are_bounded_on_a_device(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda _: False))
    heads, (new_tokens, context) = (6, 2, 8), (70, 90)
    monkeypatch.setattr(prefill_attention, "_DEVICE_SCORE_BYTES", 20 * 6 * (new_tokens + context) * 4)
    case = make_case(decodes=[], prefills=[(new_tokens, context)], heads=heads, block_size=16, dtype=torch.float32)
    spec = make_spec(heads, window=window)
    check_step(TorchAttentionBackend(case.kv_cache), case, spec)
    chunk = PrefillChunk.of_sequence(0, new_tokens, new_tokens + context, case.batch.block_tables[0])
    tiles = plan_prefill(chunk, KvPages(case.kv_cache), spec).tiles
    assert len(tiles) > 2
    bound = prefill_attention._DEVICE_SCORE_BYTES
    assert all((tile.stop - tile.start) * 6 * (tile.last_key - tile.first_key) * 4 <= bound for tile in tiles)


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 2.0}], ids=str)
def test_nothing_is_read_back_from_a_device(options: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A value, a shape that depends on values, or a copy to the host would each wait for the device."""
    heads = (6, 2, 8)
    case = make_case(
        decodes=[300, 16, 17, 0, 1], prefills=[(20, 41), (0, 9)], heads=heads, block_size=16, dtype=torch.float32
    )
    expected = run_step(TorchAttentionBackend(case.kv_cache.clone()), case, make_spec(heads, **options))
    monkeypatch.delattr(PretendTensor, "tolist")  # then it is torch's own, which refuses
    with pretended_device() as device:
        there = case.to(str(device))
        backend = TorchAttentionBackend(there.kv_cache)
        with NoReadBack():
            found = run_step(backend, there, make_spec(heads, **options))
        with pytest.raises(RuntimeError, match="reads back"), NoReadBack():
            there.q.to("cpu")
    real = [row for row in range(len(expected)) if row != 3]
    torch.testing.assert_close(host_copy(found)[real], expected[real], atol=1e-5, rtol=1e-5)


class NoReadBack(TorchDispatchMode):
    """Refuses each operation that makes the host wait for the pretended device."""

    WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique", "aten::equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(value, PretendTensor) for value in tree_flatten((args, kwargs))[0]):
            targets = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.device)]
            if func.name().split(".")[0] in self.WAITING or torch.device("cpu") in targets:
                raise RuntimeError(f"{func} reads back from the device")
        return func(*args, **(kwargs or {}))


def test_specs_share_the_part_of_a_step_that_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = (4, 2, 8)
    num_calls = 0
    write_rows = KvPages.write_rows

    def counted(pages: KvPages, slot_mapping: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return write_rows(pages, slot_mapping)

    monkeypatch.setattr(KvPages, "write_rows", counted)
    case = make_case(decodes=[20, 9], heads=heads, block_size=4, dtype=torch.float32)
    backend = TorchAttentionBackend(case.kv_cache)
    k = torch.zeros(2, 2, 8)
    plans = [backend.plan(case.batch, make_spec(heads, window=window)) for window in (None, 6, 7)]
    assert num_calls == 0  # it is not made where nothing is stored in torch
    for plan in plans:
        plan.store(0, k, k)
    assert num_calls == 1
    other = make_case(decodes=[20, 9], heads=heads, block_size=4, dtype=torch.float32)
    backend.plan(other.batch, make_spec(heads)).store(0, k, k)
    assert num_calls == 2


@pytest.mark.parametrize(
    "options",
    [
        {"num_heads": 3},
        {"num_kv_heads": 0},
        {"head_dim": 0},
        {"window": 0},
        {"window": 5, "causal": False},
        {"chunk": 0},
        {"chunk": 5, "causal": False},
        {"chunk": 5, "window": 5},
        {"softcap": 0},
    ],
    ids=str,
)
def test_specs_that_no_layer_can_have(options: dict[str, int]) -> None:
    fields: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 1.0}
    assert AttentionSpec(**fields) == AttentionSpec(**fields)
    with pytest.raises(ValueError, match=next(iter(options))):
        AttentionSpec(**(fields | options))
