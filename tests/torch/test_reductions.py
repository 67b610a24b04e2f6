"""Reductions of the backend, as a function of rank and size."""

import pytest
import torch
import torch.distributed as dist

import mpistrat as ms
from tests.helpers import triangle
from tests.torch.tensors import FLOATS, FORMS, INTEGERS, NUMBERS, dtype_of, equal, numbers, stacked

pytestmark = [
    pytest.mark.usefixtures("world"),
    # Names of torch 2.13 that are deprecated are the only ones that older versions have.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_async", [False, True])
def test_all_reduce_in_place(rank, size, form, is_async):
    tensor = numbers(rank, form=form)
    work = dist.all_reduce(tensor, async_op=is_async)
    if is_async:
        assert work.wait()
        assert work.is_success()
    equal(tensor, stacked(size, tensor.dtype, form).sum(0).to(tensor.dtype))


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("elements", [1, 3, 70_000])
def test_all_reduce_of_dtypes_and_lengths(rank, size, dtype, elements):
    tensor = (torch.arange(elements) % 5 + rank).to(dtype_of(dtype))
    dist.all_reduce(tensor)
    expected = torch.arange(elements) % 5 * size + triangle(size)
    assert tensor.equal(expected.to(dtype_of(dtype)))


def truncated_mean(values):
    """Return the mean over the first axis; of integers, cut toward zero."""
    rounding = None if values.dtype.is_floating_point else "trunc"
    return torch.div(values.sum(0), len(values), rounding_mode=rounding)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_average_of_integers_is_cut_toward_zero_as_nccl_does(rank, size, dtype):
    dtype = dtype_of(dtype)
    largest = torch.iinfo(dtype).max
    # -1, and sums that a narrow dtype cannot hold. A sum of 64 bits has no wider dtype.
    rows = torch.tensor([[4 + 2 * r, 7, r, 0 if largest > 2**60 else largest] for r in range(size)])
    if dtype.is_signed:
        rows = torch.cat([rows, -rows], 1)
        rows[:, 1] = -1 if size > 1 else 0
        rows[0, 1] = 0
    expected = truncated_mean(rows).to(dtype)
    own = rows[rank].to(dtype)
    tensor = own.clone()
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    equal(tensor, expected)
    tensor = own.clone()
    dist.reduce(tensor, size - 1, dist.ReduceOp.AVG)
    equal(tensor, expected if rank == size - 1 else own)
    output = torch.empty_like(own)
    dist.reduce_scatter_tensor(output, own.repeat(size), dist.ReduceOp.AVG)
    equal(output, expected)
    pair = [own.clone(), own.clone()[::2]]
    dist.all_reduce_coalesced(pair, dist.ReduceOp.AVG)
    equal(pair[0], expected)
    equal(pair[1], expected[::2])
    if dtype in (torch.int32, torch.int64):
        tensor = own.to_sparse()
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        equal(tensor.to_dense(), expected)


def test_an_average_of_bools_is_refused():
    with pytest.raises(ValueError, match="AVG needs numbers, not torch.bool"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG)
    dist.barrier()


def test_an_average_does_not_match_a_sum(rank, size):
    if size == 1:
        pytest.skip("ranks disagree only if there are several")
    group = dist.new_group()
    tensor = torch.ones(2, dtype=torch.int64)
    with pytest.raises(ms.errors.CollectiveMismatchError):
        dist.all_reduce(tensor, dist.ReduceOp.SUM if rank else dist.ReduceOp.AVG, group=group)
    # Averages of narrow integers travel as int64.
    group = dist.new_group()
    tensor = torch.ones(2, dtype=torch.int16 if rank else torch.int32)
    with pytest.raises(ms.errors.CollectiveMismatchError):
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
def test_all_reduce_by_each_operator(rank, size, dtype):
    dtype = dtype_of(dtype)
    values = stacked(size, dtype, "whole")
    for op, expected in (
        (dist.ReduceOp.MIN, values.amin(0)),
        (dist.ReduceOp.MAX, values.amax(0)),
        (dist.ReduceOp.PRODUCT, values.prod(0)),
        (dist.ReduceOp.AVG, truncated_mean(values)),
    ):
        tensor = numbers(rank, dtype)
        dist.all_reduce(tensor, op)
        torch.testing.assert_close(tensor, expected.to(dtype))
    dist.barrier()


@pytest.mark.parametrize("dtype", [*INTEGERS, "bool"])
def test_bitwise(rank, size, dtype):
    values = [torch.tensor([rank + 1, rank, 6]).to(dtype_of(dtype)) for rank in range(size)]
    for op, combine in (
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ):
        expected = values[0].clone()
        for each in values[1:]:
            expected = combine(expected, each)
        tensor = values[rank].clone()
        dist.all_reduce(tensor, op)
        equal(tensor, expected)
        tensor = values[rank].clone()
        dist.reduce(tensor, size - 1, op)
        equal(tensor, expected if rank == size - 1 else values[rank])
        parts, own = values[rank].repeat(size, 1), torch.empty_like(values[rank])
        dist.reduce_scatter_tensor(own, parts, op)
        equal(own, expected)
    with pytest.raises(TypeError, match="BAND needs integers"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)


def test_bools_are_reduced_as_or_and_and(rank, size):
    values = torch.tensor([[True, False, r == 0] for r in range(size)])
    for op, expected in (
        (dist.ReduceOp.SUM, values.any(0)),
        (dist.ReduceOp.MAX, values.any(0)),
        (dist.ReduceOp.PRODUCT, values.all(0)),
        (dist.ReduceOp.MIN, values.all(0)),
    ):
        tensor = values[rank].clone()
        dist.all_reduce(tensor, op)
        equal(tensor, expected)


def test_what_cannot_be_reduced_is_refused_on_all_ranks(size):
    float8 = torch.ones(2).to(torch.float8_e4m3fn)
    meta = torch.ones(2, device="meta")
    premul = dist._make_nccl_premul_sum(2.0)
    for tensor, op, kind, words in (
        (float8, dist.ReduceOp.SUM, TypeError, "wider dtype"),
        (meta, dist.ReduceOp.SUM, ValueError, "meta"),
        (torch.ones(2), premul, ValueError, "multiply the tensor first"),
    ):
        with pytest.raises(kind, match=words):
            dist.all_reduce(tensor, op)
        with pytest.raises(kind, match=words):
            dist.reduce(tensor, 0, op)
        with pytest.raises(kind, match=words):
            dist.reduce_scatter_tensor(tensor, tensor.repeat(size), op)
    for move in (
        lambda: dist.broadcast(meta, 0),
        lambda: dist.all_gather([meta] * size, meta),
        lambda: dist.all_gather_into_tensor(meta.repeat(size), meta),
        lambda: dist.all_to_all_single(meta.repeat(size), meta.repeat(size)),
        lambda: dist.all_to_all([meta] * size, [meta] * size),
        lambda: dist.isend(meta, 0),
    ):
        with pytest.raises(ValueError, match="meta"):
            move()
    dist.barrier()


@pytest.mark.parametrize("form", FORMS)
def test_reduce_leaves_other_ranks_as_they_were(rank, size, form):
    for root in range(size):
        tensor = numbers(rank, form=form)
        dist.reduce(tensor, root)
        total = stacked(size, tensor.dtype, form).sum(0).to(tensor.dtype)
        equal(tensor, total if rank == root else numbers(rank, form=form))


@pytest.mark.parametrize("dtype", NUMBERS)
def test_reduce_scatter(rank, size, dtype):
    dtype = dtype_of(dtype)
    inputs = [torch.tensor([rank + to, 1]).to(dtype) for to in range(size)]
    expected = torch.tensor([triangle(size) + rank * size, size]).to(dtype)
    output = torch.empty(2, dtype=dtype)
    dist.reduce_scatter(output, inputs)
    equal(output, expected)
    output = torch.empty(2, 2, dtype=dtype)[:, 0]
    dist.reduce_scatter_tensor(output, torch.cat(inputs))
    equal(output, expected)
    output = torch.zeros(2, 2, dtype=dtype).T
    dist.reduce_scatter_tensor(output, torch.cat([torch.stack([each, each]) for each in inputs]))
    equal(output, torch.stack([expected, expected]))


def test_reduce_scatter_of_lengths_that_differ(rank, size):
    output = torch.empty(rank)
    dist.reduce_scatter(output, [torch.full((to,), rank + 1.0) for to in range(size)])
    equal(output, torch.full((rank,), float(triangle(size) + size)))


@pytest.mark.parametrize("op", ["SUM", "AVG"])
def test_sparse_tensors_add_up(rank, size, op):
    rows = torch.tensor([[rank, 0, 0], [0, 1, 1]])  # 0 and 1 twice
    tensor = torch.sparse_coo_tensor(rows, torch.tensor([1.0, 2, 3]) + rank, (size + 1, 2))
    expected = sum(
        torch.sparse_coo_tensor(
            torch.tensor([[r, 0, 0], [0, 1, 1]]), torch.tensor([1.0, 2, 3]) + r, (size + 1, 2)
        ).to_dense()
        for r in range(size)
    )
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    torch.testing.assert_close(tensor.to_dense(), expected / (size if op == "AVG" else 1))
    empty = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0), (4,))
    dist.all_reduce(empty)
    assert empty.to_dense().tolist() == [0] * 4
    with pytest.raises(ValueError, match="only by SUM and AVG"):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
