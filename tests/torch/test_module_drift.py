"""`assert_replicas_agree` of modules: which tensor, which ranks, by how much."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpistrat.torch as mst
from mpistrat.errors import ReplicaDriftError


@pytest.fixture
def last(world, size):
    """The rank that goes astray."""
    if size == 1:
        pytest.skip("needs two replicas that can differ")
    return size - 1


def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


def message(things, group=None):
    """Return the text of the error, after which the group is usable."""
    with pytest.raises(ReplicaDriftError) as caught:
        mst.assert_replicas_agree(things, group=group)
    dist.barrier(group)
    return str(caught.value)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int64", "float16", "bfloat16", "float8_e5m2", "complex64"]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_equal_tensors_pass(world, dtype, shape):
    tensor = torch.ones(shape).to(getattr(torch, dtype))
    assert mst.assert_replicas_agree(tensor) is None
    mst.assert_replicas_agree({"a": [tensor], "t": tensor.T if len(shape) == 2 else tensor})


def test_modules_that_agree_pass(world, rank):
    module = make()
    mst.assert_replicas_agree(module)
    module = DistributedDataParallel(module)
    mst.assert_replicas_agree(module)
    module(torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))).sum().backward()
    mst.assert_replicas_agree(dict(module.named_parameters()))
    mst.assert_replicas_agree([each.grad for each in module.parameters()])


def test_nan_is_equal_to_itself(world):
    mst.assert_replicas_agree(torch.tensor([float("nan"), float("inf")]))
    mst.assert_replicas_agree(torch.tensor([1 + 2j]).conj())


def test_dicts_filled_in_another_order_agree(world, rank):
    names = "abc" if rank % 2 else "cba"
    mst.assert_replicas_agree({name: torch.ones(2) * ord(name) for name in names})


@pytest.mark.parametrize("wrap", [lambda module: module, DistributedDataParallel])
def test_the_parameter_the_ranks_and_the_difference_are_named(world, rank, size, last, wrap):
    module = wrap(make())
    inner = getattr(module, "module", module)
    if rank == last:
        with torch.no_grad():
            inner[0].weight[1, 2] += 0.5
            inner[1].bias += 1
    text = message(module)
    assert "'0.weight', torch.float32 of the shape (2, 3), have drifted apart" in text
    others = "rank 0" if last == 1 else "ranks 0-1" if last == 2 else f"ranks 0-{last - 1}"
    assert f"  {others}: one value" in text
    assert f"  rank {last}: a different value" in text
    assert "largest difference: 0.5 at [1, 2]" in text
    assert "Other tensors that differ: 1." in text
    assert "'net/1.running_mean'" in message({"net": drifted_buffer(rank, last)})


def drifted_buffer(rank, last):
    module = make()
    module[1].running_mean += rank == last
    return module


def test_what_differs_in_kind_is_named(world, rank, last):
    is_last = rank == last
    text = message({"a": torch.ones(2), "b": torch.ones(3 if is_last else 2)})
    assert "'b'" in text
    assert f"rank {last}: torch.float32 of the shape (3,)" in text
    text = message([torch.ones(2, dtype=torch.float16 if is_last else torch.bfloat16)])
    assert f"rank {last}: torch.float16 of the shape (2,)" in text
    assert "torch.bfloat16" in text
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    if is_last:
        tensors["c"] = tensors.pop("b")
    text = message(tensors)
    assert "'b'" in text
    assert f"rank {last}: is missing" in text
    assert "Other tensors that differ: 1." in text


@pytest.mark.parametrize(
    ("value", "other", "words"),
    [
        (0.0, -0.0, "largest difference: 0"),
        (1.0, float("nan"), "NaN on some rank: 1"),
        (1.0, float("inf"), "largest difference: inf"),
        (1 + 1j, 1 - 1j, "have drifted apart"),
        (True, False, "largest difference: 1"),
        (2**40, 2**40 + 3, "largest difference: 3"),
    ],
)
def test_differences_of_one_number(world, rank, last, value, other, words):
    tensor = torch.tensor(other if rank == last else value)
    assert words in message(tensor)


def test_a_part_of_the_ranks(world, rank, size, last):
    group = dist.new_group(list(range(last)), backend="mpistrat")
    module = make()
    if rank == last:
        module[0].weight.data += 1
    else:
        mst.assert_replicas_agree(module, group=group)
        dist.destroy_process_group(group)
    assert f"rank {last}: a different value" in message(module)


def test_what_is_no_tensor_is_refused(world):
    for things, kind, words in (
        ({}, ValueError, "no tensor"),
        ([torch.ones(1), 3], TypeError, "not 3 of type int"),
        ({"s": torch.eye(2).to_sparse()}, TypeError, "'s'.*not a dense tensor"),
        ({"m": torch.ones(2, device="meta")}, TypeError, "'m'.*meta"),
    ):
        with pytest.raises(kind, match=words):
            mst.assert_replicas_agree(things)
    mst.assert_replicas_agree(make())
