"""PyTorch tensors in collectives come back attached to the graph."""

import numpy as np
import pytest

import mpistrat as ms
from tests.devices import assert_allclose
from tests.helpers import triangle
from tests.test_gradients import values_of, weights_of

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
def test_all_reduce_gradient_is_the_pullback(strategy, rank, size, op):
    values, weights = values_of(size, op), weights_of(size, (2, 3))

    def fn():
        replica = ms.get_replica_context()
        tensor = torch.tensor(values[rank], requires_grad=True)
        nest = replica.all_reduce(op, {"t": tensor, "n": np.float64(rank), "u": torch.ones(2)})
        assert isinstance(nest["n"], np.float64)
        assert nest["u"].dtype == torch.float32
        assert nest["t"].requires_grad
        (nest["t"] * torch.tensor(weights[rank])).sum().backward()
        result = nest["t"].detach().numpy()
        expected = ms.gradients.all_reduce_pullback(op, values[rank], result, weights[rank])
        assert_allclose(tensor.grad.numpy(), expected, rtol=1e-12)

    strategy.run(fn)


def test_all_gather_gradient_is_the_own_slice(strategy, rank, size):
    def fn():
        tensor = torch.full((rank + 1, 2), float(rank), requires_grad=True)
        gathered = ms.get_replica_context().all_gather(tensor, 0)
        assert gathered.shape == (triangle(size) + size, 2)
        (gathered.sum() * (rank + 1)).backward()
        assert tensor.grad.tolist() == [[triangle(size) + size] * 2] * (rank + 1)

    strategy.run(fn)


def test_a_chain_of_collectives(strategy, rank, size):
    """d/dx_r of sum over replicas of (mean_s x_s)^2 is 2 mean x."""

    def fn():
        x = torch.tensor(float(rank), requires_grad=True)
        mean = ms.get_replica_context().all_reduce("mean", x)
        (mean * mean).backward()
        assert x.grad.item() == pytest.approx(size - 1)

    strategy.run(fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.float64])
def test_dtypes_and_results_without_graph(strategy, rank, size, dtype):
    per_replica = strategy.run(lambda: torch.full((2,), rank, dtype=dtype))
    assert isinstance(per_replica, ms.PerReplica)
    total = strategy.reduce("sum", per_replica)
    assert isinstance(total, np.ndarray)
    assert total.tolist() == [triangle(size)] * 2
    result = strategy.run(
        lambda: ms.get_replica_context().all_reduce("sum", torch.full((2,), rank, dtype=dtype))
    ).values[0]
    assert result.dtype == dtype
    assert result.tolist() == [triangle(size)] * 2
    assert strategy.gather(per_replica, 0).tolist() == [r for r in range(size) for _ in "ab"]


def test_backward_passes_of_different_calls_are_kept_apart(strategy, others):
    def fn():
        replica = ms.get_replica_context()
        x, z = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        first, second = replica.all_reduce("sum", x), replica.all_reduce("sum", z)
        (first if others else second).sum().backward()

    with pytest.raises(ms.errors.CollectiveMismatchError, match="gradient of all_reduce"):
        strategy.run(fn)


def test_masks_beside_floats_get_no_gradient(strategy, size):
    def fn():
        replica = ms.get_replica_context()
        x, mask = torch.ones(2, requires_grad=True), torch.tensor([True, False])
        total, any_of = replica.all_reduce("max", [x, mask])
        gathered, masks = replica.all_gather([x, mask], 0)
        assert any_of.tolist() == [True, False]
        assert not masks.requires_grad
        (total.sum() + gathered.sum()).backward()
        assert x.grad.tolist() == [1 + size] * 2

    strategy.run(fn)


def test_results_may_be_changed_and_so_may_inputs_of_sums(strategy, size):
    def fn():
        x = torch.ones(2, requires_grad=True)
        hidden = x * 2
        total = ms.get_replica_context().all_reduce("sum", hidden)
        hidden.detach().add_(1)
        total += 1
        total.sum().backward()
        assert x.grad.tolist() == [2 * size] * 2

    strategy.run(fn)


def test_odd_tensors(strategy, size):
    z = torch.tensor([1 + 2j])
    total = strategy.run(lambda: ms.get_replica_context().all_reduce("sum", z.conj()))
    assert total.values[0].tolist() == [size * (1 - 2j)]
    slices = ms.IndexedSlices(torch.ones(1, 2), torch.tensor([3]))
    for op, expected in (("sum", 1.0), ("mean", 1 / size)):
        reduced = strategy.run(
            lambda op=op: ms.get_replica_context().all_reduce(op, slices)
        ).values[0]
        assert reduced.indices.tolist() == [3] * size
        assert_allclose(reduced.values, expected)
    assert strategy.reduce("sum", 1) == size


def test_variables_take_tensors(strategy):
    with strategy.scope():
        variable = ms.Variable(torch.zeros(2, requires_grad=True), name="w")
    assert variable.dtype == np.float32
    variable.assign(torch.ones(2))
    assert variable.numpy().tolist() == [1, 1]
