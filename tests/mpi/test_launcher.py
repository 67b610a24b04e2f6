"""Launchers: the variables they set, and how a rank starts a new world."""

import os
import sys

import pytest

from mpistrat.mpi import launcher, mpiexec
from mpistrat.mpi.launcher import find_launcher

OF_LAUNCHERS = """
PMI_FD PMI_RANK PMI_SIZE PMIX_RANK PMIX_NAMESPACE PMIX_SERVER_URI41 HYDI_CONTROL_FD MPI_LOCALRANKID
MPI_LOCALNRANKS HYDRA_LAUNCHER I_MPI_HYDRA_PMI_CONNECT OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE
OMPI_FILE_LOCATION OMPI_MCA_PREFIXES OMPI_MCA_cpu_type OMPI_MCA_initial_wdir OMPI_MCA_num_procs
OMPI_MCA_orte_hnp_uri OMPI_MCA_ess OMPI_MCA_ess_base_jobid OMPI_MCA_pmix OMPI_MCA_plm PRTE_LAUNCHED
PRTE_MCA_prte_base_help_aggregate SLURM_PROCID SLURM_JOB_ID FLUX_TASK_RANK PALS_RANKID
MV2_COMM_WORLD_RANK MPIRUN_RANK
"""

OF_USERS = """
OMPI_MCA_pml OMPI_MCA_opal_cuda_support OMPI_MCA_btl PMIX_MCA_gds
PRTE_MCA_rmaps_default_mapping_policy MPICH_GPU_SUPPORT_ENABLED MPIR_CVAR_ENABLE_GPU
MPIR_CVAR_NUM_CLIQUES MV2_USE_CUDA MVP_USE_CUDA I_MPI_OFFLOAD I_MPI_FABRICS
UCX_TLS CUDA_VISIBLE_DEVICES OPAL_PREFIX PATH HOME MPISTRAT_TIMEOUT_S OMP_NUM_THREADS
"""


@pytest.mark.parametrize("name", OF_LAUNCHERS.split())
def test_what_a_launcher_says_to_its_ranks_is_left_out(name):
    assert name not in launcher.without_launcher({name: "x"})


@pytest.mark.parametrize("name", OF_USERS.split())
def test_what_a_user_says_to_the_library_stays(name):
    assert launcher.without_launcher({name: "x"})[name] == "x"


def test_open_mpi_may_run_as_it_did():
    kept = launcher.without_launcher({"OMPI_ALLOW_RUN_AS_ROOT": "0"})
    assert kept["OMPI_ALLOW_RUN_AS_ROOT"] == kept["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_without_mpiexec_the_error_says_where_it_was_sought(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no mpiexec next to"):
        mpiexec.mpiexec(2)


@pytest.mark.parametrize(
    ("version", "flags"), [("mpiexec (Open MPI) 5.0", ["--oversubscribe"]), ("HYDRA 5.0", [])]
)
def test_the_command_is_that_of_the_library(monkeypatch, tmp_path, version, flags):
    program = tmp_path / "mpiexec"
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert mpiexec.mpiexec(3) == [str(program), *flags, "-n", "3"]


SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "0",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
JSRUN = {"JSM_NAMESPACE_SIZE": "3", "JSM_NAMESPACE_RANK": "2", "JSM_NAMESPACE_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        (SRUN, "slurm"),
        # What the pmi2 plugin of Slurm adds.
        ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "3", "SLURM_MPI_TYPE": "pmi2"}, "slurm"),
        (OPEN_MPI, "openmpi"),
        (HYDRA, "mpich"),
        # mpiexec inside of a step of Slurm, such as that of its proxies
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "2", **HYDRA}, "mpich"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "2", **OPEN_MPI}, "openmpi"),
        ({**HYDRA, "I_MPI_HYDRA_PMI_CONNECT": "alltoall"}, "intel"),
        ({"FLUX_TASK_RANK": "2", "FLUX_JOB_SIZE": "3", "FLUX_TASK_LOCAL_ID": "0"}, "flux"),
        ({"PALS_RANKID": "2", "PALS_LOCAL_RANKID": "0", "PMI_SIZE": "3"}, "pals"),
        ({**JSRUN, **OPEN_MPI}, "lsf"),
    ],
)
def test_every_launcher_says_how_many_tasks_it_started(variables, name):
    found = find_launcher(variables)
    assert (found.name, found.num_tasks, found.task, found.local_task) == (name, 3, 2, 0)
    assert found.title != name
    assert found.remedy("MPICH Version: 5.0").endswith(".")


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "none"),
        ({"PMI_RANK": "0", "HYDI_CONTROL_FD": "7"}, "mpich"),
        ({"FLUX_TASK_RANK": "0"}, "flux"),
        ({"PALS_RANKID": "0"}, "pals"),
    ],
)
def test_without_a_number_of_tasks_there_is_one(variables, name):
    found = find_launcher(variables)
    assert (found.name, found.num_tasks) == (name, 1)


def test_a_batch_script_is_no_task_of_its_job():
    script = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "LSB_JOBID": "1"}
    found = find_launcher(script)
    assert (found.name, found.num_tasks, found.local_task) == ("none", 1, None)


@pytest.mark.parametrize("text", ["", "many", "-1", "4(x2)"])
def test_numbers_that_cannot_be_read_are_passed_over(text):
    assert find_launcher({**SRUN, "SLURM_STEP_NUM_TASKS": text}).num_tasks == 1


@pytest.mark.parametrize(
    ("library", "flag"),
    [
        ("MPICH Version: 5.0.2", "srun --mpi=pmi2 (MPICH)"),
        ("Open MPI v5.0.11, package: x", "srun --mpi=pmix (Open MPI)"),
        ("MPI VERSION : CRAY MPICH version 8.1.30", "srun --mpi=cray_shasta (Cray MPICH)"),
        ("Intel(R) MPI Library 2021.13 for Linux", "srun --mpi=pmi2 (Intel MPI, with I_MPI_PMI"),
        ("MVAPICH Version: 4.0", "srun --mpi=pmi2 (MVAPICH)"),
        ("Another MPI 1.0", "--mpi=pmi2 is for MPICH"),
    ],
)
def test_the_flag_of_srun_is_that_of_the_library(library, flag):
    assert flag in find_launcher(SRUN).remedy(library)


def test_pmix_alone_is_distinguished_from_pmi_beside_it():
    pmix = {"PMIX_NAMESPACE": "x", "PMIX_RANK": "0"}
    assert find_launcher({**SRUN, **pmix}).has_only_pmix
    assert not find_launcher({**SRUN, **pmix, "PMI_FD": "11"}).has_only_pmix
    assert not find_launcher(SRUN).has_only_pmix


def test_the_child_of_a_task_is_distinguished_from_the_task():
    own, other = os.pipe()
    try:
        assert not find_launcher({**SRUN, "PMI_FD": str(own)}).is_inherited
    finally:
        os.close(own)
        os.close(other)
    assert not find_launcher(SRUN).is_inherited
    for text in (str(own), "none"):
        child = find_launcher({**SRUN, "PMI_FD": text})
        assert child.is_inherited
        assert "env -u PMI_FD" in child.remedy("MPICH Version: 5.0")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, False),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4"}, False),
        ({}, False),
    ],
)
def test_whether_all_tasks_are_on_one_node(monkeypatch, variables, expected):
    monkeypatch.setattr(launcher, "environment", lambda: variables)
    assert launcher.is_on_one_node() is expected
