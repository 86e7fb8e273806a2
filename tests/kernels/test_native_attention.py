"""Attention in C++: the contract, at every instruction set of this CPU, and what is its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.kernels.attention import make_attention as choice
from pdserve.kernels.attention import torch_attention
from pdserve.kernels.attention.make_attention import AttentionBackendError, make_attention
from pdserve.kernels.attention.torch_attention import TorchAttentionBackend
from pdserve.kernels.native import native_library
from pdserve.kernels.native.build_library import BuildError, build, library_name
from pdserve.kernels.native.native_attention import NativeAttentionBackend, NativeAttentionPlan
from pdserve.kernels.native.native_library import NativeLibrary, NativeLibraryError, load_library
from tests.kernels.attention_contract import AttentionContract, LatentAttentionContract
from tests.support.kernels.attention_cases import (
    TOLERANCES,
    check_step,
    make_case,
    make_latent_case,
    make_spec,
    run_step,
)
from tests.support.run.torch_threads import num_threads

DTYPES = (torch.float32, torch.bfloat16)


class TestNativeAttention(AttentionContract):
    @pytest.fixture(autouse=True)
    def _built(self, built: NativeLibrary) -> None:
        self.native_library = built

    def make_backend(self, kv_cache: Tensor) -> NativeAttentionBackend:
        if kv_cache.dtype is torch.float16:
            pytest.skip("float16 stays with torch")
        return NativeAttentionBackend(kv_cache, self.native_library)


class TestNativeLatentAttention(LatentAttentionContract):
    @pytest.fixture(autouse=True)
    def _built(self, built: NativeLibrary) -> None:
        self.native_library = built

    def make_backend(self, kv_cache: Tensor) -> NativeAttentionBackend:
        if kv_cache.dtype is torch.float16:
            pytest.skip("float16 stays with torch")
        return NativeAttentionBackend(kv_cache, self.native_library)


@pytest.mark.few(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(14, 2, 64), (5, 1, 10), (9, 1, 48), (32, 1, 128), (2, 2, 33)], ids=str)
def test_every_instruction_set(built: NativeLibrary, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Group sizes of one call and of several, heads of whole vectors and others; chunks of one task and of several."""
    assert built.levels[-1] == "baseline"
    prefills = [(0, 66), (310, 35), (60, 5)]
    fields: dict[str, Any] = {"decodes": [1, 700, 0, 256, 17], "prefills": prefills, "heads": heads, "dtype": dtype}
    for level in built.levels:
        for block_size, options in ((16, {}), (48, {"window": 300}), (5, {"softcap": 2.0})):
            case = make_case(block_size=block_size, **fields)
            check_step(NativeAttentionBackend(case.kv_cache, built, level), case, make_spec(heads, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"chunk": 100}, {"softcap": 3.0}], ids=str)
def test_it_agrees_with_torch(built: NativeLibrary, dtype: torch.dtype, options: dict[str, Any]) -> None:
    heads = (14, 2, 64)
    prefills = [(40, 9), (0, 200), (500, 140)]
    case = make_case(decodes=[900, 33, 512], prefills=prefills, heads=heads, block_size=16, dtype=dtype)
    found = run_step(NativeAttentionBackend(case.kv_cache.clone(), built), case, make_spec(heads, **options))
    expected = run_step(TorchAttentionBackend(case.kv_cache.clone()), case, make_spec(heads, **options))
    torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_with_any_number_of_threads(built: NativeLibrary, dtype: torch.dtype) -> None:
    heads = (6, 2, 32)
    case = make_case(decodes=[900, 33, 2000, 256], heads=heads, block_size=16, dtype=dtype)
    spec = make_spec(heads)
    backend = NativeAttentionBackend(case.kv_cache, built)
    with num_threads(1):
        expected = run_step(backend, case, spec)
    for threads in (2, 3, 7):
        with num_threads(threads):
            assert torch.equal(run_step(backend, case, spec), expected)
    for row, length in enumerate([900, 33, 2000, 256]):
        one = slice(row, row + 1)
        batch = replace(
            case.batch, positions=case.batch.positions[one], slot_mapping=case.batch.slot_mapping[one],
            query_start_loc=torch.tensor([0, 1]), query_start_loc_cpu=torch.tensor([0, 1]), seq_lens=case.batch.seq_lens[one],
            seq_lens_cpu=case.batch.seq_lens_cpu[one], block_tables=case.batch.block_tables[one], num_decodes=1,
            max_seq_len=length,
        )  # fmt: skip
        alone = replace(case, batch=batch, q=case.q[one], k=case.k[one], v=case.v[one])
        assert torch.equal(run_step(backend, alone, spec)[0], expected[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 90}, {"chunk": 90}], ids=str)
