"""Each operation of the backend, by torch's public functions, as a function of rank and size."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.helpers import triangle

pytestmark = [
    pytest.mark.usefixtures("world"),
    # Names of torch 2.13 that are deprecated are the only ones that older versions have.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]

INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
NUMBERS = [*INTEGERS, *FLOATS, *COMPLEX]
MOVED = [*NUMBERS, "bool", "float8_e4m3fn", "uint16", "uint64", "complex32"]
FORMS = ["whole", "column", "transposed", "scalar", "empty"]


def dtype_of(name):
    return getattr(torch, name)


def numbers(rank, dtype=torch.float32, form="whole"):
    """Return small whole numbers that depend on the rank, in memory of one form."""
    base = (torch.arange(12).reshape(3, 4) % 3 + rank).to(dtype)
    if form == "column":
        return base.expand(2, 3, 4).permute(1, 2, 0).contiguous()[:, :, 1]
    if form == "transposed":
        return base.T
    if form == "scalar":
        return base[1, 1].clone()
    if form == "empty":
        return base[:0]
    return base


def equal(tensor, expected):
    assert tensor.dtype == expected.dtype
    assert tensor.shape == expected.shape
    assert tensor.tolist() == expected.tolist()


def of_ranks(size, dtype=torch.float32, form="whole"):
    return [numbers(rank, dtype, form) for rank in range(size)]


def stacked(size, dtype, form):
    """Return what all ranks have, wide enough to add up."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.stack([each.to(wide) for each in of_ranks(size, dtype, form)])


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


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
def test_all_reduce_by_each_operator(rank, size, dtype):
    dtype = dtype_of(dtype)
    values = stacked(size, dtype, "whole")
    for op, expected in (
        (dist.ReduceOp.MIN, values.amin(0)),
        (dist.ReduceOp.MAX, values.amax(0)),
        (dist.ReduceOp.PRODUCT, values.prod(0)),
        (dist.ReduceOp.AVG, values.mean(0)),
    ):
        tensor = numbers(rank, dtype)
        if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
            with pytest.raises(ValueError, match="AVG needs a floating dtype"):
                dist.all_reduce(tensor, op)
            continue
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


@pytest.mark.parametrize("dtype", MOVED)
def test_moves_of_each_dtype(rank, size, dtype):
    def own(rank):
        return (torch.arange(4) % 2 * rank).to(dtype_of(dtype)).view(torch.uint8)

    def typed(data):
        return data.view(dtype_of(dtype))

    root = size - 1
    tensor = typed(own(rank).clone())
    dist.broadcast(tensor, root)
    equal(tensor.view(torch.uint8), own(root))
    received = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(received, typed(own(rank)))
    equal(torch.stack(received).view(torch.uint8), torch.stack(list(map(own, range(size)))))
    dist.gather(typed(own(rank)), received if rank == 0 else None, 0)
    dist.scatter(tensor, received if rank == 0 else None, 0)
    equal(tensor.view(torch.uint8), own(rank))
    exchanged = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_to_all(exchanged, [typed(own(rank + to)) for to in range(size)])
    for sender, each in enumerate(exchanged):
        equal(each.view(torch.uint8), own(sender + rank))


@pytest.mark.parametrize("form", FORMS)
def test_moves_of_each_form(rank, size, form):
    expected = of_ranks(size, form=form)
    root = size // 2
    tensor = numbers(rank, form=form)
    dist.broadcast(tensor, root)
    equal(tensor, expected[root])
    received = [torch.zeros_like(numbers(0, form=form)) for _ in range(size)]
    dist.all_gather(received, numbers(rank, form=form))
    for each, right in zip(received, expected, strict=True):
        equal(each, right)
    received = of_ranks(size, form=form)[::-1]
    dist.gather(numbers(rank, form=form), received if rank == root else None, root)
    if rank == root:
        for each, right in zip(received, expected, strict=True):
            equal(each, right)
    tensor = torch.zeros_like(numbers(0, form=form))
    dist.scatter(tensor, expected if rank == root else None, root)
    equal(tensor, expected[rank])
    exchanged = of_ranks(size, form=form)[::-1]
    dist.all_to_all(exchanged, [numbers(rank + to, form=form) for to in range(size)])
    for sender, each in enumerate(exchanged):
        equal(each, numbers(sender + rank, form=form))


