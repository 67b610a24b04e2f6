"""Fifty steps beside PyTorch's optimizers, the oracle, on the sum of all replicas' gradients."""

import numpy as np
import pytest

import mpistrat as ms
from tests.devices import assert_allclose, assert_array_equal

torch = pytest.importorskip("torch")

SHAPES = ((7, 3), (5,), ())
STEPS = 50


def sgd(parameters, momentum=0, nesterov=False):
    return torch.optim.SGD(parameters, lr=0.05, momentum=momentum, nesterov=nesterov)


RULES = {
    "sgd": (lambda: ms.optimizers.SGD(0.05), sgd),
    "momentum": (lambda: ms.optimizers.SGD(0.05, 0.9), lambda p: sgd(p, 0.9)),
    "nesterov": (lambda: ms.optimizers.SGD(0.05, 0.9, True), lambda p: sgd(p, 0.9, True)),
    "adam": (
        lambda: ms.optimizers.Adam(0.01, 0.8, 0.95, 1e-6),
        lambda p: torch.optim.Adam(p, 0.01, (0.8, 0.95), 1e-6),
    ),
    "adamw": (
        lambda: ms.optimizers.Adam(0.01, weight_decay=0.2),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.2),
    ),
}


def gradients_of(size, dtype):
    """Return, for each step and shape, the gradients of all replicas: exact when summed."""
    rng = np.random.default_rng(5)
    shapes = [(STEPS, size, *shape) for shape in SHAPES]
    return [(rng.integers(-64, 64, shape) / 32).astype(dtype) for shape in shapes]


@pytest.mark.thorough_product
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("rule", RULES)
def test_fifty_steps_equal_pytorch_s(strategy, rank, size, rule, dtype):
    ours, theirs = RULES[rule]
    gradients = gradients_of(size, dtype)
    if np.dtype(dtype).kind == "c":
        gradients = [g + 1j * g[::-1] for g in gradients]
    starts = [np.full(shape, 1.5, dtype) for shape in SHAPES]
    with strategy.scope():
        variables = [ms.Variable(start, name=f"w{i}") for i, start in enumerate(starts)]
        optimizer = ours()
    parameters = [torch.nn.Parameter(torch.from_numpy(start.copy())) for start in starts]
    oracle = theirs(parameters)
    for step in range(STEPS):
        mine = [g[step, rank] for g in gradients]
        strategy.run(optimizer.apply_gradients, (list(zip(mine, variables, strict=True)),))
        for parameter, g in zip(parameters, gradients, strict=True):
            parameter.grad = torch.from_numpy(np.asarray(g[step].sum(0)))
        oracle.step()
    for variable, parameter in zip(variables, parameters, strict=True):
        expected = parameter.detach().numpy()
        # Rounding of the large weights on the way stays in those that end near zero.
        largest = np.abs(expected).max()
        assert_allclose(variable.numpy(), expected, rtol=1e-6, atol=1e-6 * largest)


@pytest.mark.parametrize("shape", [(2**15 + 3,), (2**16,), (3, 2**14)])
def test_arrays_of_several_blocks(strategy, shape):
    gradient = np.random.default_rng(1).standard_normal(shape)
    with strategy.scope():
        variable = ms.Variable(np.ones(shape))
        optimizer = ms.optimizers.Adam(0.1, weight_decay=0.1)
        for _ in range(3):
            optimizer.apply_gradients([(gradient, variable)])
    parameter = torch.nn.Parameter(torch.ones(shape, dtype=torch.float64))
    oracle = torch.optim.AdamW([parameter], 0.1, weight_decay=0.1)
    parameter.grad = torch.from_numpy(gradient)
    for _ in range(3):
        oracle.step()
    assert_allclose(variable.numpy(), parameter.detach().numpy(), rtol=1e-12)


def test_sparse_rows_equal_pytorch_s_sparse_adam(strategy, rank, size):
    rng = np.random.default_rng(3)
    indices = rng.integers(0, 9, (STEPS, size, 4))
    values = rng.standard_normal((STEPS, size, 4, 2))
    start = rng.standard_normal((10, 2))
    with strategy.scope():
        variable = ms.Variable(start)
        optimizer = ms.optimizers.Adam(0.01)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    oracle = torch.optim.SparseAdam([parameter], 0.01)
    for step in range(STEPS):
        mine = ms.IndexedSlices(values[step, rank], indices[step, rank])
        strategy.run(optimizer.apply_gradients, ([(mine, variable)],))
        # PyTorch 2.11 warns of checks that are off, also with check_invariants=True.
        with torch.sparse.check_sparse_tensor_invariants():
            parameter.grad = torch.sparse_coo_tensor(
                torch.from_numpy(indices[step].reshape(1, -1)),
                torch.from_numpy(values[step].reshape(-1, 2)),
                (10, 2),
            )
            oracle.step()
    # SparseAdam adds epsilon, 1e-8, to a root that is not yet corrected for the start.
    assert_allclose(variable.numpy(), parameter.detach().numpy(), rtol=1e-6, atol=1e-6)
    assert_array_equal(variable.numpy()[9], start[9])


def test_the_clipped_norm_equals_pytorch_s(strategy, rank, size):
    gradients = gradients_of(size, np.float64)
    with strategy.scope():
        variables = [ms.Variable(np.zeros(shape), name=f"w{i}") for i, shape in enumerate(SHAPES)]
        optimizer = ms.optimizers.SGD(1.0, global_clipnorm=2.0)
    mine = [g[0, rank] for g in gradients]
    strategy.run(optimizer.apply_gradients, (list(zip(mine, variables, strict=True)),))
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    for parameter, g in zip(parameters, gradients, strict=True):
        parameter.grad = torch.from_numpy(np.asarray(g[0].sum(0)))
    torch.nn.utils.clip_grad_norm_(parameters, 2.0)
    for variable, parameter in zip(variables, parameters, strict=True):
        # PyTorch adds 1e-6 to the norm.
        assert_allclose(variable.numpy(), -parameter.grad.numpy(), rtol=1e-5)
