"""Replica drift of modules: digests of tensors, compared over ranks."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpistrat import nests
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.context import collectives_of
from mpistrat.errors import ReplicaDriftError
from mpistrat.options import ReduceOp
from mpistrat.pytorch import host_array
from mpistrat.system.text import rank_list, ranks_by_value
from mpistrat.torch.group_strategy import GroupStrategy, strategy_of_group
from mpistrat.torch.launching import backend_of
from mpistrat.variables.drift import differ_over_ranks, digest_of, lines_of_groups

_KIND = "torch.assert_replicas_agree"


def assert_replicas_agree(
    module_or_tensors: object, *, group: dist.ProcessGroup | None = None
) -> None:
    """Raise an error unless all ranks hold the same bytes.

    **Collective** over `group`: every rank passes a module, or tensors of the same names. As long
    as all agree, this costs one message of 16 bytes. Bytes are compared: NaNs of equal bits are
    equal, and ``0.0`` and ``-0.0`` differ.

    Parameters
    ----------
    module_or_tensors : torch.nn.Module, torch.Tensor, or dicts, lists and tuples of them
        For a module, its parameters and buffers are compared, under the names of ``state_dict()``;
        for a DistributedDataParallel, those of the module inside. Batch statistics normally differ
        between ranks: for a module with BatchNorm, pass ``dict(module.named_parameters())``.
    group : torch.distributed.ProcessGroup, optional
        A group of any backend. Default: the world group.

    Raises
    ------
    ReplicaDriftError
        On every rank, if a tensor differs, also in dtype or shape, or is missing. The error names
        the first such tensor, the ranks, and the largest difference. The group stays usable.
    TypeError
        If a value is not a dense tensor, such as a sharded DTensor.
    ValueError
        If there is no tensor.

    Examples
    --------
    >>> model = torch.nn.Linear(64, 10)
    >>> mst.assert_replicas_agree(torch.nn.parallel.DistributedDataParallel(model))
    """
    strategy = strategy_of_group(group)
    if isinstance(strategy, GroupStrategy):
        with collectives_of(strategy).call(_KIND) as call:
            _compare(call, module_or_tensors)
        return
    issuer = backend_of(dist.group.WORLD if group is None else group)
    opts = dist.BroadcastOptions()
    opts.asyncOp = False
    issuer.issue(_KIND, lambda call: _compare(call, module_or_tensors), [], opts).wait()


def _tensors_in(things: object) -> dict[str, torch.Tensor]:
    """Return the tensors in modules and nests, by path."""
    found: dict[str, torch.Tensor] = {}
    paths, leaves, _ = nests.flatten_with_paths(things)
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, torch.nn.Module):
            module = leaf.module if isinstance(leaf, DistributedDataParallel) else leaf
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                found[f"{path}/{name}" if path else name] = tensor
        elif isinstance(leaf, torch.Tensor):
            found[path] = leaf
        else:
            raise TypeError(
                f"{_KIND} takes modules, tensors and nests of them, not {leaf!r} of type "
                f"{type(leaf).__name__}."
            )
    if not found:
        raise ValueError(f"{_KIND}: there is no tensor to compare in {things!r}.")
    return found


def _bytes_of(path: str, tensor: torch.Tensor) -> np.ndarray:
    whole: Any = tensor
    if hasattr(tensor, "to_local"):
        if not all(each.is_replicate() for each in whole.placements):
            raise TypeError(
                f"{_KIND}: {path!r} is a DTensor whose shards differ from rank to rank. Compare "
                "what is replicated, or tensor.full_tensor()."
            )
        whole = whole.to_local()
    if whole.device.type == "meta" or whole.layout is not torch.strided or whole.is_nested:
        raise TypeError(
            f"{_KIND}: {path!r}, {whole.dtype} of layout {whole.layout} on {whole.device}, is not "
            "a dense tensor with values. Compare the tensors that it consists of."
        )
    plain = whole.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return host_array(plain.reshape(-1).view(torch.uint8))


def _compare(call: CollectiveCall, things: object) -> None:
    """Raise on every rank unless all hold the same bytes. **Collective**."""
    tensors = _tensors_in(things)
    rows = [
        [path, f"{each.dtype} of the shape {tuple(each.shape)}", digest_of(_bytes_of(path, each))]
        for path, each in tensors.items()
    ]
    # Each rank may have filled its dicts in a different order.
    whole = blake2b(repr(sorted(rows)).encode(), digest_size=8).digest()
    digest = np.frombuffer(whole, np.uint64)
    if differ_over_ranks(call, np.stack([digest, ~digest])).any():
        raise _drift(call, tensors, rows)


def _drift(
    call: CollectiveCall, tensors: dict[str, torch.Tensor], rows: list[list[Any]]
) -> ReplicaDriftError:
    """Return the error that says which tensor differs on which ranks. **Collective**."""
    tables = [
        {path: (text, digest) for path, text, digest in of_rank} for of_rank in call.exchange(rows)
    ]
    paths = dict.fromkeys(path for table in tables for path in table)
    differing = [path for path in paths if len({table.get(path) for table in tables}) > 1]
    path = differing[0]
    texts = [table[path][0] if path in table else "is missing" for table in tables]
    if len(set(texts)) > 1:
        what = f"The tensor {path!r} is not the same on all ranks:"
        groups = ranks_by_value(enumerate(texts)).items()
        lines = [f"  {rank_list(ranks)}: {text}" for text, ranks in groups]
    else:
        what = f"The replicas of the tensor {path!r}, {texts[0]}, have drifted apart:"
        lines = lines_of_groups(dict(enumerate(table[path][1] for table in tables)))
        lines += _difference(call, tensors[path])
    lines.append(f"Other tensors that differ: {len(differing) - 1}.")
    return ReplicaDriftError(
        "\n".join([what, *lines])
        + " Steps must be the same on every rank. To continue, broadcast the tensors of one rank "
        "or restore a checkpoint. Statistics that BatchNorm keeps differ by nature: pass "
        "dict(module.named_parameters())."
    )


def _difference(call: CollectiveCall, tensor: torch.Tensor) -> list[str]:
    """Return a line about the largest difference between two ranks. **Collective**."""
    if tensor.is_complex():
        return []
    numbers = host_array(tensor.detach().to(torch.float64))
    lowest = call.all_reduce(ReduceOp.MIN, [numbers])[0]
    highest = call.all_reduce(ReduceOp.MAX, [numbers])[0]
    with np.errstate(invalid="ignore"):
        apart = np.atleast_1d(np.where(lowest == highest, 0, highest - lowest))
    lines = []
    if not np.isnan(apart).all():
        place = np.unravel_index(np.nanargmax(apart), apart.shape)
        where = f" at {list(map(int, place))}" if tensor.dim() else ""
        lines.append(f"  largest difference: {apart[place]:g}{where}")
    if np.isnan(apart).any():
        lines.append(f"  elements that are NaN on some rank: {np.isnan(apart).sum()}")
    return lines
