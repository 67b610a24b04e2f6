"""Diagnosis of an installation and a launch, before a job fails.

Every check is a function of facts that the ranks gather first. So all ranks arrive at the same
findings, and a check can be tested without the machine in question.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mpistrat.arrays import Device
from mpistrat.doctor.facts import Finding, Level, RankFacts, check_lightning, collect_facts
from mpistrat.doctor.hardware import (
    check_bandwidth,
    check_blas_threads,
    check_cores,
    check_cuda_awareness,
    check_gpus,
    check_nccl,
    collect_cuda_facts,
    measure_speed,
)
from mpistrat.doctor.start import Start, start
from mpistrat.doctor.storage import FolderFacts, check_folder, check_hdf5, probe_folder, probe_hdf5
from mpistrat.mpi.survival import FLAG, why_not_tolerant
from mpistrat.mpi.world import World
from mpistrat.native import HOW_TO_COMPILE
from mpistrat.settings import settings
from mpistrat.system.text import rank_list


@dataclass(frozen=True)
class Report:
    """Findings, and the facts of all ranks behind them."""

    findings: tuple[Finding, ...]
    facts: tuple[RankFacts, ...]
    """Facts of each rank."""
    rank: int = 0
    """Number of this rank."""

    @property
    def is_healthy(self) -> bool:
        """Whether there is no problem. Warnings do not count."""
        return all(each.level is not Level.PROBLEM for each in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "healthy": self.is_healthy,
            "findings": [_finding_as_json(each) for each in self.findings],
            "ranks": [asdict(each) for each in self.facts],
        }


def _finding_as_json(finding: Finding) -> dict[str, Any]:
    fields = asdict(finding) | {"level": finding.level.value}
    del fields["short"]
    return fields


def examine(folder: str) -> Report | None:
    """Return the report, or ``None`` if a different task has it. **Collective** over all tasks."""
    # It also returns if the tasks do not find each other. Then each is a job by itself.
    begun = start()
    if begun.is_silent:
        return None
    world = begun.world
    own = collect_facts(world, begun.library, begun.launcher)
    facts: list[RankFacts] = world.comm.allgather(own) if world else [own]
    findings = [*begun.findings, _check_settings()]
    findings += [_check_software(facts), *check_lightning(), _check_kernels(facts)]
    if world is not None:
        findings.append(_check_tolerance(world))
    cores = check_cores(facts)
    findings += [cores, check_blas_threads(facts)]
    findings += [check_gpus(facts), check_nccl(facts)]
    if world is not None:
        all_have_gpus = all(each.offer is not None for each in facts)
        device = Device("gpu", own.offer.preferred) if own.offer else Device("cpu")
        findings.append(check_cuda_awareness(collect_cuda_facts(world, device, all_have_gpus)))
    findings += _look_at_files(begun, folder, own.node)
    if world is not None:
        speed = measure_speed(world)
        is_crowded = cores.level is not Level.OK
        findings.append(check_bandwidth(speed, len(world.hosts), is_crowded))
        # Measurements differ between ranks. Rank 0's are printed, and decide the exit code.
        findings = world.comm.bcast(findings, 0)
    return Report(tuple(findings), tuple(facts), own.rank)


def _look_at_files(begun: Start, folder: str, node: str) -> list[Finding]:
    """Return the findings about HDF5 on rank 0, and about the folder on each node."""
    world = begun.world
    is_first = world is None or world.local_rank == 0
    found = probe_folder(folder, node) if is_first else None
    folders: list[FolderFacts | None] = world.comm.allgather(found) if world else [found]
    hdf5 = []
    if world is None or world.rank == 0:
        hdf5 = [check_hdf5(probe_hdf5())]
    return [*hdf5, check_folder([each for each in folders if each is not None])]


def _check_settings() -> Finding:
    try:
        settings()
    except ValueError as error:
        return Finding.problem(
            "settings", str(error), "MPIStrategy() would raise.", "Unset or correct the variable."
        )
    return Finding.ok("settings", "all MPISTRAT_ variables are valid")


def _check_software(facts: list[RankFacts]) -> Finding:
    first = facts[0]
    for name in ("versions", "library"):
        others = [each for each in facts if getattr(each, name) != getattr(first, name)]
        if others:
            return Finding.problem(
                "software",
                f"different versions on {rank_list(each.rank for each in others)} (on "
                f"{others[0].node}): {_format(others[0])}; rank 0 has {_format(first)}",
                "Ranks with different code or MPI libraries cannot work together.",
                "Use one environment on all nodes.",
            )
    versions = [f"{name} {version}" for name, version in first.versions.items()]
    where = " on every rank" if len(facts) > 1 else ""
    return Finding.ok("software", ", ".join(versions) + where, ", ".join(versions[:2]) + where)


def _check_tolerance(world: World) -> Finding:
    """Return whether a parameter-server job survives the loss of a worker. **Collective**."""
    whys = [why for why in world.comm.allgather(why_not_tolerant()) if why]
    if not whys:
        return Finding.ok(
            "lost ranks", f"the job survives the loss of a worker, as a trial showed ({FLAG})"
        )
    short = "a rank that dies ends the job"
    return Finding.ok("lost ranks", f"{short}: {whys[0]}", short)


def _check_kernels(facts: list[RankFacts]) -> Finding:
    lacking = [each for each in facts if each.not_compiled]
    if not lacking:
        return Finding.ok("compiled kernels", "compiled on every rank")
    return Finding.warning(
        "compiled kernels",
        f"missing for {' and '.join(lacking[0].not_compiled)} on "
        f"{rank_list(each.rank for each in lacking)} (on {lacking[0].node}): there was no C "
        "compiler when mpistrat was installed",
        "MPI and NumPy do the same work more slowly.",
        HOW_TO_COMPILE,
    )


def _format(facts: RankFacts) -> str:
    return ", ".join([*(f"{k} {v}" for k, v in facts.versions.items()), facts.library])
