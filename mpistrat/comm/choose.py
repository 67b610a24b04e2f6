"""The choice of the code that moves an array, and the refusal of what cannot be honoured."""

from __future__ import annotations

import functools

import numpy as np

from mpistrat.comm.dtypes import is_narrow
from mpistrat.comm.reducer import Reducer
from mpistrat.comm.shared import SharedReducer
from mpistrat.comm.sliced import SlicedReducer
from mpistrat.comm.transport import Transport
from mpistrat.comm.whole import WholeReducer
from mpistrat.options import CommunicationImplementation, CommunicationOptions, ReduceOp

__all__ = ["check_options", "choose_reducer", "spell_options"]

_BUILT = (
    CommunicationImplementation.AUTO,
    CommunicationImplementation.MPI,
    CommunicationImplementation.SHARED,
    CommunicationImplementation.STAGED,
)
_SHARING = (CommunicationImplementation.AUTO, CommunicationImplementation.SHARED)


@functools.lru_cache
def check_options(options: CommunicationOptions, device_kind: str) -> None:
    """Refuse the options that reductions on `device_kind` cannot honour. Local.

    Device arrays travel through host copies, which is right under every MPI library.

    Raises
    ------
    ValueError
        For NCCL without a GPU.
    NotImplementedError
        For what this version does not have.
    """
    if options.implementation is CommunicationImplementation.NCCL and device_kind != "gpu":
        raise ValueError(
            "CommunicationImplementation.NCCL reduces GPU arrays, but this replica computes on "
            "the host. Use AUTO."
        )
    if options.implementation not in _BUILT:
        names = ", ".join(member.name for member in _BUILT)
        raise NotImplementedError(
            f"CommunicationImplementation.{options.implementation.name} is not part of this "
            f"version. Use one of {names}."
        )
    if options.implementation is CommunicationImplementation.MPI and device_kind == "gpu":
        raise NotImplementedError(
            "CommunicationImplementation.MPI on device memory is not part of this version. "
            "Use AUTO or STAGED."
        )


def choose_reducer(
    transport: Transport,
    options: CommunicationOptions,
    op: ReduceOp,
    dtype: np.dtype,
    num_bytes: int,
) -> tuple[Reducer, str]:
    """Return what reduces a message by `op`, and why. Local, and the same on every rank."""
    if options.deterministic:
        return SlicedReducer(transport), "deterministic: the order of the operands is ours"
    if is_narrow(dtype):
        return SlicedReducer(transport), f"MPI cannot add {dtype}"
    asked, node = options.implementation, transport.node
    if asked not in _SHARING:
        return WholeReducer(transport), f"asked for: {asked.name}"
    if node is None:
        return WholeReducer(transport), "no ranks share memory"
    if not node.knows(op, dtype):
        return WholeReducer(transport), f"no compiled {op.name} of {dtype}"
    if asked is CommunicationImplementation.AUTO and num_bytes < node.min_bytes:
        return WholeReducer(transport), f"MPI was faster below {node.min_bytes} bytes"
    return SharedReducer(node), "ranks share memory"


@functools.lru_cache
def spell_options(options: CommunicationOptions) -> str | tuple[()]:
    """Return what the ranks must agree on before a reduction, empty for the defaults. Local."""
    default = CommunicationOptions()
    differing = [
        f"{name}={getattr(options, name)}"
        for name in ("bytes_per_pack", "implementation", "deterministic", "wire_dtype")
        if getattr(options, name) != getattr(default, name)
    ]
    return f"with {', '.join(differing)}" if differing else ()
