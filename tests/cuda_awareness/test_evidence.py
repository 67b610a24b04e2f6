"""What follows from claims and trials, and how claims are read."""

import ctypes
import sys

import pytest

from mpistrat.cuda_awareness import (
    Answer,
    CudaAwareness,
    Evidence,
    Outcome,
    Trial,
    ask_library,
    judge,
    list_libraries,
    list_switches,
    read_memory_kinds,
    weigh,
)
from mpistrat.settings import Settings

CLAIM, SILENCE = Evidence(True, "it says yes"), Evidence(False, "it says nothing")


@pytest.mark.parametrize(
    ("kind", "override", "evidence", "answer"),
    [
        ("cpu", None, [CLAIM], Answer.NO),
        ("cpu", True, [CLAIM], Answer.NO),
        ("gpu", True, [], Answer.PROVED),
        ("gpu", False, [CLAIM], Answer.NO),
        ("gpu", None, [], Answer.NO),
        ("gpu", None, [SILENCE, SILENCE], Answer.NO),
        ("gpu", None, [SILENCE, CLAIM], Answer.CLAIMED),
    ],
)
def test_the_answer_before_a_trial(kind, override, evidence, answer):
    judged = judge(kind, override, evidence)
    assert judged.answer is answer
    assert judged.reasons or not evidence
    if kind == "gpu" and override is None:
        assert judged.reasons == tuple(each.text for each in evidence)


PAIR = Trial(Outcome.PASSED, "two have passed", 2)
ALONE = Trial(Outcome.PASSED, "one has passed", 1)
FAILED = Trial(Outcome.FAILED, "it failed", 2)
OPEN = Trial(Outcome.OPEN, "it shows nothing")


@pytest.mark.parametrize(
    ("trials", "answer"),
    [
        ([PAIR], Answer.PROVED),
        ([OPEN, ALONE], Answer.CLAIMED),
        ([ALONE], Answer.CLAIMED),
        ([OPEN, OPEN], Answer.CLAIMED),
        ([], Answer.CLAIMED),
        ([FAILED], Answer.NO),
        ([OPEN, FAILED], Answer.NO),
        ([PAIR, FAILED], Answer.NO),
    ],
)
def test_the_answer_after_trials(trials, answer):
    weighed = weigh(CudaAwareness(Answer.CLAIMED, ("a claim",)), trials)
    assert weighed.answer is answer
    assert weighed.reasons == ("a claim", *(each.text for each in trials))


def test_the_weakest_answer_is_the_smallest():
    assert sorted(Answer) == [Answer.NO, Answer.CLAIMED, Answer.PROVED]


def test_the_text_has_a_line_for_each_reason():
    text = str(CudaAwareness(Answer.CLAIMED, ("one", "two"), 3))
    assert text.splitlines() == ["CUDA-aware: claimed (rank 3)", "  one", "  two"]


class Library:
    """Has the queries that it is given."""

    def __init__(self, **queries):
        vars(self).update(queries)


def gpu_query(code, value):
    def query(kind, supported):
        assert kind == 0
        supported._obj.value = value
        return code

    return query


@pytest.mark.parametrize(
    ("library", "is_claim", "text"),
    [
        (Library(MPIX_Query_cuda_support=lambda: 1), True, "MPIX_Query_cuda_support says yes"),
        (Library(MPIX_Query_cuda_support=lambda: 0), False, "MPIX_Query_cuda_support says no"),
        (Library(MPIX_GPU_query_support=gpu_query(0, 1)), True, "MPIX_GPU_query_support says yes"),
        (Library(MPIX_GPU_query_support=gpu_query(0, 0)), False, "MPIX_GPU_query_support says no"),
        (Library(MPIX_GPU_query_support=gpu_query(7, 1)), False, "MPIX_GPU_query_support says no"),
        (ctypes.CDLL(None), False, "the MPI library has no query for CUDA support"),
        (None, False, "the MPI library has no query for CUDA support"),
    ],
)
def test_the_query_of_a_library(library, is_claim, text):
    if isinstance(library, ctypes.CDLL) and "mpi4py.MPI" in sys.modules:
        pytest.skip("the symbols of this process may have those of an MPI library")
    assert ask_library(library) == Evidence(is_claim, text)


