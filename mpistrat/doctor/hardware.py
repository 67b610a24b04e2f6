"""Hardware checks: processors, GPUs, CUDA-aware MPI, bandwidth between ranks."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpistrat.arrays import Device
from mpistrat.cuda_awareness import (
    Answer,
    CudaAwareness,
    Evidence,
    gather_claims,
    list_libraries,
    list_switches,
    loaded_files,
)
from mpistrat.cuda_awareness.trial import cuda_awareness
from mpistrat.doctor.facts import (
    Finding,
    RankFacts,
    count_allocated_gpus,
    mpi_libraries,
)
from mpistrat.errors import LaunchError
from mpistrat.mpi.world import World
from mpistrat.settings import environment, settings_at_the_end
from mpistrat.strategies.devices import choose_devices, ranks_on_one_gpu
from mpistrat.system.text import counted, rank_list


def _by_node(facts: Sequence[RankFacts]) -> list[list[RankFacts]]:
    """Return the facts grouped by node."""
    nodes: dict[str, list[RankFacts]] = {}
    for each in facts:
        nodes.setdefault(each.node, []).append(each)
    return list(nodes.values())


def _cores_of(node: Sequence[RankFacts]) -> int:
    return len({core for each in node for core in each.cores})


def check_cores(facts: Sequence[RankFacts]) -> Finding:
    """Return the finding about cores: whether each rank has one."""
    worst = max(_by_node(facts), key=lambda node: len(node) / max(_cores_of(node), 1))
    num_cores = _cores_of(worst)
    if len(worst) > num_cores:
        return Finding.warning(
            "cores",
            f"{len(worst)} ranks share {counted(num_cores, 'core')} on {worst[0].node}",
            "Ranks wait for each other in every collective, and the slowest sets the pace.",
            f"srun --ntasks-per-node={num_cores}, mpiexec -n {num_cores}; or more cores: "
            "srun --cpus-per-task=1, mpiexec --bind-to none",
        )
    fewest = min(len(each.cores) for each in facts)
    most = max(len(each.cores) for each in facts)
    span = counted(most, "core") if fewest == most else f"{fewest} to {counted(most, 'core')}"
    ranks, cores = counted(len(worst), "rank"), counted(num_cores, "core")
    return Finding.ok("cores", f"{ranks} on {cores}, {span} visible to each")


def check_blas_threads(facts: Sequence[RankFacts]) -> Finding:
    """Return the finding about BLAS threads: whether there are more than cores."""
    for node in _by_node(facts):
        num_cores = _cores_of(node)
        share = max(num_cores // len(node), 1)
        for each in node:
            if each.asked_threads > max(len(each.cores), 1):
                names = ", ".join(f"{k}={v}" for k, v in each.thread_variables.items())
                return _too_many(
                    f"{each.asked_threads} BLAS threads on {rank_list([each.rank])}, which may use "
                    f"{counted(len(each.cores), 'core')} ({names or 'no variable limits them'})",
                    min(share, max(len(each.cores), 1)),
                )
        num_threads = sum(each.asked_threads for each in node)
        if num_threads <= num_cores or all(each.asked_threads == 1 for each in node):
            continue
        each = node[0]
        names = ", ".join(f"{k}={v}" for k, v in each.thread_variables.items())
        seen = (
            f"{counted(len(node), 'rank')} with {each.asked_threads} BLAS threads each on "
            f"{counted(num_cores, 'core')} of {each.node} ({names or 'no variable limits them'})"
        )
        # Up to twice as many threads are common in small trials with two ranks, and cost little.
        if each.thread_variables or num_threads > 2 * num_cores:
            return _too_many(seen, share)
        return Finding.warning("blas", seen, _WHY_THREADS, _limit_threads(share))
    most = max(each.asked_threads for each in facts)
    return Finding.ok("blas", f"{counted(most, 'thread')} per rank for linear algebra")


_WHY_THREADS = "Threads that share a core wait for each other, and matrix products are much slower."


def _limit_threads(number: int) -> str:
    return f"export OMP_NUM_THREADS={number} OPENBLAS_NUM_THREADS={number}"


def _too_many(seen: str, share: int) -> Finding:
    return Finding.problem("blas", seen, _WHY_THREADS, _limit_threads(share))


_WHY_SHARED = (
    "Ranks on one GPU take turns on it and share its memory, and NCCL does not support this."
)


def check_gpus(facts: Sequence[RankFacts]) -> Finding:
    """Return the finding about GPUs: whether each rank has its own, if there are any."""
    for node in _by_node(facts):
        finding = _too_few(node)
        if finding is not None:
            return finding
    numbers = {node: number for number, node in enumerate(dict.fromkeys(f.node for f in facts))}
    offers, nodes = [each.offer for each in facts], [numbers[each.node] for each in facts]
    may_share = settings_at_the_end().share_gpus
    try:
        devices = choose_devices(offers, nodes, may_share)
    except LaunchError as error:
        what, _, remedy = str(error).partition(". ")
        return Finding.problem("gpus", what, _WHY_SHARED, remedy)
    on_host = [
        each.rank for each, device in zip(facts, devices, strict=True) if device.kind == "cpu"
    ]
    if len(on_host) == len(facts):
        return _no_gpus(facts)
    if on_host:
        return Finding.problem(
            "gpus",
            f"{rank_list(on_host)} see no GPU, the others do: {facts[on_host[0]].no_gpu}",
            "All arrays are then copied through host memory, and the slowest rank sets the pace.",
            "srun --gpus-per-task=1, and the same CuPy on every node",
        )
    owners = [
        f"rank {each.rank}: {device} {each.gpu_names[device.index]}"
        for each, device in zip(facts, devices, strict=True)
    ]
    shown = "; ".join(owners[:4]) + ("; ..." if len(owners) > 4 else "")
    shared = ranks_on_one_gpu(offers, devices)
    if shared:
        seen = f"{rank_list(shared)} share one GPU, as MPISTRAT_SHARE_GPUS=on allows ({shown})"
        return Finding.warning(
            "gpus", seen, _WHY_SHARED, "Start as many ranks on a node as it has GPUs."
        )
    return Finding.ok("gpus", f"one for each rank ({shown})", "one for each rank")


def _too_few(node: Sequence[RankFacts]) -> Finding | None:
    """Return a problem if the variables name fewer GPUs than the node has ranks."""
    allocated = count_allocated_gpus(list(node))
    has_own = any("SLURM_GPUS_PER_TASK" in each.gpu_variables for each in node)
    if not allocated or allocated >= len(node) or has_own or any(each.offer for each in node):
        return None
    names = ", ".join(f"{k}={v}" for k, v in node[0].gpu_variables.items())
    return Finding.problem(
        "gpus",
        f"{len(node)} ranks on {node[0].node} have {counted(allocated, 'GPU')} ({names})",
        _WHY_SHARED,
        f"srun --ntasks-per-node={allocated}, or srun --gpus-per-node={len(node)}, or "
        'MPIStrategy(device="cpu")',
    )


def _no_gpus(facts: Sequence[RankFacts]) -> Finding:
    reason = facts[0].no_gpu or "CuPy sees no GPU"
    if any(count_allocated_gpus(node) for node in _by_node(facts)):
        return Finding.warning(
            "gpus",
            f"GPUs are allocated, but {reason}",
            "The replicas compute on the CPU.",
            "pip install cupy-cuda13x, or cupy-cuda12x for an older driver",
        )
    short = "none, so the replicas compute on the CPU"
    return Finding.ok("gpus", f"{short} ({reason})", short)


def check_nccl(facts: Sequence[RankFacts]) -> Finding:
    """Return the finding about NCCL: whether it can connect the GPUs."""
    with_gpu = [each for each in facts if each.offer is not None]
    if not with_gpu:
        return Finding.ok("nccl", "not needed without GPUs")
    versions = {each.nccl for each in with_gpu}
    if versions == {""}:
        return Finding.warning(
            "nccl",
            "CuPy does not find NCCL",
            "Reductions use MPI if it is proved to be CUDA-aware, otherwise host memory.",
            'pip install nvidia-nccl-cu13 (or -cu12), then python -c "from cupy.cuda import nccl"',
        )
    if len(versions) > 1:
        without = [each.rank for each in with_gpu if each.nccl != with_gpu[0].nccl]
        return Finding.problem(
            "nccl",
            f"rank 0 has {_nccl_of(with_gpu[0])}, but {rank_list(without)} a different version",
            "NCCL needs the same version on all ranks; without it, reductions are slower.",
            "Use one environment on all nodes.",
        )
    return Finding.ok("nccl", versions.pop())


def _nccl_of(facts: RankFacts) -> str:
    return f"NCCL {facts.nccl}" if facts.nccl else "no NCCL"


_FUNCTIONS = (b"cuPointerGetAttribute", b"cudaPointerGetAttributes", b"cuMemcpy")
"""CUDA functions. A library needs one of them to recognize device memory."""


@dataclass(frozen=True)
class CudaFacts:
    """Evidence about CUDA-awareness on this rank, and the result of all ranks' trial."""

    claims: tuple[str, ...] = ()
    """Evidence for it from the library and the environment."""
    only_switches: bool = True
    """Whether the only evidence is environment variables."""
    is_vouched_for: bool = False
    """Whether the user has set MPISTRAT_CUDA_AWARE=on."""
    has_part: bool = False
    """Whether the library has code for device memory."""
    tried: CudaAwareness | None = None
    """Answer of all ranks; ``None`` if not all of them have GPUs."""


