"""Tensors of each dtype and form that depend on the rank."""

import torch

INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
NUMBERS = [*INTEGERS, *FLOATS, *COMPLEX]
MOVED = [*NUMBERS, "bool", "float8_e4m3fn", "uint16", "uint64", "complex32"]
FORMS = ["whole", "column", "transposed", "scalar", "empty", "one of a column"]


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
    if form == "one of a column":  # contiguous, whatever its stride
        return base[1:2, 2]
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
