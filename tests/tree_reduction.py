"""The definition that deterministic reductions are held to."""

import numpy as np


def multiply(a, b):
    """Multiply, complex numbers by their parts, each operation rounded."""
    if not np.iscomplexobj(a):
        return a * b
    product = np.empty_like(a)
    product.real = a.real * b.real - a.imag * b.imag
    product.imag = a.real * b.imag + a.imag * b.real
    return product


FUNCTIONS = {
    "sum": np.add,
    "mean": np.add,
    "prod": multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def fold_in_tree(function, rows):
    """Combine the first 2**k rows, the others, and then both, where 2**k is just too few."""
    if len(rows) == 1:
        return rows[0]
    half = 2 ** ((len(rows) - 1).bit_length() - 1)
    return function(fold_in_tree(function, rows[:half]), fold_in_tree(function, rows[half:]))


def expected_reduction(op, rows):
    """Return the reduction of `rows` in their own dtype, MEAN divided by their number."""
    total = fold_in_tree(FUNCTIONS[op], rows)
    if op == "mean":  # as NumPy means it for reals; complex numbers part by part
        parts = total.reshape(-1).view(total.real.dtype)
        mean = (parts / parts.dtype.type(len(rows))).astype(parts.dtype)
        total = mean.view(total.dtype).reshape(total.shape)
    return total


def values_of(rank, shape, dtype, seed=0):
    """Return what a rank brings: numbers of very different size, so that the order shows."""
    dtype = np.dtype(dtype)
    random = np.random.default_rng([seed, rank])
    if dtype.kind in "biu":
        return random.integers(0, 100, shape).astype(dtype)
    numbers = random.normal(size=shape) * 10.0 ** random.integers(-2, 3, shape)
    if dtype.kind == "c":
        numbers = numbers + 1j * random.normal(size=shape)
    return numbers.astype(dtype)
