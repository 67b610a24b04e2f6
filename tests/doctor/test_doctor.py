"""`mpistrat doctor`: set-ups that are wrong on purpose, and sound ones."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from mpistrat.cuda_awareness import Answer, CudaAwareness
from mpistrat.doctor import Report, _check_software, guard
from mpistrat.doctor.facts import (
    Finding,
    Level,
    RankFacts,
    check_lightning,
    count_allocated_gpus,
    mpi_libraries,
)
from mpistrat.doctor.hardware import (
    CudaFacts,
    Speed,
    check_bandwidth,
    check_blas_threads,
    check_cores,
    check_cuda_awareness,
    check_gpus,
    check_nccl,
    has_cuda_part,
)
from mpistrat.doctor.start import look_at_shared_memory
from mpistrat.doctor.storage import HDF5Facts, check_folder, check_hdf5, probe_folder
from mpistrat.settings import settings
from mpistrat.strategies.devices import Offer
from mpistrat.testing import launch

NUM_CORES = len(os.sched_getaffinity(0))
TOPICS = {
    *("mpi", "launcher", "settings", "software", "cores", "blas", "gpus", "nccl"),
    *("cuda-aware", "hdf5", "folder", "bandwidth", "compiled kernels", "lost ranks"),
    *(("lightning",) if find_spec("lightning") is not None else ()),
}
# The ranks of the tests may not share cores in silence.
STRICT = {"MPISTRAT_OVERSUBSCRIBE": "off", "CUDA_VISIBLE_DEVICES": ""}

FAKE_H5PY = """
import ctypes
from types import SimpleNamespace
ctypes.CDLL({library!r})
version = SimpleNamespace(version="3.99", hdf5_version="1.99")
def get_config():
    return SimpleNamespace(mpi=True)
