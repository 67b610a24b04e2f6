"""The choice of the code that moves an array, and the refusal of what cannot be honoured."""

from __future__ import annotations

import functools

from mpistrat.options import CommunicationImplementation, CommunicationOptions

__all__ = ["check_options"]

_BUILT = (
    CommunicationImplementation.AUTO,
    CommunicationImplementation.MPI,
    CommunicationImplementation.STAGED,
)


@functools.lru_cache
def check_options(options: CommunicationOptions, device_kind: str) -> None:
    """Refuse the options that reductions on `device_kind` cannot honour. Local.

    Host arrays are reduced by MPI on their own memory. Device arrays travel through host
    copies, which is right under every MPI library.

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
    if options.deterministic:
        raise NotImplementedError("deterministic=True is not part of this version.")
    if options.wire_dtype is not None:
        raise NotImplementedError("wire_dtype is not part of this version. Use None.")