def collect_cuda_facts(world: World, device: Device, all_have_gpus: bool) -> CudaFacts:
    """Return the evidence of this rank, with a trial if all have GPUs. **Collective**."""
    override = settings_at_the_end().cuda_aware
    tried = None
    if all_have_gpus:
        tried = cuda_awareness(world, device, override)
    evidence: Sequence[Evidence] = gather_claims(world.comm)
    switches = list_switches(environment())
    claims = [each.text for each in evidence if each.is_claim]
    files = loaded_files()
    return CudaFacts(
        claims=tuple(claims),
        only_switches=claims == ([switches.text] if switches.is_claim else []),
        is_vouched_for=override is True,
        has_part=has_cuda_part(files),
        tried=tried,
    )


def has_cuda_part(files: Sequence[str]) -> bool:
    """Return whether the MPI library among the loaded `files`, or a component of it, uses CUDA."""
    if list_libraries(files).is_claim:
        return True
    for library in map(Path, mpi_libraries(files)):
        if list_libraries(map(str, library.parent.glob("*/*cuda*.so*"))).is_claim:
            return True
        own = {each.resolve() for each in library.parent.glob("libopen-pal.so*")}
        if any(_names_cuda(each) for each in {library, *own}):
            return True
    return False


def _names_cuda(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            text = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            with text:
                return any(text.find(name) >= 0 for name in _FUNCTIONS)
    except (OSError, ValueError):
        return False


def check_cuda_awareness(facts: CudaFacts) -> Finding:
    """Return the finding about CUDA-aware MPI: whether the evidence is correct."""
    said = "; ".join(facts.claims)
    if facts.is_vouched_for and not facts.has_part:
        return Finding.problem(
            "cuda-aware",
            "claimed by MPISTRAT_CUDA_AWARE=on, but the MPI library has no code for CUDA",
            "mpistrat then passes GPU memory to MPI, and the job ends with a segmentation fault.",
            "unset MPISTRAT_CUDA_AWARE",
        )
    if facts.tried is not None:
        return _judge_trial(facts.tried, said)
    if facts.claims and facts.only_switches and not facts.has_part:
        names = " ".join(each.partition("=")[0] for each in said.removeprefix("set: ").split(", "))
        return Finding.problem(
            "cuda-aware",
            f"claimed, but not there: {said}, while the MPI library has no code for CUDA",
            "Programs that trust the variable crash. mpistrat runs a trial, which takes seconds.",
            f"unset {names}, or use a CUDA-aware MPI",
        )
    if facts.claims:
        return Finding.ok(
            "cuda-aware",
            f"claimed ({said}), but there is no GPU here to test it",
            "claimed, but there is no GPU here to test it",
        )
    return _not_aware()


def _judge_trial(tried: CudaAwareness, said: str) -> Finding:
    evidence = "; ".join(tried.reasons)
    if tried.answer is Answer.PROVED:
        return Finding.ok("cuda-aware", f"proved: {tried.reasons[-1] if tried.reasons else ''}")
    if tried.answer is Answer.CLAIMED:
        return Finding.warning(
            "cuda-aware",
            f"claimed, not proved: {evidence}",
            "Until it is proved, arrays are sent by NCCL or through host memory.",
            "srun -N 2 -n 2 --gpus-per-task=1 python -m mpistrat.cuda_awareness; if that passes: "
            "export MPISTRAT_CUDA_AWARE=on",
        )
    if said:
        return Finding.problem(
            "cuda-aware",
            f"claimed, but not there: {evidence}",
            "Programs that trust it crash or compute with wrong numbers; mpistrat does not.",
            "export MPISTRAT_CUDA_AWARE=off, to skip the trial; or use a different MPI library",
        )
    return _not_aware()


def _not_aware() -> Finding:
    return Finding.ok(
        "cuda-aware", "no; arrays on GPUs are sent by NCCL or through host memory", "no"
    )


_LARGE_BYTES = 8 * 2**20
_SLOWEST = 1e8
"""Bytes per second, a little less than a link of 1 Gbit/s."""


@dataclass(frozen=True)
class Speed:
    """Median times of a few calls of MPI_Allreduce."""

    size: int
    large_s: float
    small_s: float
    copy_s: float
    """Time of a copy of the large message in memory."""


def measure_speed(world: World) -> Speed:
    """Measure how long reductions take. This takes well under a second. **Collective**."""
    from mpi4py import MPI

    def timed(num_bytes: int, samples: int) -> float:
        source = np.ones(num_bytes // 4, np.float32)
        target = np.empty_like(source)
        times = []
        for _ in range(samples):
            world.comm.Barrier()
            began = time.perf_counter()
            world.comm.Allreduce(source, target, MPI.SUM)
            times.append(time.perf_counter() - began)
        # Drop the first one, which also opens connections and touches new memory.
        return statistics.median(times[1:])

    source = np.ones(_LARGE_BYTES // 4, np.float32)
    target = np.empty_like(source)
    copies = []
    for _ in range(4):
        began = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - began)
    return Speed(world.size, timed(_LARGE_BYTES, 6), timed(8, 30), statistics.median(copies[1:]))


def check_bandwidth(speed: Speed, num_nodes: int, is_crowded: bool) -> Finding:
    """Return the finding about the network: whether it is as slow as Ethernet."""
    copy = f"memory copies {_LARGE_BYTES / speed.copy_s / 1e9:.1f} GB/s"
    if speed.size == 1:
        return Finding.ok("bandwidth", f"one rank, {copy}")
    rate = _LARGE_BYTES / speed.large_s
    seen = (
        f"Allreduce of 8 MiB in {speed.large_s * 1e3:.1f} ms ({rate / 1e9:.2f} GB/s), of 8 B in "
        f"{speed.small_s * 1e6:.0f} us; {copy}"
    )
    # If ranks share cores, the time says more about that than about the network.
    if rate < _SLOWEST and not is_crowded:
        between = "links between nodes" if num_nodes > 1 else "messages between ranks of one node"
        return Finding.warning(
            "bandwidth",
            seen,
            f"The {between} are only as fast as slow Ethernet.",
            "UCX_LOG_LEVEL=info (UCX) or FI_LOG_LEVEL=info (libfabric) shows which network is "
            "used; the module of the site's own MPI supports the fast one",
        )
    return Finding.ok("bandwidth", seen, f"{rate / 1e9:.2f} GB/s in an Allreduce of 8 MiB")