@pytest.mark.parametrize(
    ("kinds", "is_claim"),
    [
        (None, False),
        ("", False),
        ("mpi,system", False),
        ("mpi,system,cuda:device,cuda:managed", True),
        ("system, CUDA:device", True),
        ("cuda", True),
        ("cuda:host", False),
        ("mpi,rocm:device", False),
        ("cudamock:device", False),
    ],
)
def test_memory_kinds(kinds, is_claim):
    evidence = read_memory_kinds(kinds)
    assert evidence.is_claim is is_claim
    assert (kinds or "mpi_memory_alloc_kinds") in evidence.text


@pytest.mark.parametrize(
    ("variables", "is_claim"),
    [
        ({}, False),
        ({"PATH": "/bin", "UCX_TLS": "all"}, False),
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, True),
        ({"MPICH_GPU_SUPPORT_ENABLED": "0"}, False),
        ({"OMPI_MCA_opal_cuda_support": "true"}, True),
        ({"OMPI_MCA_opal_cuda_support": "FALSE"}, False),
        ({"I_MPI_OFFLOAD": "2"}, True),
        ({"I_MPI_OFFLOAD": ""}, False),
        ({"MV2_USE_CUDA": "0", "PSP_CUDA": "1"}, True),
    ],
)
def test_switches(variables, is_claim):
    evidence = list_switches(variables)
    assert evidence.is_claim is is_claim
    known = variables.keys() - {"PATH", "UCX_TLS"}
    assert all(f"{name}={variables[name]}" in evidence.text for name in known)
    assert "PATH" not in evidence.text


@pytest.mark.parametrize(
    ("file", "is_claim"),
    [
        ("/opt/cray/pe/mpich/8.1.28/gtl/lib/libmpi_gtl_cuda.so.0.0.0", True),
        ("/usr/lib/ucx/libuct_cuda.so.0.0.0", True),
        ("/usr/lib/ucx/libuct_cuda_gdrcopy.so.0", True),
        ("/usr/lib/ucx/libucm_cuda.so.0", True),
        ("/opt/hpcx/ucc/lib/ucc/libucc_mc_cuda.so", True),
        ("/opt/openmpi/lib/openmpi/mca_accelerator_cuda.so", True),
        ("/opt/openmpi/lib/openmpi/mca_btl_smcuda.so", True),
        ("/opt/openmpi/lib/openmpi/mca_coll_cuda.so", True),
        ("/opt/openmpi/lib/libmca_common_cuda.so.40", True),
        ("/opt/openmpi/lib/libmpi.so.40", False),
        ("/usr/lib/ucx/libuct_cma.so.0", False),
        ("/usr/local/cuda/lib64/libcudart.so.12", False),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", False),
        ("/opt/mpi_gtl_cuda/libmpi.so.12", False),
    ],
)
def test_loaded_libraries(file, is_claim):
    evidence = list_libraries(["/usr/lib/libc.so.6", file, file])
    assert evidence.is_claim is is_claim
    assert evidence.text.count(file.rpartition("/")[2]) == is_claim


@pytest.mark.parametrize(
    ("text", "value"),
    [("on", True), ("1", True), ("OFF", False), ("0", False), ("auto", None), ("Auto", None)],
)
def test_the_setting(text, value):
    assert Settings.parse({"MPISTRAT_CUDA_AWARE": text}).cuda_aware is value
    assert Settings.parse({}).cuda_aware is None


@pytest.mark.parametrize("text", ["", "proved", "yes", "2"])
def test_a_bad_setting_is_refused_with_the_good_ones(text):
    with pytest.raises(ValueError, match="MPISTRAT_CUDA_AWARE cannot be") as caught:
        Settings.parse({"MPISTRAT_CUDA_AWARE": text})
    assert "Use on, off or auto." in str(caught.value)
