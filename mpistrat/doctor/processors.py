"""Cores and threads: whether the ranks have room beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from mpistrat.doctor.facts import RankFacts
from mpistrat.doctor.findings import Finding, ok, problem, warning
from mpistrat.epochs.report import rank_list

__all__ = ["by_node", "check_blas_threads", "check_cores"]


def by_node(facts: Sequence[RankFacts]) -> list[list[RankFacts]]:
    """Return the facts of the ranks of each node. Local."""
    nodes: dict[str, list[RankFacts]] = {}
    for each in facts:
        nodes.setdefault(each.node, []).append(each)
    return list(nodes.values())


def _cores_of(node: Sequence[RankFacts]) -> int:
    return len({core for each in node for core in each.cores})


def check_cores(facts: Sequence[RankFacts]) -> Finding:
    """Return whether each rank has a core. Local."""
    worst = max(by_node(facts), key=lambda node: len(node) / max(_cores_of(node), 1))
    num_cores = _cores_of(worst)
    if len(worst) > num_cores:
        return warning(
            "cores",
            f"{len(worst)} ranks share {num_cores} core(s) on {worst[0].node}",
            "Ranks wait for each other in every collective, and the slowest sets the pace.",
            f"srun --ntasks-per-node={num_cores}, mpiexec -n {num_cores}; or more cores: "
            "srun --cpus-per-task=1, mpiexec --bind-to none",
        )
    fewest = min(len(each.cores) for each in facts)
    most = max(len(each.cores) for each in facts)
    span = str(fewest) if fewest == most else f"{fewest}-{most}"
    return ok(
        "cores", f"{span} core(s) a rank to run on, {len(worst)} rank(s) on {num_cores} core(s)"
    )


def check_blas_threads(facts: Sequence[RankFacts]) -> Finding:
    """Return whether NumPy starts more threads than there are cores. Local."""
    for node in by_node(facts):
        num_cores = _cores_of(node)
        share = max(num_cores // len(node), 1)
        for each in node:
            if each.asked_threads > max(len(each.cores), 1):
                names = ", ".join(f"{k}={v}" for k, v in each.thread_variables.items())
                return _too_many(
                    f"{each.asked_threads} BLAS threads on {rank_list([each.rank])}, which may use "
                    f"{len(each.cores)} core(s) ({names or 'no variable limits them'})",
                    min(share, max(len(each.cores), 1)),
                )
        num_threads = sum(each.asked_threads for each in node)
        if num_threads <= num_cores or all(each.asked_threads == 1 for each in node):
            continue
        each = node[0]
        names = ", ".join(f"{k}={v}" for k, v in each.thread_variables.items())
        seen = (
            f"{len(node)} ranks with {each.asked_threads} BLAS threads each on {num_cores} core(s) "
            f"of {each.node} ({names or 'no variable limits them'})"
        )
        # Twice as many happens where two ranks try something out, and costs little.
        if each.thread_variables or num_threads > 2 * num_cores:
            return _too_many(seen, share)
        return warning("blas", seen, _WHY_THREADS, _limit_threads(share))
    most = max(each.asked_threads for each in facts)
    return ok("blas", f"{most} thread(s) a rank for linear algebra")


_WHY_THREADS = "Threads that share a core wait for each other; matrix products become much slower."


def _limit_threads(number: int) -> str:
    return f"export OMP_NUM_THREADS={number} OPENBLAS_NUM_THREADS={number}"


def _too_many(seen: str, share: int) -> Finding:
    return problem("blas", seen, _WHY_THREADS, _limit_threads(share))
