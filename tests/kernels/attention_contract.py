"""The contract of every attention back end. A test class binds it: `class TestMine(AttentionContract)` with `make_backend`."""

from __future__ import annotations

import abc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.kernels.attention.attention_backend import AttentionBackend
from pdserve.kernels.attention.attention_batch import PlanArray
from tests.support.kernels.attention_cases import (
    TOLERANCES,
    check_step,
    dense_attention,
    make_case,
    make_latent_case,
    make_spec,
    run_step,
)

HEADS = [(4, 2, 16), (7, 1, 10), (3, 3, 6), (14, 2, 64)]


class AttentionContract(abc.ABC):
    """Compares with the formula, written out densely in float64."""

    device = "cpu"
    """Device of cache and batches."""

    @abc.abstractmethod
    def make_backend(self, kv_cache: Tensor) -> AttentionBackend:
        """Make the back end under test over a cache."""

    def check(self, *, heads: tuple[int, int, int], options: dict[str, Any] | None = None, **fields: Any) -> None:
        case = make_case(heads=heads, **fields).to(self.device)
        check_step(self.make_backend(case.kv_cache), case, make_spec(heads, **(options or {})))

    @pytest.mark.diagonal(2)
    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    @pytest.mark.parametrize("heads", HEADS, ids=str)
    @pytest.mark.parametrize("window", [None, 1, 13])
    @pytest.mark.parametrize("block_size", [1, 5, 16])
    def test_mixed_step(
        self, dtype: torch.dtype, heads: tuple[int, int, int], window: int | None, block_size: int
    ) -> None:
        self.check(
            decodes=[1, 37, 16, 5],
            prefills=[(0, 1), (0, 21), (17, 30), (16, 3)],
            heads=heads,
            block_size=block_size,
            dtype=dtype,
            options={"window": window},
        )

    @pytest.mark.diagonal(2)
    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    @pytest.mark.parametrize("window", [None, 40, 200])
    @pytest.mark.parametrize(
        "decodes",
        [
            [1],
            [123],
            [48],
            [99, 99, 99],
            [16] * 5,
            [1500, 3, 2, 40, 7],
            [3, 1500, 3, 1500],
            [300, 290, 310, 301, 16, 299, 305, 310],
            list(range(1, 130, 9)),
        ],
        ids=lambda lengths: f"{len(lengths)}x{max(lengths)}",
    )
    def test_decodes_of_like_and_unlike_lengths(
        self, dtype: torch.dtype, window: int | None, decodes: list[int]
    ) -> None:
        """One length needs no mask, ragged ones do, and very ragged ones may be cut into groups."""
        self.check(decodes=decodes, heads=(6, 2, 8), block_size=16, dtype=dtype, options={"window": window})

    @pytest.mark.diagonal(2)
    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    @pytest.mark.parametrize("window", [None, 1, 60, 129, 400])
    @pytest.mark.parametrize(("context", "new"), [(0, 128), (0, 129), (0, 300), (123, 257), (300, 1), (31, 128)])
    def test_prefill_across_tiles(self, dtype: torch.dtype, window: int | None, context: int, new: int) -> None:
        """Chunks that end before, at and after the edge of a tile of queries."""
        self.check(
            decodes=[],
            prefills=[(context, new)],
            heads=(2, 1, 8),
            block_size=16,
            dtype=dtype,
            options={"window": window},
        )

    @pytest.mark.diagonal(2)
    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    @pytest.mark.parametrize("chunk", [1, 13, 16, 60, 129, 400])
    @pytest.mark.parametrize(
        "decodes",
        [[1, 37, 16, 5], [99, 99], [0, 129, 130, 3], [1500, 2, 400, 401, 7]],
        ids=lambda lengths: f"{max(lengths)}",
    )
    def test_chunks_of_positions(self, dtype: torch.dtype, chunk: int, decodes: list[int]) -> None:
        """Steps end before, at and after a chunk's first position, and have several chunks."""
        self.check(
            decodes=decodes,
            prefills=[(0, 1), (0, 300), (123, 257), (17, 30), (128, 1), (129, 5)],
            heads=(6, 2, 8),
            block_size=16,
            dtype=dtype,
            options={"chunk": chunk},
        )

    @pytest.mark.diagonal(2)
    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    @pytest.mark.parametrize("softcap", [0.5, 30.0])
    @pytest.mark.parametrize("window", [None, 13])
    @pytest.mark.parametrize("decodes", [[40, 40], [1, 37, 16, 5], [2500, 700]], ids=str)
    def test_soft_caps(self, dtype: torch.dtype, softcap: float, window: int | None, decodes: list[int]) -> None:
        """A cap of 0.5 bends every score, one of 30 hardly any; scores here are up to 4, and 8 with this scale."""
        self.check(
            decodes=decodes,
            prefills=[(0, 40), (37, 33)],
            heads=(4, 2, 16),
            block_size=16,
            dtype=dtype,
            options={"softcap": softcap, "window": window, "scale": 0.5},
        )

    @pytest.mark.diagonal(2)
    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    @pytest.mark.parametrize("window", [None, 13])
    @pytest.mark.parametrize("decodes", [[40, 40], [1, 37, 16, 5], [0, 900]], ids=str)
    def test_sinks(self, dtype: torch.dtype, window: int | None, decodes: list[int]) -> None:
        """Some heads give most of their weight to the sink; a row of 900 keys is one of several pieces."""
        for softcap in (None, 2.0):
            self.check(
                decodes=decodes,
                prefills=[(0, 40), (37, 33)],
                heads=(6, 2, 16),
                block_size=16,
                dtype=dtype,
                options={"sinks": True, "window": window, "softcap": softcap},
            )

    @pytest.mark.parametrize(
        ("dtype", "heads", "decodes"),
        [
            (torch.float32, (6, 2, 16), [1, 37, 16, 5]),
            (torch.bfloat16, (3, 3, 6), [0, 300]),
            pytest.param(torch.bfloat16, (6, 2, 16), [40, 40], marks=pytest.mark.slow),
            pytest.param(torch.float16, (7, 1, 10), [600, 3, 1], marks=pytest.mark.slow),
        ],
        ids=str,
    )
    def test_a_distance_bias(self, dtype: torch.dtype, heads: tuple[int, int, int], decodes: list[int]) -> None:
        """Queries and keys of a tile are nearer than the table's end, and further away."""
        self.check(
            decodes=decodes,
            prefills=[(0, 40), (37, 33), (9, 1)],
            heads=heads,
            block_size=16,
            dtype=dtype,
            options={"distance_bias": True},
        )

    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    def test_without_causality_a_token_sees_its_whole_sequence(self, dtype: torch.dtype) -> None:
        for softcap in (None, 2.0):
            self.check(
                decodes=[9, 30],
                prefills=[(0, 140), (20, 13), (0, 5)],
                heads=(4, 2, 8),
                block_size=16,
                dtype=dtype,
                options={"causal": False, "softcap": softcap},
            )

    def test_another_scale(self) -> None:
        fields: dict[str, Any] = {"heads": (4, 2, 16), "block_size": 4, "dtype": torch.float32}
        self.check(decodes=[9, 17, 9], prefills=[(3, 20)], options={"scale": 1.3}, **fields)

    @pytest.mark.parametrize(
        "options", [{"window": 30}, {"window": 6}, {"chunk": 30}, {"chunk": 6}, {"chunk": 4}], ids=str
    )
    @pytest.mark.parametrize("decodes", [[20, 300, 9], [300, 300], [301, 301]], ids=str)
    def test_blocks_that_no_token_sees_are_not_read(self, options: dict[str, int], decodes: list[int]) -> None:
        """An engine gives them to other sequences, which may write anything; block 0 is poison."""
        heads = (4, 2, 8)
        case = make_case(
            decodes=decodes, prefills=[(90, 45), (10, 9), (200, 1)], heads=heads, block_size=4, dtype=torch.float32
        )
        batch, spec = case.batch, make_spec(heads, **options)
        num_computed = batch.seq_lens - batch.query_start_loc.diff()
        chunk, window = options.get("chunk"), options.get("window", 0)
        first_seen = num_computed - window + 1 if chunk is None else num_computed - num_computed % chunk
        is_behind = torch.arange(batch.block_tables.shape[1]) < (first_seen // 4)[:, None]
        tables = batch.block_tables.masked_fill(is_behind, 0)
        placed = replace(case, batch=replace(batch, block_tables=tables)).to(self.device)
        found = run_step(self.make_backend(placed.kv_cache), placed, spec)
        torch.testing.assert_close(found.cpu().double(), dense_attention(case, spec), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("window", [None, 6])
    @pytest.mark.parametrize("decodes", [[0, 20, 9, 0], [5, 0], [0], [12, 12, 0]], ids=str)
    def test_padded_rows_change_no_other_row(self, decodes: list[int], window: int | None) -> None:
        """Their block is poison but for the slot that they write."""
        for prefills in ((), ((10, 9),)):
            self.check(
                decodes=decodes,
                prefills=prefills,
                heads=(4, 2, 8),
                block_size=4,
                dtype=torch.float32,
                options={"window": window},
            )

    @pytest.mark.parametrize("layer", range(3))
    @pytest.mark.parametrize("window", [None, 6])
    def test_layers_are_independent(self, layer: int, window: int | None) -> None:
        self.check(
            decodes=[20, 9],
            prefills=[(10, 9)],
            heads=(4, 2, 8),
            block_size=4,
            dtype=torch.float32,
            num_layers=3,
            layer=layer,
            options={"window": window},
        )

    def test_plans_of_one_step_and_of_following_steps_are_independent(self) -> None:
        """One back end; in each step a plan per spec, all made before the first layer."""
        heads = (4, 2, 8)
        specs = [make_spec(heads), make_spec(heads, window=6), make_spec(heads, softcap=1.0), make_spec(heads, chunk=6)]
        shared = make_case(decodes=[3], heads=heads, block_size=4, dtype=torch.float32).to(self.device)
        blocks = torch.full((64, *shared.kv_cache.shape[1:]), torch.nan, device=self.device)
        backend = self.make_backend(blocks)
        for seed, decodes in enumerate(([20, 9, 21], [20, 20], [7], [90, 3, 41])):
            case = make_case(
                decodes=decodes, prefills=[(10, 9)], heads=heads, block_size=4, dtype=torch.float32, seed=seed
            ).to(self.device)
            blocks[: len(case.kv_cache)] = case.kv_cache
            plans = [backend.plan(case.batch, spec) for spec in specs]
            for spec, plan in zip(specs, plans, strict=True):
                plan.store(case.layer, case.k, case.v)
                found = plan.attend(case.layer, case.q, case.k, case.v)
                expected = dense_attention(case.to("cpu"), spec)
                torch.testing.assert_close(found.cpu().double(), expected, atol=1e-5, rtol=1e-5)

    def test_a_step_whose_arrays_are_on_the_device(self) -> None:
        """The arrays of all specs, made of the lengths and copied by the caller, give the bits that `plan` gives alone."""
        heads = (4, 2, 8)
        specs = [make_spec(heads), make_spec(heads, window=6), make_spec(heads, chunk=6)]
        case = make_case(decodes=[20, 300], prefills=[(10, 9)], heads=heads, block_size=16, dtype=torch.float32)
        case = case.to(self.device)
        backend = self.make_backend(case.kv_cache)
        arrays = backend.plan_arrays(case.batch.lengths, specs)
        placed = {name: PlanArray(array, torch.tensor(array).to(self.device)) for name, array in arrays.items()}
        staged = replace(case, batch=replace(case.batch, plan_arrays=placed))
        for spec in specs:
            found = run_step(backend, staged, spec)
            assert torch.equal(found, run_step(backend, case, spec))
            expected = dense_attention(case.to("cpu"), spec)
            torch.testing.assert_close(found.cpu().double(), expected, atol=1e-5, rtol=1e-5)

    def test_attend_sees_what_store_wrote_and_writes_nothing(self) -> None:
        heads = (4, 2, 8)
        case = make_case(decodes=[20, 9], prefills=[(10, 9), (0, 7)], heads=heads, block_size=4, dtype=torch.float32)
        case = case.to(self.device)
        plan = self.make_backend(case.kv_cache).plan(case.batch, make_spec(heads))
        plan.store(case.layer, case.k + 100, case.v + 100)
        plan.store(case.layer, case.k, case.v)
        before = case.kv_cache.clone()
        first = plan.attend(case.layer, case.q, case.k, case.v)
        expected = dense_attention(case.to("cpu"), make_spec(heads))
        torch.testing.assert_close(first.cpu().double(), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(plan.attend(case.layer, case.q, case.k, case.v), first)
        assert torch.equal(case.kv_cache.nan_to_num(7.0, 8.0, 9.0), before.nan_to_num(7.0, 8.0, 9.0))

    def test_q_k_and_v_need_not_be_contiguous(self) -> None:
        """They are views of one projection; copies of them give the same."""
        heads = (6, 2, 8)
        fields: dict[str, Any] = {"decodes": [20, 9], "prefills": [(10, 9)], "block_size": 4, "dtype": torch.float32}
        views = make_case(heads=heads, **fields).to(self.device)
        assert not views.k.is_contiguous()
        copies = replace(
            views, q=views.q.clone(), k=views.k.clone(), v=views.v.clone(), kv_cache=views.kv_cache.clone()
        )
        found = [run_step(self.make_backend(case.kv_cache), case, make_spec(heads)) for case in (views, copies)]
        assert torch.equal(*found)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"slot_mapping": torch.tensor([1, 2])}, "slot_mapping has 2 entries for 4"),
            ({"query_start_loc_cpu": torch.tensor([0, 1, 3])}, "covers rows 0 to 3 of 4"),
            ({"query_start_loc_cpu": torch.tensor([1, 1, 4])}, "covers rows 1 to 4 of 4"),
            ({"query_start_loc_cpu": torch.tensor([0, 4, 4]), "num_decodes": 0}, r"rows 4..3 belong to"),
            ({"query_start_loc_cpu": torch.tensor([0, 4])}, "query_start_loc 2 entries for 2 sequences"),
            ({"query_start_loc_cpu": torch.tensor([0, 0, 4])}, r"1 decodes, but query_start_loc begins with \[0, 0\]"),
            ({"num_decodes": 2}, r"2 decodes, but query_start_loc begins with \[0, 1, 4\]"),
            ({"num_decodes": 3}, r"3 decodes, but query_start_loc begins with \[0, 1, 4\]"),
            ({"seq_lens_cpu": torch.tensor([4, 2])}, r"rows 1..3 belong to a sequence of 2 tokens"),
            ({"max_seq_len": 3}, "max_seq_len 3 and max_query_len 3 are not"),
            ({"max_query_len": 1}, "max_seq_len 4 and max_query_len 1 are not"),
            ({"block_tables": torch.zeros(2, 0, dtype=torch.int64)}, "0 columns for 4"),
            ({"block_tables": torch.tensor([[1, 2]])}, "block_tables has 1 rows"),
        ],
    )
    def test_a_batch_that_contradicts_itself_is_refused(self, changes: dict[str, Any], message: str) -> None:
        case = make_case(decodes=[4], prefills=[(0, 3)], heads=(2, 2, 4), block_size=4, dtype=torch.float32)
        case = case.to(self.device)
        with pytest.raises(ValueError, match=message):
            self.make_backend(case.kv_cache).plan(replace(case.batch, **changes), make_spec((2, 2, 4)))

    @pytest.mark.parametrize("heads", [(4, 4, 4), (2, 2, 8), (2, 1, 4)], ids=str)
    def test_a_spec_of_another_cache_is_refused(self, heads: tuple[int, int, int]) -> None:
        case = make_case(decodes=[4], heads=(2, 2, 4), block_size=4, dtype=torch.float32).to(self.device)
        with pytest.raises(ValueError, match="does not fit"):
            self.make_backend(case.kv_cache).plan(case.batch, make_spec(heads))


