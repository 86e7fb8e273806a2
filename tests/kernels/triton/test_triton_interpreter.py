"""The checked interpreter finds each kind of wrong kernel, and computes bfloat16 and tf32 as a GPU does."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.support.kernels.triton_interpreter import (
    Bfloat16Error,
    LaunchMemory,
    OutOfBounds,
    Race,
    interpreted,
    to_bfloat16,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels are wrong on purpose")


@triton.jit
def copy(x, y, size, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0) if MASKED else tl.load(x + at)
    tl.store(y + at, value, mask=at < size)


@triton.jit
def load_some(x, y, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < size))


@triton.jit
def copy_with_overlap(x, y, BLOCK: tl.constexpr):
    """Each program writes also the first number of the next one."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, 2 * BLOCK)
    last = tl.num_programs(0) * BLOCK
    inside = (at < tl.program_id(0) * BLOCK + BLOCK + 1) & (at < last)
    tl.store(y + at, tl.load(x + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def shift_in_place(x, BLOCK: tl.constexpr):
    """Each program reads a number that the next one writes."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at + 1 < tl.num_programs(0) * BLOCK
    value = tl.load(x + at + 1, mask=inside, other=0.0)
    tl.store(x + at, value, mask=inside)


@triton.jit
def store_twice(y, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK) // 2, tl.arange(0, BLOCK))


@triton.jit
def count(total, y, PLAIN: tl.constexpr):
    number = tl.atomic_add(total, 1)
    tl.store(y + number, tl.program_id(0))
    if PLAIN:
        tl.store(total, 0)


@triton.jit
def mean_of_pages(pages, table, length, out, BS: tl.constexpr, MASKED: tl.constexpr):
    """The mean of `length` numbers in pages; the seeded error is to sum the whole last page."""
    at = tl.arange(0, BS)
    total = 0.0
    for page in range(tl.cdiv(length, BS)):
        seen = page * BS + at < length
        number = tl.load(table + page)
        if MASKED:
            values = tl.load(pages + number * BS + at, mask=seen, other=0.0)
        else:
            values = tl.where(seen, tl.load(pages + number * BS + at), 0.0) + tl.load(pages + number * BS + at) * 0.0
        total += tl.sum(values, 0)
    tl.store(out, total / length)


@triton.jit
def add_half(x, y, BLOCK: tl.constexpr, WIDEN: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    if WIDEN:
        value = value.to(tl.float32)
    tl.store(y + at, (value + value).to(y.dtype.element_ty))


@triton.jit
def total_of(x, y, BLOCK: tl.constexpr):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, BLOCK)), 0))


@triton.jit
def product(a, b, c, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision=PRECISION))


@triton.jit
def number_of_program(order, y):
    """Numbers of programs in the order in which they run: `order` counts them."""
    tl.store(y + tl.atomic_add(order, 1), tl.program_id(0))


def numbers(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_a_right_kernel_passes() -> None:
    x, y = numbers(19), torch.full((19,), torch.nan)
    copy[(2,)](x, y, 19, BLOCK=16, MASKED=True)
    assert torch.equal(x, y)


def test_a_load_without_its_mask_is_out_of_bounds() -> None:
    x, y = numbers(19), torch.zeros(19)
    with pytest.raises(OutOfBounds, match="13 of 16 addresses"):
        copy[(2,)](x, y, 19, BLOCK=16, MASKED=False)


def test_an_address_before_the_first_tensor_or_without_any_is_out_of_bounds() -> None:
    memory = LaunchMemory([numbers(4)])
    with pytest.raises(OutOfBounds):
        memory.read(1, np.array([8], np.int64), 4)
    with pytest.raises(OutOfBounds):
        LaunchMemory([]).write(1, np.array([8], np.int64), 4)


def test_a_number_that_begins_inside_and_ends_outside_is_out_of_bounds() -> None:
    x = numbers(4)
    memory = LaunchMemory([x])
    memory.read(1, np.array([x.data_ptr() + 12], np.int64), 4)
    with pytest.raises(OutOfBounds):
        memory.read(1, np.array([x.data_ptr() + 12], np.int64), 8)


def test_what_a_mask_hides_is_undefined_without_other() -> None:
    x, y = numbers(32), torch.zeros(32)
    load_some[(1,)](x, y, 19, BLOCK=32)
    assert y[19:].isnan().all()
    assert torch.equal(y[:19], x[:19])


def test_two_programs_that_write_one_address() -> None:
    x, y = numbers(32), torch.zeros(32)
    with pytest.raises(Race, match=r"writes what program \d writes"):
        copy_with_overlap[(2,)](x, y, BLOCK=16)
    copy_with_overlap[(1,)](x[:16], y[:16], BLOCK=16)


def test_a_program_that_reads_what_another_one_writes() -> None:
    with pytest.raises(Race, match=r"writes what program \d reads|reads what program \d writes"):
        shift_in_place[(2,)](numbers(32), BLOCK=16)
    shift_in_place[(1,)](numbers(16), BLOCK=16)


def test_numbers_of_different_sizes_share_bytes() -> None:
    x = numbers(4)
    memory = LaunchMemory([x])
    memory.write(1, np.array([x.data_ptr()], np.int64), 8)
    memory.read(1, np.array([x.data_ptr() + 4], np.int64), 4)
    with pytest.raises(Race, match="program 2 reads what program 1 writes"):
        memory.read(2, np.array([x.data_ptr() + 7], np.int64), 1)


def test_memory_beyond_32_bits_is_checked_without_taking_it() -> None:
    x = torch.empty(3 << 30, dtype=torch.bfloat16)
    memory = LaunchMemory([x])
    last = np.array([x.data_ptr() + x.nbytes - 2], np.int64)
    memory.write(1, last, 2)
    with pytest.raises(Race):
        memory.read(2, last, 2)
    with pytest.raises(OutOfBounds):
        memory.read(2, last + 1, 2)


def test_one_store_that_names_an_address_twice() -> None:
    with pytest.raises(Race, match="to one address twice"):
        store_twice[(1,)](torch.zeros(16, dtype=torch.int32), BLOCK=16)


def test_atomics_are_a_race_only_beside_plain_accesses() -> None:
    y = torch.full((8,), -1, dtype=torch.int32)
    count[(8,)](torch.zeros(1, dtype=torch.int32), y, PLAIN=False)
    assert sorted(y.tolist()) == list(range(8))
    with pytest.raises(Race):
        count[(8,)](torch.zeros(1, dtype=torch.int32), y, PLAIN=True)


def test_a_stale_slot_that_is_read_shows() -> None:
    """The cases of this project fill slots that no kernel may read with NaN; nothing hides them here."""
    pages = torch.full((4, 16), torch.nan)
    table, values = torch.tensor([2, 1], dtype=torch.int32), numbers(19)
    pages[2], pages[1, :3] = values[:16], values[16:]
    out = torch.zeros(1)
    mean_of_pages[(1,)](pages, table, 19, out, BS=16, MASKED=True)
    torch.testing.assert_close(out[0], values.mean())
    mean_of_pages[(1,)](pages, table, 19, out, BS=16, MASKED=False)
    assert out.isnan()


def test_fresh_tensors_hold_no_usable_number() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(numbers(2)).isnan().all()
    assert numbers(2).new_empty(2, 2).isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    assert torch.empty(3, dtype=torch.bool).all()


def order_of_programs(seed: int) -> list[int]:
    y = torch.zeros(16, dtype=torch.int32)
    with interpreted(seed):
        number_of_program[(16,)](torch.zeros(1, dtype=torch.int32), y)
    return y.tolist()


def test_programs_run_in_an_order_that_the_seed_names() -> None:
    first, second = order_of_programs(0), order_of_programs(1)
    assert first != second != list(range(16))
    assert sorted(first) == list(range(16))
    assert first == order_of_programs(0)


def test_arithmetic_on_bfloat16_is_refused_and_after_widening_right() -> None:
    x = numbers(16, torch.bfloat16)
    y = torch.zeros_like(x)
    add_half[(1,)](x, y, BLOCK=16, WIDEN=True)
    assert torch.equal(y, x + x)
    with pytest.raises(Bfloat16Error, match="add on bfloat16"):
        add_half[(1,)](x, y, BLOCK=16, WIDEN=False)
    with pytest.raises(Bfloat16Error, match="ReduceOps on bfloat16"):
        total_of[(1,)](x, torch.zeros(1, dtype=torch.bfloat16), BLOCK=16)


def test_casts_to_bfloat16_round_to_nearest_even() -> None:
    bits = np.concatenate([
        np.random.default_rng(0).integers(0, 1 << 32, 10_000, np.uint32),
        np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0, 1 << 31], np.uint32),
    ])  # fmt: skip
    values = bits.view(np.float32)
    found = torch.from_numpy(to_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    expected = torch.from_numpy(values).bfloat16()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_half_precision_are_sums_of_exact_products(dtype: torch.dtype) -> None:
    a, b = numbers(512, dtype).view(2, 16, 16)
    c = torch.zeros(16, 16)
    product[(1,)](a, b, c, SIZE=16, PRECISION=None)
    torch.testing.assert_close(c, a.float() @ b.float())


def test_float32_products_are_tf32_unless_they_ask_for_more() -> None:
    a, b = numbers(512).view(2, 16, 16)
    exact = (a.double() @ b.double()).float()
    errors: dict[str, float] = {}
    for precision in ("tf32", "ieee"):
        c = torch.zeros(16, 16)
        product[(1,)](a, b, c, SIZE=16, PRECISION=precision)
        errors[precision] = float((c - exact).abs().max())
    assert errors["ieee"] < 1e-5 < 1e-4 < errors["tf32"] < 1e-1