def test_all_gather_of_shapes_that_differ(rank, size):
    received = [torch.empty(r, 2) for r in range(size)]
    dist.all_gather(received, torch.full((rank, 2), float(rank)))
    for sender, each in enumerate(received):
        equal(each, torch.full((sender, 2), float(sender)))


def test_all_gather_in_place(rank, size):
    whole = torch.full((size, 3), -1.0)
    whole[rank] = rank
    dist.all_gather_into_tensor(whole, whole[rank])
    equal(whole, torch.arange(float(size))[:, None].expand(size, 3))
    overlapping = torch.full((size * 3 + 1,), float(rank))
    dist.all_gather_into_tensor(overlapping[: size * 3], overlapping[1:4])
    equal(overlapping[: size * 3], torch.arange(float(size)).repeat_interleave(3))
    transposed = torch.zeros(2, size).T
    dist.all_gather_into_tensor(transposed, torch.tensor([[rank, rank + 1.0]]))
    equal(transposed, torch.arange(float(size))[:, None] + torch.arange(2.0))
    rows = list(torch.zeros(size, 3).unbind())
    rows[rank].fill_(rank + 1)
    dist.all_gather(rows, rows[rank])
    for sender, each in enumerate(rows):
        equal(each, torch.full((3,), sender + 1.0))


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


def test_conjugated_tensors(rank, size, world):
    """By the methods of the group: torch's functions refuse some."""
    parts = torch.complex(torch.ones(size), torch.full((size,), float(rank))).conj()
    total = torch.tensor([complex(size, -triangle(size))] * size)
    whole = torch.empty(1, dtype=torch.complex64)
    world.reduce_scatter_single(whole, parts).wait()
    equal(whole, total[:1])
    world.broadcast([parts]).wait()
    assert parts.tolist() == [1] * size
    received = list(torch.zeros(size, size, dtype=torch.complex64).conj().unbind())
    world.allgather([received], [parts + 1j * rank]).wait()
    for sender, each in enumerate(received):
        assert each.tolist() == [1 + 1j * sender] * size
    own = torch.full((2,), 1 + 1j * rank).conj()
    world.allreduce([own]).wait()
    assert own.tolist() == total[:1].tolist() * 2
    dist.barrier()


def test_all_to_all_single_with_splits(rank, size):
    sent = torch.cat([torch.full((to + rank, 2), 10.0 * rank + to) for to in range(size)])
    received = torch.empty(triangle(size) + size * rank, 2)
    splits = [rank + other for other in range(size)]
    dist.all_to_all_single(received, sent, splits, splits)
    expected = [torch.full((rank + sender, 2), 10.0 * sender + rank) for sender in range(size)]
    equal(received, torch.cat(expected))
    even = torch.arange(float(size * 2)) + 100 * rank
    output = torch.empty(size * 2, 2)[:, 0]
    dist.all_to_all_single(output, even)
    equal(output, torch.tensor([100.0 * s + 2 * rank + i for s in range(size) for i in (0, 1)]))
    with pytest.raises(ValueError, match="split_sizes must be"):
        dist.all_to_all_single(torch.empty(3), torch.empty(3), [9] * size, [9] * size)


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
    with pytest.raises(ValueError, match="SUM and AVG alone"):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)


def test_coalesced(rank, size):
    tensors = [torch.full((3,), float(rank)), torch.tensor(float(rank))]
    dist.all_reduce_coalesced(tensors)
    equal(tensors[0], torch.full((3,), float(triangle(size))))
    equal(tensors[1], torch.tensor(float(triangle(size))))
    outputs = [[torch.empty(2), torch.empty(1)] for _ in range(size)]
    dist.all_gather_coalesced(outputs, [torch.full((2,), rank + 0.5), torch.ones(1) * rank])
    for sender, (first, second) in enumerate(outputs):
        equal(first, torch.full((2,), sender + 0.5))
        equal(second, torch.ones(1) * sender)


