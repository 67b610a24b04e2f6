"""Gradients of the collectives that move parts, against the same program in one process."""

import numpy as np
import pytest

import mpistrat as ms
from tests.devices import assert_allclose

torch = pytest.importorskip("torch")


def run(strategy, function):
    """Return what `function` gives of the replica context."""
    result = strategy.run(lambda: function(ms.get_replica_context()))
    return strategy.experimental_local_results(result)[0]


def cut(tensor, size, axis=0):
    return torch.tensor_split(tensor, size, axis)


def shifted(values, offset, periodic):
    size = len(values)
    if periodic:
        return [values[(rank - offset) % size] for rank in range(size)]
    return [
        values[rank - offset] if 0 <= rank - offset < size else 0 * values[rank]
        for rank in range(size)
    ]


def scanned(values, exclusive):
    nothing = 0 * values[0]
    return [sum(values[: rank + (not exclusive)], start=nothing) for rank in range(len(values))]


CASES = {
    "reduce_scatter sum": (
        lambda ctx, x: ctx.reduce_scatter("sum", x),
        lambda xs: cut(sum(xs), len(xs)),
    ),
    "reduce_scatter mean, axis 1": (
        lambda ctx, x: ctx.reduce_scatter("mean", x, axis=-1),
        lambda xs: cut(sum(xs) / len(xs), len(xs), 1),
    ),
    "all_to_all": (
        lambda ctx, x: ctx.all_to_all(x),
        lambda xs: [torch.cat([cut(x, len(xs))[rank] for x in xs]) for rank in range(len(xs))],
    ),
    "all_to_all, other axes": (
        lambda ctx, x: ctx.all_to_all(x, 0, 1),
        lambda xs: [torch.cat([cut(x, len(xs))[rank] for x in xs], 1) for rank in range(len(xs))],
    ),
    "broadcast": (
        lambda ctx, x: ctx.broadcast(x, root=0),
        lambda xs: [xs[0]] * len(xs),
    ),
    "scatter": (
        lambda ctx, x: ctx.scatter(x, root=0),
        lambda xs: cut(xs[0], len(xs)),
    ),
    "shift": (lambda ctx, x: ctx.shift(x), lambda xs: shifted(xs, 1, False)),
    "shift back": (lambda ctx, x: ctx.shift(x, -2), lambda xs: shifted(xs, -2, False)),
    "shift around": (
        lambda ctx, x: ctx.shift(x, 1, periodic=True),
        lambda xs: shifted(xs, 1, True),
    ),
    "scan": (lambda ctx, x: ctx.scan("sum", x), lambda xs: scanned(xs, False)),
    "exclusive scan": (
        lambda ctx, x: ctx.scan("sum", x, exclusive=True),
        lambda xs: scanned(xs, True),
    ),
}


def inputs(size, dtype=torch.float64):
    return [
        torch.tensor(np.random.default_rng(each).random((5, 4)), dtype=dtype, requires_grad=True)
        for each in range(size)
    ]


def loss_of(result, rank):
    weight = torch.arange(result.numel(), dtype=result.dtype).reshape(result.shape)
    return (result**2 * (weight + rank + 1)).sum()


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(strategy, rank, size, name):
    call, model = CASES[name]
    serial = inputs(size)
    results = model(serial)
    sum(loss_of(result, each) for each, result in enumerate(results)).backward()
    own = inputs(size)[rank]

    def step(ctx):
        # Between others that need none.
        result = call(ctx, {"n": np.ones((5, 4)), "x": own, "i": torch.ones((5, 4)).long()})
        loss_of(result["x"], rank).backward()
        return result["x"].detach().numpy(), result["i"].dtype

    found, dtype = run(strategy, step)
    assert_allclose(found, results[rank].detach().numpy())
    assert dtype == torch.int64 or name.startswith("reduce_scatter mean")
    expected = serial[rank].grad
    expected = np.zeros((5, 4)) if expected is None else expected.numpy()
    assert_allclose(own.grad.numpy(), expected)


@pytest.mark.parametrize("name", ["broadcast", "scatter"])
def test_tensors_come_to_those_who_gave_nothing(strategy, rank, size, name):
    weight = torch.tensor([[1.0, 2.0]] * 6, dtype=torch.bfloat16, requires_grad=True)

    def step(ctx):
        value = weight if rank == 0 else None
        part = ctx.broadcast(value) if name == "broadcast" else ctx.scatter(value)
        part.sum().backward()
        return part.dtype, tuple(part.shape)

    rows = 6 if name == "broadcast" else len(cut(torch.zeros(6), size)[rank])
    assert run(strategy, step) == (torch.bfloat16, (rows, 2))
    if rank == 0:
        assert (weight.grad == (size if name == "broadcast" else 1)).all()


@pytest.mark.parametrize("op", ["max", "prod"])
def test_other_gradients_are_refused_before_anything_moves(strategy, size, op):
    own = torch.ones(4, requires_grad=True)
    for call in (
        lambda ctx: ctx.scan(op, own),
        lambda ctx: ctx.reduce_scatter(op, own),
    ):
        with pytest.raises(NotImplementedError, match="detach"):
            run(strategy, call)
    assert run(strategy, lambda ctx: ctx.scan(op, own.detach())).tolist() == [1.0] * 4
    assert run(strategy, lambda ctx: ctx.all_reduce("sum", 1.0)) == size
