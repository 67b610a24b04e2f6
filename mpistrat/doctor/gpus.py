"""GPUs: who computes on which, and NCCL between them."""

from __future__ import annotations

from collections.abc import Sequence

from mpistrat.doctor.facts import RankFacts, count_allocated_gpus
from mpistrat.doctor.findings import Finding, ok, problem, warning
from mpistrat.doctor.processors import by_node
from mpistrat.epochs.report import rank_list
from mpistrat.errors import LaunchError
from mpistrat.strategies.device_choice import choose_devices

__all__ = ["check_gpus", "check_nccl"]

_WHY_SHARED = "Ranks on one GPU take turns on it and share its memory; NCCL refuses them."


def check_gpus(facts: Sequence[RankFacts]) -> Finding:
    """Return whether each rank has a GPU of its own, where there are GPUs. Local."""
    for node in by_node(facts):
        finding = _too_few(node)
        if finding is not None:
            return finding
    numbers = {node: number for number, node in enumerate(dict.fromkeys(f.node for f in facts))}
    try:
        devices = choose_devices(
            [each.offer for each in facts], [numbers[each.node] for each in facts], False
        )
    except LaunchError as error:
        what, _, remedy = str(error).partition(". ")
        return problem("gpus", what, _WHY_SHARED, remedy)
    on_host = [
        each.rank for each, device in zip(facts, devices, strict=True) if device.kind == "cpu"
    ]
    if len(on_host) == len(facts):
        return _no_gpus(facts)
    if on_host:
        return problem(
            "gpus",
            f"{rank_list(on_host)} see no GPU, the others do: {facts[on_host[0]].no_gpu}",
            "Arrays of all ranks travel through host memory then, and the slowest sets the pace.",
            "srun --gpus-per-task=1, and the same CuPy on every node",
        )
    owners = [
        f"rank {each.rank}: {device} {each.gpu_names[device.index]}"
        for each, device in zip(facts, devices, strict=True)
    ]
    shown = "; ".join(owners[:4]) + ("; ..." if len(owners) > 4 else "")
    return ok("gpus", f"one for each rank ({shown})")


def _too_few(node: Sequence[RankFacts]) -> Finding | None:
    """Return the problem where variables name fewer GPUs than the node has ranks. Local."""
    allocated = count_allocated_gpus(list(node))
    has_own = any("SLURM_GPUS_PER_TASK" in each.gpu_variables for each in node)
    if not allocated or allocated >= len(node) or has_own or any(each.offer for each in node):
        return None
    names = ", ".join(f"{k}={v}" for k, v in node[0].gpu_variables.items())
    return problem(
        "gpus",
        f"{len(node)} ranks on {node[0].node} have {allocated} GPU(s) ({names})",
        _WHY_SHARED,
        f"srun --ntasks-per-node={allocated}, or srun --gpus-per-node={len(node)}, or "
        'MPIStrategy(device="cpu")',
    )


def _no_gpus(facts: Sequence[RankFacts]) -> Finding:
    reason = facts[0].no_gpu or "CuPy sees no GPU"
    if any(count_allocated_gpus(node) for node in by_node(facts)):
        return warning(
            "gpus",
            f"GPUs are allocated, but {reason}",
            "The replicas compute in host memory.",
            "pip install cupy-cuda13x, or cupy-cuda12x for an older driver",
        )
    return ok("gpus", f"none; replicas compute in host memory ({reason})")


def check_nccl(facts: Sequence[RankFacts]) -> Finding:
    """Return whether the GPUs can be connected by NCCL. Local."""
    with_gpu = [each for each in facts if each.offer is not None]
    if not with_gpu:
        return ok("nccl", "not needed without GPUs")
    versions = {each.nccl for each in with_gpu}
    if versions == {""}:
        return warning(
            "nccl",
            "CuPy does not find NCCL",
            "Reductions take MPI where it is proved CUDA-aware, else they go through the host.",
            'pip install nvidia-nccl-cu13 (or -cu12), then python -c "from cupy.cuda import nccl"',
        )
    if len(versions) > 1:
        without = [each.rank for each in with_gpu if each.nccl != with_gpu[0].nccl]
        return problem(
            "nccl",
            f"rank 0 has NCCL {with_gpu[0].nccl or 'not at all'}, {rank_list(without)} another",
            "NCCL connects ranks of one version; without it reductions are slower.",
            "Use one environment on all nodes.",
        )
    return ok("nccl", versions.pop())
