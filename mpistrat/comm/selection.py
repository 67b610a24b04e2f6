"""Reducer selection for a message, and the reason for it."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np

from mpistrat.comm.device_reducers import (
    DeviceCapabilities,
    DirectReducer,
    NcclReducer,
    StagedReducer,
)
from mpistrat.comm.ops import compiled_function
from mpistrat.comm.pack_plan import Pack, Plan
from mpistrat.comm.reducers import MpiReducer, ReduceScatterReducer
from mpistrat.comm.transport import NodeReducer, Reducer, Transport
from mpistrat.comm.wire import is_narrow
from mpistrat.options import CommunicationImplementation, CommunicationOptions, ReduceOp

_AUTO = CommunicationImplementation.AUTO
_MPI = CommunicationImplementation.MPI
_NCCL = CommunicationImplementation.NCCL
_SHARED = CommunicationImplementation.SHARED
_STAGED = CommunicationImplementation.STAGED

_SHARING = (_AUTO, _SHARED, _NCCL)
"""With these, host arrays are reduced in shared memory. NCCL affects only device arrays."""


def check_options(options: CommunicationOptions, capabilities: DeviceCapabilities) -> None:
    """Raise for NCCL, or MPI on device memory, if it cannot be used."""
    if options.implementation is _NCCL and capabilities.why_not_nccl:
        raise ValueError(
            "CommunicationImplementation.NCCL reduces arrays on GPUs of which each rank has its "
            f"own, but {capabilities.why_not_nccl}. Use AUTO."
        )
    if options.implementation is _MPI and capabilities.why_not_mpi:
        raise ValueError(
            "CommunicationImplementation.MPI gives device memory to the MPI library itself, but "
            f"{capabilities.why_not_mpi}\nUse AUTO or STAGED."
        )


def check_plan(options: CommunicationOptions, plan: Plan) -> None:
    """Raise for device arrays whose dtype NCCL does not support, if NCCL is requested."""
    if options.implementation is not _NCCL:
        return
    for pack in plan.packs:
        if pack.on_device and not NcclReducer.knows(plan.op, pack.wire):
            raise TypeError(
                f"NCCL cannot reduce arrays of dtype {pack.wire} with {plan.op.name}: it supports "
                "integers of 8, 32 and 64 bits, floats, and SUM and MEAN of complex numbers. "
                "Use CommunicationImplementation.AUTO."
            )


def choose_reducer(
    transport: Transport,
    options: CommunicationOptions,
    op: ReduceOp,
    dtype: np.dtype,
    num_bytes: int,
    capabilities: DeviceCapabilities | None = None,
) -> tuple[Reducer, str]:
    """Return the reducer of a message, and why; `capabilities` if it is in device memory."""
    # All inputs of the decision are equal on all ranks, so they choose the same without a message.
    if capabilities is None or capabilities.copier is None:
        return _choose_on_host(transport, options, op, dtype, num_bytes)
    way, why = _STAGED, "there is nothing to move"
    if num_bytes:
        way, why = choose_way(options, op, dtype, capabilities)
    if way is _NCCL and capabilities.link is not None:
        return NcclReducer(capabilities.link), why
    # Chosen by the size of the whole message, so that the bits are the same as for a host array.
    on_host, why_on_host = _choose_on_host(transport, options, op, dtype, num_bytes, staged=True)
    staged = StagedReducer(capabilities.copier, on_host)
    if way is _MPI:
        return DirectReducer(transport, staged), why
    return staged, f"{why}; {type(on_host).__name__} on the host: {why_on_host}"


def choose_way(
    options: CommunicationOptions,
    op: ReduceOp,
    dtype: np.dtype,
    capabilities: DeviceCapabilities,
) -> tuple[CommunicationImplementation, str]:
    """Return NCCL, MPI or STAGED for a message in device memory, and why."""
    asked = options.implementation
    if asked is not _AUTO:
        return (_STAGED if asked is _SHARED else asked), f"asked for: {asked.name}"
    why_not_nccl = capabilities.why_not_nccl
    if not why_not_nccl and not NcclReducer.knows(op, dtype):
        why_not_nccl = f"NCCL has no {op.name} for {dtype}"
    if not why_not_nccl:
        return _NCCL, "each rank has its own GPU"
    if not capabilities.why_not_mpi:
        return _MPI, f"MPI is proved CUDA-aware, and {why_not_nccl}"
    why_not_mpi = capabilities.why_not_mpi.splitlines()[0].rstrip(":")
    return _STAGED, f"{why_not_mpi}, and {why_not_nccl}"


def _choose_on_host(
    transport: Transport,
    options: CommunicationOptions,
    op: ReduceOp,
    dtype: np.dtype,
    num_bytes: int,
    staged: bool = False,
) -> tuple[Reducer, str]:
    if is_narrow(dtype):
        return ReduceScatterReducer(transport), f"MPI cannot add {dtype}"
    if dtype.char == "g" and op in (ReduceOp.MIN, ReduceOp.MAX):
        # Other floats are sent as integers in the same order: see `as_ordered_integers`.
        return ReduceScatterReducer(transport), f"MPI does not define {op.name} of NaN"
    asked, node = options.implementation, transport.node
    if not transport.has_fast_paths and transport.size > 1 and (asked in _SHARING or staged):
        # It has the same bits as shared memory, and as numbers that are sent with a round.
        return ReduceScatterReducer(transport), "fast paths are off"
    if options.deterministic:
        if _keeps_order(node, op, dtype) and (asked in _SHARING or staged):
            return node, "ranks share memory, where the order of the operands is ours"
        return ReduceScatterReducer(transport), "deterministic: the order of the operands is ours"
    if asked not in _SHARING and not staged:
        return MpiReducer(transport), f"asked for: {asked.name}"
    if node is None:
        return MpiReducer(transport), "no ranks share memory"
    if not node.knows(op, dtype):
        return MpiReducer(transport), f"no compiled {op.name} of {dtype}"
    if asked is not _SHARED and num_bytes < node.min_bytes:
        return MpiReducer(transport), f"MPI was faster below {node.min_bytes} bytes"
    return node, "ranks share memory"


def _keeps_order(node: NodeReducer | None, op: ReduceOp, dtype: np.dtype) -> TypeGuard[NodeReducer]:
    """Return whether `node` reduces `dtype` in the tree of `comm.ops.combine`."""
    return node is not None and node.keeps_order and node.knows(op, dtype)


def is_shareable(options: CommunicationOptions, op: ReduceOp, pack: Pack) -> bool:
    """Return whether shared memory may be used for `pack`, if there is any."""
    is_known = compiled_function(op, pack.dtype) is not None and not pack.on_device
    return is_known and not is_narrow(pack.wire) and options.implementation in _SHARING
