"""PyTorch tensors in `start_all_reduce`, which writes to them, and their memory."""

import numpy as np
import pytest

import mpistrat as ms
from tests.helpers import triangle

torch = pytest.importorskip("torch")


def begin(strategy, op, nest):
    return strategy.run(lambda: ms.get_replica_context().start_all_reduce(op, nest))


@pytest.mark.parametrize(
    "dtype", ["uint8", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]
)
def test_start_all_reduce_writes_to_the_tensors(strategy, rank, size, dtype):
    dtype = getattr(torch, dtype)
    numbers = torch.arange(12).reshape(3, 4)
    nest = {
        "whole": (numbers + rank).to(dtype),
        "column": (numbers + rank).to(dtype)[:, 1],
        "scalar": torch.tensor(rank, dtype=dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "array": np.float64(rank),
    }
    handle = begin(strategy, "sum", nest)
    result = handle.wait()
    for name, tensor in nest.items():
        assert name == "array" or result[name] is tensor
    expected = (numbers * size + triangle(size)).to(dtype)
    assert nest["whole"].equal(expected)
    assert nest["column"].equal(expected[:, 1])
    assert nest["scalar"] == result["array"] == triangle(size)
    assert handle.wait()["whole"] is nest["whole"]


def test_start_all_reduce_of_gradients_in_place(strategy, rank, size):
    layer = torch.nn.Linear(3, 2)
    layer(torch.full((4, 3), rank + 1.0)).sum().backward()
    gradients = {name: each.grad for name, each in layer.named_parameters()}
    handles = [begin(strategy, "mean", each) for each in gradients.values()]
    for handle in handles:
        handle.wait()
    mean = 4 * (triangle(size) / size + 1)
    torch.testing.assert_close(layer.weight.grad, torch.full((2, 3), mean))
    torch.testing.assert_close(layer.bias.grad, torch.full((2,), 4.0))
    conjugated = torch.tensor([1 + 2j]).conj()
    begin(strategy, "sum", conjugated).wait()
    assert conjugated.tolist() == [size * (1 - 2j)]


def test_start_all_reduce_refuses_what_it_cannot_write_in_place(strategy, size):
    parameter = torch.nn.Parameter(torch.ones(2))
    for tensor in (parameter, parameter * 2):
        with pytest.raises(NotImplementedError, match=r"leaf 'b' .* graph.*\.detach\(\)"):
            begin(strategy, "sum", {"a": np.ones(1), "b": tensor})
    with pytest.raises(TypeError, match="MEAN of int64 is float64"):
        begin(strategy, "mean", torch.ones(2, dtype=torch.int64))
    begin(strategy, "sum", parameter.detach()).wait()
    assert parameter.tolist() == [size, size]


def test_storages_of_tensors_stay_resizable(strategy, size):
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.ones(3, dtype=dtype)
        begin(strategy, "sum", tensor).wait()
        strategy.run(lambda t: ms.get_replica_context().all_reduce("sum", t), args=(tensor,))
        strategy.reduce("sum", tensor)
        tensor.untyped_storage().resize_(0)


def test_tensors_without_memory_of_the_host_are_refused(strategy):
    for tensor in (torch.ones(2, device="meta"), torch.eye(2).to_sparse()):
        with pytest.raises((NotImplementedError, TypeError), match="meta|[Ss]parse"):
            strategy.reduce("sum", tensor)
