"""How a new world is started from a process that a launcher has started."""

import sys

import pytest

from mpistrat import launching

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
    assert name not in launching.without_launcher({name: "x"})


@pytest.mark.parametrize("name", OF_USERS.split())
def test_what_a_user_says_to_the_library_stays(name):
    assert launching.without_launcher({name: "x"})[name] == "x"


def test_open_mpi_may_run_as_it_did():
    kept = launching.without_launcher({"OMPI_ALLOW_RUN_AS_ROOT": "0"})
    assert kept["OMPI_ALLOW_RUN_AS_ROOT"] == kept["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_without_mpiexec_the_error_says_where_it_was_sought(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no mpiexec beside"):
        launching.mpiexec(2)


@pytest.mark.parametrize(
    ("version", "flags"), [("mpiexec (Open MPI) 5.0", ["--oversubscribe"]), ("HYDRA 5.0", [])]
)
def test_the_command_is_that_of_the_library(monkeypatch, tmp_path, version, flags):
    program = tmp_path / "mpiexec"
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert launching.mpiexec(3) == [str(program), *flags, "-n", "3"]