"""


def doctor(*arguments, ranks=None, **variables):
    done = launch.run(
        ["-m", "mpistrat", "doctor", *arguments], ranks, 60, env={**STRICT, **variables}
    )
    if "--json" not in arguments:
        return done
    report = json.loads(done.stdout)
    findings = {each["topic"]: each for each in report["findings"]}
    assert len(findings) == len(report["findings"])
    for each in findings.values():
        assert each["level"] == "ok" or (each["why"] and each["remedy"]), each
    problems = {topic for topic, each in findings.items() if each["level"] == "problem"}
    assert report["healthy"] == (not problems)
    assert done.returncode == bool(problems), done.stderr
    return SimpleNamespace(findings=findings, ranks=report["ranks"], problems=problems)


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_sound_installation_is_healthy(ranks, tmp_path):
    found = doctor("--json", "--folder", tmp_path, ranks=ranks)
    assert found.findings.keys() == TOPICS
    size = ranks or 1
    crowded = {"cores", "bandwidth"} if size > NUM_CORES else set()
    slow = {"bandwidth"}  # a machine may be busy
    levels = {topic: each["level"] for topic, each in found.findings.items()}
    assert {topic for topic, level in levels.items() if level != "ok"} <= crowded | slow
    assert [each["rank"] for each in found.ranks] == list(range(size))
    library = "Open MPI" if launch.is_open_mpi() else "MPICH"
    assert library in found.findings["mpi"]["seen"]
    assert "threads: multiple" in found.findings["mpi"]["seen"]
    if ranks:
        assert f"started {size} tasks, MPI sees {size}" in found.findings["launcher"]["seen"]
    assert str(tmp_path) in found.findings["folder"]["seen"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.launches
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_everything_wrong_at_once_is_found_and_fits_a_screen(tmp_path):
    (tmp_path / "empty.c").write_text("int nothing;\n")
    library = tmp_path / "libmpi.so.99"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "empty.c"], check=True)
    (tmp_path / "h5py.py").write_text(FAKE_H5PY.format(library=str(library)))
    (tmp_path / "hdf5plugin.py").write_text("")
    wrong = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": str(NUM_CORES + 2),
        "CUDA_VISIBLE_DEVICES": "0",
        "MPISTRAT_CUDA_AWARE": "on",
    }
    missing = tmp_path / "missing"
    found = doctor("--json", "--folder", missing, ranks=2, **wrong)
    assert found.problems == {"blas", "gpus", "cuda-aware", "hdf5", "folder"}
    findings = found.findings
    assert f"{NUM_CORES + 2} BLAS threads on rank 0" in findings["blas"]["seen"]
    assert f"OMP_NUM_THREADS={max(NUM_CORES // 2, 1)} " in findings["blas"]["remedy"]
    assert "2 ranks on" in findings["gpus"]["seen"]
    assert "--ntasks-per-node=1" in findings["gpus"]["remedy"]
    assert "MPISTRAT_CUDA_AWARE=on" in findings["cuda-aware"]["seen"]
    assert f"h5py loads {library}" in findings["hdf5"]["seen"]
    assert "does not exist" in findings["folder"]["seen"]
    assert f"mkdir -p {missing}" in findings["folder"]["remedy"]


@pytest.mark.launches
def test_tasks_that_do_not_find_each_other_are_reported_once():
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "MPISTRAT_TIMEOUTS": "3"}
    protocol = "pmix" if launch.is_open_mpi() else "pmi2"
    done = doctor(**step, SLURM_PROCID="0")
    assert done.returncode == 1, done.stderr
    assert "Slurm started 4 tasks in this step, but MPI sees a world of one rank" in done.stdout
    assert f"srun --mpi={protocol}" in done.stdout
    assert "Unknown setting MPISTRAT_TIMEOUTS='3'" in done.stdout
    assert len(done.stdout.splitlines()) <= 24
    assert "Traceback" not in done.stderr
    done = doctor(**step, SLURM_PROCID="3")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.launches
def test_a_task_that_mpi_ends_at_its_start_is_reported():
    broken = {"OMPI_MCA_pml": "none"} if launch.is_open_mpi() else {"PMI_SIZE": "two"}
    task = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    # What is said comes from another process, which may be a little later.
    done = subprocess.run(
        [sys.executable, "-m", "mpistrat", "doctor"],
        env=launch.environment({**STRICT, **task, **broken}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert done.stderr.count("mpistrat doctor: MPI ended task 0 of 1 on ") == 1, done.stderr


@pytest.mark.launches
@pytest.mark.skipif(launch.is_open_mpi(), reason="PMI_FD is the connection of MPICH's ranks")
def test_the_child_of_a_task_is_recognized():
    done = doctor(PMI_FD="99", PMI_RANK="1", PMI_SIZE="2")
    assert done.returncode == 1, done.stderr
    assert "inherited the environment of an MPI rank" in done.stdout
    assert "started 2) but is not a rank" in done.stdout
    assert "env -u PMI_FD" in done.stdout


@pytest.mark.launches
@pytest.mark.parametrize(
    ("orders", "limit_s", "said", "is_killed"),
    [("started\n", 60, "", False), ("", 60, "it ended", False), (None, 0.1, "it is late", True)],
)
def test_the_guard_of_a_start(orders, limit_s, said, is_killed):
    task = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    order = {"pid": task.pid, "limit_s": limit_s, "ended": "it ended", "late": "it is late"}
    own = subprocess.Popen(
        [sys.executable, "-S", guard.__file__],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        own.stdin.write(json.dumps(order) + "\n")
        own.stdin.flush()
        if orders is None:
            assert own.wait(30) == 1
        assert own.communicate(orders, timeout=30)[1].strip() == said
        if is_killed:
            assert task.wait(30) == -signal.SIGKILL
        assert task.poll() == (-signal.SIGKILL if is_killed else None)
    finally:
        task.kill()
        task.wait()


def test_shared_memory_that_mpi_cannot_use(tmp_path, monkeypatch):
    assert "There is no" in look_at_shared_memory(str(tmp_path / "missing"))[0]
    state = SimpleNamespace(f_bavail=2**20, f_frsize=4096, f_flag=0)
    monkeypatch.setattr("os.statvfs", lambda _: state)
    assert look_at_shared_memory() == ()
    state.f_bavail = 16
    assert "/dev/shm has 0.1 MiB left" in look_at_shared_memory()[0]
    state.f_flag = os.ST_RDONLY
    assert "is read-only" in look_at_shared_memory()[0]


@pytest.mark.launches
def test_a_missing_mpi_library_is_a_problem(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    text = 'raise RuntimeError("cannot load MPI library")'
    (tmp_path / "mpi4py" / "MPI.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    found = doctor("--json", PYTHONPATH=path)
    assert found.problems == {"mpi"}
    assert "cannot load MPI library" in found.findings["mpi"]["seen"]
    assert "pip install" in found.findings["mpi"]["remedy"]


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_switch_for_cuda_that_the_library_has_no_code_for(ranks):
    name = "OMPI_MCA_opal_cuda_support" if launch.is_open_mpi() else "MPIR_CVAR_ENABLE_GPU"
    found = doctor("--json", ranks=ranks, **{name: "1"})
    assert found.problems == {"cuda-aware"}
    assert name in found.findings["cuda-aware"]["seen"]
    assert f"unset {name}" in found.findings["cuda-aware"]["remedy"]


def ranks_on(node, count, cores, first=0, **facts):
    return [RankFacts(rank=first + k, node=node, cores=tuple(cores), **facts) for k in range(count)]


@pytest.mark.parametrize(
    ("facts", "level"),
    [
        (ranks_on("a", 2, range(2)), Level.OK),
        (ranks_on("a", 3, range(2)), Level.WARNING),
        (ranks_on("a", 2, [0]) + ranks_on("b", 2, range(4), 2), Level.WARNING),
        (ranks_on("a", 1, [0]) + ranks_on("a", 1, [1], 1), Level.OK),
    ],
)
def test_cores(facts, level):
    assert check_cores(facts).level is level


@pytest.mark.parametrize(
    ("count", "cores", "threads", "variables", "level"),
    [
        (1, 4, 4, {}, Level.OK),
        (4, 4, 1, {"OMP_NUM_THREADS": "1"}, Level.OK),
        (3, 2, 1, {"OMP_NUM_THREADS": "1"}, Level.OK),  # that is for the check of cores to say
        (2, 2, 2, {}, Level.WARNING),
        (4, 4, 4, {}, Level.PROBLEM),
        (2, 4, 4, {"OMP_NUM_THREADS": "4"}, Level.PROBLEM),
        # A library that knows the cores has started fewer than it was asked for; others have not.
        (2, 2, 2, {"OMP_NUM_THREADS": "4"}, Level.PROBLEM),
        (1, 4, 1, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "8"}, Level.PROBLEM),
        (2, 8, 4, {"OMP_NUM_THREADS": "4"}, Level.OK),
    ],
)
def test_threads(count, cores, threads, variables, level):
    facts = ranks_on("a", count, range(cores), blas_threads=threads, thread_variables=variables)
    found = check_blas_threads(facts)
    assert found.level is level, found
    shares = {f"OMP_NUM_THREADS={max(cores // count, 1)}", f"OMP_NUM_THREADS={cores}"}
    assert level is Level.OK or found.remedy.split()[1] in shares


def with_gpus(gpus, rank=0, node="a", nccl="2.27.3", **facts):
    names = tuple(f"model {gpu}" for gpu in gpus)
    offer = Offer(tuple(gpus), (True,) * len(gpus), 0)
    return RankFacts(rank=rank, node=node, offer=offer, gpu_names=names, nccl=nccl, **facts)


def test_gpus_that_are_seen():
    own = [with_gpus("a", 0), with_gpus("b", 1), with_gpus("c", 2, "b")]
    found = check_gpus(own)
    assert found.level is Level.OK
    assert "rank 1: gpu:0 model b" in found.seen
    assert check_nccl(own) == Finding("nccl", Level.OK, "2.27.3")
    shared = [with_gpus("a", 0), with_gpus("a", 1)]
    found = check_gpus(shared)
    assert found.level is Level.PROBLEM
    assert "ranks 0-1" in found.seen
    assert "--ntasks-per-node=1" in found.remedy
    found = check_gpus([with_gpus("a"), RankFacts(rank=1, node="b", no_gpu="no driver")])
    assert found.level is Level.PROBLEM
    assert "rank 1 see no GPU" in found.seen
    assert check_nccl([replace(each, nccl="") for each in own]).level is Level.WARNING
    assert check_nccl([own[0], replace(own[1], nccl="2.18.1")]).level is Level.PROBLEM


def test_gpus_that_may_be_shared(monkeypatch):
    chosen = replace(settings(), share_gpus=True)
    monkeypatch.setattr("mpistrat.doctor.hardware.settings_at_the_end", lambda: chosen)
    found = check_gpus([with_gpus("a", 0), with_gpus("a", 1)])
    assert found.level is Level.WARNING
    assert found.seen.startswith("ranks 0-1 share one GPU, as MPISTRAT_SHARE_GPUS=on allows")
    assert check_gpus([with_gpus("a", 0), with_gpus("b", 1)]).level is Level.OK


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ([{}], None),
        ([{"CUDA_VISIBLE_DEVICES": ""}], 0),
        ([{"CUDA_VISIBLE_DEVICES": "-1"}], 0),
        ([{"CUDA_VISIBLE_DEVICES": "0,1"}] * 3, 2),
        ([{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}], 2),
        ([{"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "4"}] * 4, 4),
        ([{"SLURM_STEP_GPUS": "0,2,3"}], 3),
        ([{"SLURM_JOB_GPUS": "1"}], 1),
    ],
)
def test_gpus_that_variables_name(variables, count):
    facts = [RankFacts(rank=k, node="a", gpu_variables=v) for k, v in enumerate(variables)]
    assert count_allocated_gpus(facts) == count
    level = check_gpus(facts).level
    if not count:
        assert level is Level.OK
    else:
        assert level is (Level.PROBLEM if count < len(facts) else Level.WARNING)


YES, CLAIM, NO = (CudaAwareness(answer, ("a reason",)) for answer in sorted(Answer, reverse=True))


@pytest.mark.parametrize(
    ("facts", "level", "word"),
    [
        (CudaFacts(), Level.OK, "no;"),
        (CudaFacts(("set: X=1",), True, has_part=False), Level.PROBLEM, "not there"),
        (CudaFacts(("set: X=1",), True, has_part=True), Level.OK, "claimed"),
        (CudaFacts(("a query says yes",), False, has_part=False), Level.OK, "claimed"),
        (CudaFacts((), True, is_vouched_for=True), Level.PROBLEM, "MPISTRAT_CUDA_AWARE"),
        (CudaFacts((), True, True, has_part=True, tried=YES), Level.OK, "proved"),
        (CudaFacts(("x",), False, has_part=True, tried=YES), Level.OK, "proved: a reason"),
        (CudaFacts(("x",), False, has_part=True, tried=CLAIM), Level.WARNING, "not proved"),
        (CudaFacts(("x",), False, has_part=True, tried=NO), Level.PROBLEM, "not there"),
        (CudaFacts((), True, tried=NO), Level.OK, "no;"),
    ],
)
def test_cuda_awareness(facts, level, word):
    found = check_cuda_awareness(facts)
    assert (found.level, word in found.seen) == (level, True), found


def test_code_for_cuda_is_found_in_the_library_and_beside_it(tmp_path):
    library = tmp_path / "libmpi.so.40"
    library.write_bytes(b"\0nothing\0")
    files = [str(library), "/usr/lib/libc.so.6"]
    assert not has_cuda_part(files)
    library.write_bytes(b"\0cuPointerGetAttribute\0")
    assert has_cuda_part(files)
    library.write_bytes(b"\0nothing\0")
    (tmp_path / "openmpi").mkdir()
    (tmp_path / "openmpi" / "mca_accelerator_cuda.so").write_bytes(b"")
    assert has_cuda_part(files)
    assert has_cuda_part(["/x/libuct_cuda.so.0"])


def test_mpi_libraries_are_distinguished_from_their_parts():
    names = ["libmpi.so.12", "libmpich.so", "libmpi_gnu_112.so.12", "libmpi_cray.so.12.0.0"]
    others = ["libmpi_gtl_cuda.so", "libmpi_cxx.so.40", "libmpi_mpifh.so.40", "libhdf5.so.310"]
    files = [f"/nowhere/{name}" for name in [*others, *names]]
    assert mpi_libraries(files) == sorted(f"/nowhere/{name}" for name in names)


@pytest.mark.parametrize(
    ("facts", "level", "word"),
    [
        (HDF5Facts({}, "no module"), Level.PROBLEM, "no module"),
        (HDF5Facts({"is_parallel": False, "of_h5py": []}), Level.OK, "without MPI"),
        (HDF5Facts({"is_parallel": True, "of_h5py": []}), Level.OK, "the same library"),
        (HDF5Facts({"is_parallel": True, "of_h5py": ["/b"]}), Level.PROBLEM, "loads /b, mpi4py /a"),
    ],
)
def test_hdf5(facts, level, word):
    versions = {"h5py": "3", "hdf5": "2", "of_mpi4py": ["/a"]}
    found = check_hdf5(replace(facts, versions=facts.versions and {**versions, **facts.versions}))
    assert (found.level, word in found.seen) == (level, True), found


def test_folders(tmp_path, monkeypatch):
    def check(path):
        return check_folder([probe_folder(str(path), "n1")])

    assert check(tmp_path).level is Level.OK
    file = tmp_path / "file"
    file.write_text("")
    for path, word in ((file, "not a folder"), (tmp_path / "x", "mkdir"), ("/proc/self", "ls -ld")):
        found = check(path)
        assert found.level is Level.PROBLEM
        assert word in found.seen + found.remedy
    assert f"mkdir -p '{tmp_path}/a b'" in check(tmp_path / "a b").remedy
    with monkeypatch.context() as patch:
        (tmp_path / "gone").mkdir()
        patch.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        found = check(".")
        assert (found.level, "has been removed" in found.seen) == (Level.PROBLEM, True)
    (tmp_path / "readonly").mkdir(mode=0o555)
    if os.geteuid() != 0:  # root may write everywhere
        assert "Permission denied" in check(tmp_path / "readonly").seen

    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    found = check(tmp_path)
    assert (found.level, "ENOSYS" in found.seen) == (Level.WARNING, True)
    assert "HDF5_USE_FILE_LOCKING=FALSE" in found.remedy
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "FALSE")
    assert check(tmp_path).level is Level.OK
    monkeypatch.setattr("fcntl.flock", lambda *_: None)  # locks that lock nothing
    monkeypatch.delenv("HDF5_USE_FILE_LOCKING")
    assert "a second lock is granted" in check(tmp_path).seen
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "readonly"]


def test_a_user_of_lightning_is_told_that_it_asks_mpi(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.6.6")
    (found,) = check_lightning()
    assert found.level is Level.OK
    assert found.seen.startswith("lightning 2.6.6: as mpi4py is installed, its Trainer() starts")
    for environment in ("MPIEnvironment()", "LightningEnvironment()"):
        assert environment in found.seen

    def missing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert check_lightning() == []


def test_software_that_differs_is_named():
    here = RankFacts(0, "a", {"numpy": "2.0"}, "MPICH 5")
    assert _check_software([here, replace(here, rank=1)]).level is Level.OK
    for other in (replace(here, rank=3, versions={"numpy": "1.26"}, node="b"),
                  replace(here, rank=3, library="MPICH 4", node="b")):  # fmt: skip
        found = _check_software([here, other])
        assert found.level is Level.PROBLEM
        assert "rank 3 (on b)" in found.seen


@pytest.mark.parametrize(
    ("large_s", "is_crowded", "level"),
    [(0.01, False, Level.OK), (1.0, False, Level.WARNING), (1.0, True, Level.OK)],
)
def test_bandwidth(large_s, is_crowded, level):
    assert check_bandwidth(Speed(2, large_s, 1e-5, 1e-3), 1, is_crowded).level is level
    assert check_bandwidth(Speed(1, large_s, 1e-5, 1e-3), 1, is_crowded).level is Level.OK


def test_only_problems_make_it_ill():
    levels = [Level.OK, Level.WARNING, Level.PROBLEM]
    findings = [Finding("x", level, "seen", "why", "type") for level in levels]
    assert Report(tuple(findings[:2]), ()).is_healthy
    assert not Report(tuple(findings), ()).is_healthy
    assert json.dumps(Report(tuple(findings), (with_gpus("ab"),)).as_json())