def test_groups_used_in_different_order(rank, size):
    groups = [dist.new_group(list(range(size)), backend="mpistrat") for _ in range(2)]
    tensors = [torch.full((4,), float(rank + i)) for i in range(2)]
    order = (0, 1) if rank % 2 else (1, 0)
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    for i in range(2):
        assert tensors[i].tolist() == [triangle(size) + i * size] * 4
    for group in groups:
        dist.destroy_process_group(group)
    evens = dist.new_group(list(range(0, size, 2)), backend="mpistrat")
    if rank % 2 == 0:
        tensor = torch.tensor(rank)
        dist.broadcast(tensor, (size - 1) // 2 * 2, group=evens)
        assert tensor == (size - 1) // 2 * 2
        dist.destroy_process_group(evens)


def test_messages(rank, size):
    to, source = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        received = torch.empty(3, 2)[:, 0]
        request = dist.isend(torch.full((3,), float(rank)), to, tag=3)
        assert dist.recv(received, source, tag=3) == source
        request.wait()
        equal(received, torch.full((3,), float(source)))
        outputs = [torch.empty(2), torch.empty(0)]
        sent = [torch.full((2,), rank + 1.0), torch.empty(0)]
        batch = [dist.P2POp(dist.isend, each, to) for each in sent]
        batch += [dist.P2POp(dist.irecv, each, source) for each in outputs]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        equal(outputs[0], torch.full((2,), source + 1.0))
        request = dist.isend(torch.tensor([1 + 1j, rank]), to)
        received = torch.zeros(2, dtype=torch.complex64)
        dist.recv(received, source)
        request.wait()
        equal(received, torch.tensor([1 + 1j, source]))
    dist.barrier()
    if rank == 0:
        seen = {}
        for _ in range(size - 1):
            tensor = torch.empty(1, dtype=torch.int64)
            sender = dist.recv(tensor)
            seen[sender] = tensor.item()
        assert seen == {sender: sender * 10 for sender in range(1, size)}
    else:
        dist.send(torch.tensor([rank * 10]), 0)
    dist.barrier()


def test_objects(rank, size):
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(size)]
    objects = [rank, "from"] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(objects, size - 1)
    assert objects == [size - 1, "from"]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object((rank,), gathered, 0)
    assert gathered == ([(r,) for r in range(size)] if rank == 0 else None)
    received = [None]
    dist.scatter_object_list(received, list("abcdefgh"[:size]) if rank == 0 else None, 0)
    assert received == ["abcdefgh"[rank]]


def test_functional_collectives(rank, size, world):
    own = torch.full((2, 2), float(rank))
    reduced = functional.all_reduce(own, "sum", world)
    assert (functional.wait_tensor(reduced) == triangle(size)).all()
    assert (own == rank).all()
    gathered = functional.wait_tensor(functional.all_gather_tensor(own, 0, world))
    equal(gathered, torch.arange(float(size)).repeat_interleave(4).reshape(-1, 2))
    gathered = functional.wait_tensor(functional.all_gather_tensor(own, 1, world))
    equal(gathered, torch.arange(float(size)).repeat_interleave(2).expand(2, -1))
    whole = torch.arange(float(size * 2)) + rank
    part = functional.wait_tensor(functional.reduce_scatter_tensor(whole, "avg", 0, world))
    mean = triangle(size) / size
    torch.testing.assert_close(part, torch.tensor([2 * rank + mean, 2 * rank + 1 + mean]))
    both = functional.all_reduce_coalesced([own, own[0]], "max", world)
    assert all((functional.wait_tensor(each) == size - 1).all() for each in both)
    pair = functional.all_gather_into_tensor_coalesced([own, own[0]], world)
    assert [functional.wait_tensor(each).shape[0] for each in pair] == [2 * size, 2 * size]
    sent = functional.broadcast(own, size - 1, world)
    assert (functional.wait_tensor(sent) == size - 1).all()
    moved = functional.wait_tensor(functional.all_to_all_single(whole, None, None, world))
    equal(moved, torch.tensor([2.0 * rank + i + s for s in range(size) for i in (0, 1)]))
    differing = functional.reduce_scatter_tensor_coalesced([whole, whole], "sum", [0, 0], world)
    for each in differing:
        assert math.isclose(functional.wait_tensor(each)[0], 2 * rank * size + triangle(size))