def test_a_row_of_a_chunk_has_the_same_bits_wherever_the_prompt_is_cut(
    built: NativeLibrary, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """And whatever is beside it, with any number of threads, at every instruction set."""
    heads, length = (6, 2, 32), 200
    spec = make_spec(heads, **options)
    case = make_case(decodes=[33], prefills=[(0, length), (70, 9)], heads=heads, block_size=16, dtype=dtype)
    for level in built.levels:
        backend = NativeAttentionBackend(case.kv_cache, built, level)
        with num_threads(1):
            expected = run_step(backend, case, spec)[1 : 1 + length]
        for cut, stop, threads in ((0, length, 3), (0, 2, 1), (1, 65, 1), (64, 130, 7), (63, 66, 1), (150, length, 2)):
            rows, size = slice(1 + cut, 1 + stop), stop - cut
            starts, lens = torch.tensor([0, size]), torch.tensor([stop])
            batch = replace(
                case.batch, positions=case.batch.positions[rows], slot_mapping=case.batch.slot_mapping[rows],
                query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, seq_lens_cpu=lens,
                block_tables=case.batch.block_tables[1:2], num_decodes=0, max_query_len=size, max_seq_len=stop,
            )  # fmt: skip
            alone = replace(case, batch=batch, q=case.q[rows], k=case.k[rows], v=case.v[rows])
            with num_threads(threads):
                assert torch.equal(run_step(backend, alone, spec), expected[cut:stop]), (level, cut, stop)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "sizes"),
    [(16, (128, 64, 512, 128)), (5, (12, 4, 40, 9)), (128, (16, 8, 96, 16)), (3, (1, 2, 33, 3)), (1, (2, 2, 1, 1))],
    ids=str,
)
def test_latent_rows_at_every_instruction_set(
    built: NativeLibrary, num_heads: int, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Rows of one piece and of several; heads of one vector and of several tasks; chunks in either form, across tiles."""
    nope, rope, rank, value = sizes
    made = make_latent_case(
        num_heads=num_heads, nope=nope, rope=rope, rank=rank, value=value, dtype=dtype, block_size=16,
        decodes=[1, 600, 0, 256, 257], prefills=[(0, 66), (63, 2), (310, 35)],
    )  # fmt: skip
    expected, tolerance = made.expected(), TOLERANCES[dtype]
    real = [0, 1, *range(3, len(expected))]
    for level in built.levels:
        case = replace(made, case=replace(made.case, kv_cache=made.case.kv_cache.clone()))
        found = case.attend(NativeAttentionBackend(case.case.kv_cache, built, level))
        torch.testing.assert_close(found.double()[real], expected[real], atol=tolerance, rtol=tolerance)
        assert found[2].isfinite().all()


@pytest.mark.parametrize("options", [{"window": 90}, {"chunk": 90}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_windows_and_caps_over_latent_rows(built: NativeLibrary, dtype: torch.dtype, options: dict[str, Any]) -> None:
    made = make_latent_case(
        num_heads=5, nope=8, rope=4, rank=48, value=10, dtype=dtype, block_size=4, decodes=[1, 600, 300],
        prefills=[(0, 130), (200, 140), (310, 3)],
    )  # fmt: skip
    made = replace(made, spec=replace(made.spec, **options))
    found = made.attend(NativeAttentionBackend(made.case.kv_cache, built)).double()
    torch.testing.assert_close(found, made.expected(), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_latent_decode_row_has_the_same_bits_alone_and_with_any_number_of_threads(
    built: NativeLibrary, dtype: torch.dtype
) -> None:
    heads, lengths = (50, 1, 40), [900, 33, 2000, 256]
    case = make_case(decodes=lengths, heads=heads, block_size=16, dtype=dtype, value_dim=24)
    spec = make_spec(heads, value_dim=24)
    for level in built.levels:
        backend = NativeAttentionBackend(case.kv_cache, built, level)
        with num_threads(1):
            expected = run_step(backend, case, spec)
        for threads in (2, 7):
            with num_threads(threads):
                assert torch.equal(run_step(backend, case, spec), expected)
        for row in range(len(lengths)):
            batch, rows = case.batch.part([row])
            batch = replace(batch, num_decodes=1)
            alone = replace(case, batch=batch, q=case.q[rows], k=case.k[rows], v=case.v[rows])
            assert torch.equal(run_step(backend, alone, spec)[0], expected[row]), (level, row)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_expanded_chunk_has_the_same_bits_whatever_is_next_to_it(built: NativeLibrary, dtype: torch.dtype) -> None:
    sizes: dict[str, Any] = {"num_heads": 6, "nope": 8, "rope": 4, "rank": 48, "value": 16}
    made = make_latent_case(
        **sizes, dtype=dtype, block_size=16, decodes=[33, 700], prefills=[(0, 100), (70, 2), (90, 200)]
    )
    for threads in (1, 3):
        with num_threads(threads):
            whole = made.attend(NativeAttentionBackend(made.case.kv_cache, built))
            for sequence in range(2, 5):
                batch, rows = made.case.batch.part([sequence])
                case = replace(made.case, batch=replace(batch, num_decodes=0), k=made.case.k[rows], v=made.case.v[rows])
                alone = replace(made, case=case, queries=made.queries[rows])
                # absorbed queries are torch's products, whose bits may differ with the number of rows
                tolerance = {"atol": 1e-6, "rtol": 1e-5} if sequence == 3 else {"atol": 0, "rtol": 0}
                found = alone.attend(NativeAttentionBackend(made.case.kv_cache, built))
                if sequence != 3 or dtype is torch.float32:
                    torch.testing.assert_close(found, whole[rows], **tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [(70, 140), (64, 128), (3, 200), (1, 2)], ids=str)
def test_latent_prompts_in_chunks_and_in_one(
    built: NativeLibrary, dtype: torch.dtype, cuts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks in either form, and keys expanded for two heads at a time."""
    monkeypatch.setattr(torch_attention, "_EXPANDED_BYTES", 2 * 210 * 28 * dtype.itemsize)
    made = make_latent_case(
        num_heads=5, nope=8, rope=4, rank=48, value=16, dtype=dtype, block_size=16, decodes=[], prefills=[(0, 210)]
    )
    whole = made.attend(NativeAttentionBackend(made.case.kv_cache, built))
    assert made.heads.expands(0, 210)
    assert not made.heads.expands(200, 10)
    for start, stop in pairwise((0, *cuts, 210)):
        batch = made.case.batch
        starts, lens = torch.tensor([0, stop - start]), torch.tensor([stop])
        batch = replace(
            batch, positions=batch.positions[start:stop], slot_mapping=batch.slot_mapping[start:stop], query_start_loc=starts,
            query_start_loc_cpu=starts, seq_lens=lens, seq_lens_cpu=lens, max_query_len=stop - start, max_seq_len=stop,
        )  # fmt: skip
        case = replace(made.case, batch=batch, k=made.case.k[start:stop], v=made.case.v[start:stop])
        part = replace(made, case=case, queries=made.queries[start:stop])
        found = part.attend(NativeAttentionBackend(made.case.kv_cache, built))
        torch.testing.assert_close(found, whole[start:stop], atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("number", [-1, -(2**62), 2**40, None], ids=str)
@pytest.mark.parametrize("column", [0, 2])
@pytest.mark.parametrize(("decodes", "prefills"), [([3, 33], []), ([3], [(20, 13)])], ids=["decode", "chunk"])
def test_a_block_outside_the_cache_is_refused(
    built: NativeLibrary, number: int | None, column: int, decodes: list[int], prefills: list[tuple[int, int]]
) -> None:
    heads = (4, 2, 8)
    case = make_case(decodes=decodes, prefills=prefills, heads=heads, block_size=16, dtype=torch.float32)
    backend, tables = NativeAttentionBackend(case.kv_cache, built), case.batch.block_tables.clone()
    batch = replace(case.batch, block_tables=tables)
    plan = backend.plan(batch, make_spec(heads))
    tables[1, column] = len(case.kv_cache) if number is None else number
    with pytest.raises(ValueError, match=r"block_tables of sequence 1 names a block outside the cache of \d+ blocks"):
        backend.plan(batch, make_spec(heads))
    with pytest.raises(ValueError, match="block_tables changed after the plan"):
        plan.attend(0, case.q, case.k, case.v)
    # what no key is read from may be anything
    tables[1, column] = 0
    tables[0, 1] = 2**40
    plan = backend.plan(batch, make_spec(heads))
    with pytest.raises(IndexError, match="layer 2 of 2"):
        plan.attend(2, case.q, case.k, case.v)


def test_windows_read_no_block_before_them(built: NativeLibrary) -> None:
    """Blocks that a window left behind are freed: their numbers may be anything."""
    heads = (4, 2, 8)
    case = make_case(decodes=[500], heads=heads, block_size=16, dtype=torch.float32)
    tables = case.batch.block_tables.clone()
    tables[0, : (500 - 40) // 16] = -1
    case = replace(case, batch=replace(case.batch, block_tables=tables))
    check_step(NativeAttentionBackend(case.kv_cache, built), case, make_spec(heads, window=40))


def test_a_plan_has_the_room_that_grew_for_a_later_one(built: NativeLibrary) -> None:
    heads = (4, 2, 8)
    case = make_case(decodes=[900, 700], prefills=[(0, 9)], heads=heads, block_size=16, dtype=torch.float32)
    backend = NativeAttentionBackend(case.kv_cache, built)
    for plan in [backend.plan(case.batch, make_spec(heads, window=window)) for window in (1, None)]:
        plan.store(case.layer, case.k, case.v)
        plan.attend(case.layer, case.q, case.k, case.v)
        assert isinstance(plan, NativeAttentionPlan)
        decode, call = plan.calls()
        assert call is not None
        assert decode.partials == backend._partials.data_ptr()
        assert call.rooms == backend._rooms.data_ptr()


# ---- choice


@pytest.fixture
def _unloaded() -> Iterator[None]:
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@pytest.mark.usefixtures("_unloaded", "built")
def test_auto_takes_it_where_it_is_built(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", choice.__name__)
    for name in ("auto", "native"):
        assert type(make_attention(name, torch.zeros(4, 1, 2, 2, 4, 8))) is NativeAttentionBackend
    half = torch.zeros(4, 1, 2, 2, 4, 8, dtype=torch.float16)
    assert type(make_attention("auto", half)) is TorchAttentionBackend
    assert "attention in torch operations: it supports float32 and bfloat16; the cache is float16" in caplog.text
    with pytest.raises(AttentionBackendError, match="'native', but it supports float32 and bfloat16"):
        make_attention("native", half)
    with pytest.raises(AttentionBackendError, match="'native', but it supports heads of at most 512 numbers"):
        make_attention("native", torch.zeros(4, 1, 2, 2, 4, 520))


@pytest.mark.usefixtures("_unloaded")
def test_without_the_library_torch_computes_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_library, "LIBRARY_FOLDER", tmp_path)
    caplog.set_level("INFO", choice.__name__)
    cache = torch.zeros(4, 1, 2, 2, 4, 8)
    assert type(make_attention("auto", cache)) is TorchAttentionBackend
    assert "the native library is not built: install a C++ compiler" in caplog.text
    with pytest.raises(
        AttentionBackendError, match="attention_backend is 'native', but the native library is not built"
    ):
        make_attention("native", cache)
    # layers ask for it one by one, and the reason is logged once
    native_library._log_reason.cache_clear()
    caplog.clear()
    assert [native_library.built_library() for _ in range(2)] == [None, None]
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "run `python -m pdserve.kernels.native.build_library`" in record.message
    native_library._log_reason.cache_clear()
    (tmp_path / library_name()).write_bytes(b"no library")
    with pytest.raises(AttentionBackendError, match="cannot be loaded"):
        make_attention("native", cache)
    with pytest.raises(NativeLibraryError, match="cannot be loaded"):
        load_library()


def test_a_build_without_a_compiler_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: looked for no-such-compiler"):
        build(tmp_path)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BuildError, match=r"decode_level\.cpp .* failed"):
        build(tmp_path)
    assert not list(tmp_path.iterdir())