class LatentAttentionContract(abc.ABC):
    """The contract of back ends over a cache with one row per token, which is a key, and whose beginning is a value."""

    device = "cpu"

    @abc.abstractmethod
    def make_backend(self, kv_cache: Tensor) -> AttentionBackend:
        """Make the implementation under test."""

    def check(self, heads: tuple[int, int, int], value_dim: int, **fields: Any) -> None:
        case = make_case(heads=heads, value_dim=value_dim, **fields).to(self.device)
        check_step(self.make_backend(case.kv_cache), case, make_spec(heads, value_dim=value_dim))

    @pytest.mark.diagonal(2)
    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    @pytest.mark.parametrize(("heads", "value_dim"), [((5, 1, 24), 16), ((16, 1, 40), 33), ((1, 1, 8), 8)])
    @pytest.mark.parametrize("decodes", [[1, 37, 16, 5], [64, 64], [300], []], ids=str)
    def test_a_step(self, dtype: torch.dtype, heads: tuple[int, int, int], value_dim: int, decodes: list[int]) -> None:
        for prefills in ([], [(0, 40), (37, 33), (9, 1)]):
            if decodes or prefills:
                self.check(heads, value_dim, decodes=decodes, prefills=prefills, block_size=16, dtype=dtype)

    def test_sizes_of_deepseek(self) -> None:
        self.check(
            (128, 1, 576), 512, decodes=[70, 3], prefills=[(20, 9)], block_size=16, dtype=torch.bfloat16, num_layers=2
        )

    @pytest.mark.diagonal(2)
    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    @pytest.mark.parametrize(("rank", "nope", "rope", "value"), [(48, 8, 4, 10), (33, 7, 2, 5), (9, 8, 4, 16)], ids=str)
    @pytest.mark.parametrize("decodes", [[], [1, 37, 0, 300]], ids=str)
    @pytest.mark.parametrize(
        "prefills", [[(0, 70)], [(60, 3), (64, 65), (0, 2), (90, 1)], [(200, 140), (3, 5)], []], ids=str
    )
    def test_heads_in_either_form(
        self,
        dtype: torch.dtype,
        rank: int,
        nope: int,
        rope: int,
        value: int,
        decodes: list[int],
        prefills: list[tuple[int, int]],
    ) -> None:
        """Chunks that a plan may expand, and others; one with a small rank is never expanded."""
        made = make_latent_case(
            num_heads=5, nope=nope, rope=rope, rank=rank, value=value, dtype=dtype, device=self.device,
            decodes=decodes or [7], prefills=prefills, block_size=16,
        )  # fmt: skip
        real = [
            row
            for row, length in enumerate(made.case.batch.lengths.seq_lens.repeat(made.case.batch.lengths.query_lens))
            if length
        ]
        found = made.attend(self.make_backend(made.case.kv_cache)).cpu().double()
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(found[real], made.expected()[real], atol=tolerance, rtol=tolerance)

    def test_other_caches_are_refused(self) -> None:
        case = make_case(heads=(4, 1, 16), decodes=[5], block_size=16, dtype=torch.float32, value_dim=12).to(
            self.device
        )
        backend = self.make_backend(case.kv_cache)
        for heads, value_dim in (((4, 1, 16), None), ((4, 1, 24), 12), ((4, 2, 16), 12)):
            with pytest.raises(ValueError, match="does not fit"):
                backend.plan(case.batch, make_spec(heads, value_dim=value_dim))
        with pytest.raises(ValueError, match="value_dim must be 1 to head_dim"):
            make_spec((4, 1, 16), value_dim=17)
