"""The same results where memory is shared by all ranks, by those of each node, or by none."""

import shutil
from pathlib import Path

import pytest

import mpistrat
from mpistrat.native import native_library
from mpistrat.testing import launch

pytestmark = pytest.mark.launches

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys
rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", 0)))
{paths}
import numpy as np
import mpistrat as ms
from tests.random_arrays import DTYPES, OPS, can_reduce, expected_of
from tests.comm.test_interleavings import Workload
from tests.comm.test_shared_reducer import digest, numbers

strategy = ms.MPIStrategy(device="cpu")
collectives = strategy.extended._collectives
size = collectives.size
node = collectives.channel.transport.node
print("node", type(node).__name__, os.path.dirname(ms.__file__), flush=True)
Workload(strategy, 5).run(150)

found = []
for op in OPS:
    for dtype in filter(lambda dtype: can_reduce(op, dtype), DTYPES):
        rows = [numbers(op, dtype, each)[:20_001] for each in range(size)]
        with np.errstate(all="ignore"):
            expected = expected_of(op, rows)
        result = strategy.reduce(op, rows[rank])
        np.testing.assert_array_equal(result, expected)
        # Without the sign of zero, which depends on the order in products of complex numbers.
        found.append(result + 0 if dtype.kind in "fc" else result)
own = digest(found)
assert collectives.gather_json(own) == [own] * size
print("digest", own, flush=True)
"""


def run(folder, ranks, paths="", **variables):
    """Return what shares memory on each rank, where its package is, and the common digest."""
    script = folder / "program.py"
    script.write_text(PROGRAM.format(paths=f"sys.path.insert(0, {str(ROOT)!r})\n{paths}"))
    result = launch.run([script], ranks, 100, env=variables)
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    (digest,) = {line[1] for line in lines if line[0] == "digest"}
    nodes = sorted(line[1:] for line in lines if line[0] == "node")
    assert len(nodes) == ranks
    return nodes, digest


@pytest.fixture(scope="module")
def digests(tmp_path_factory):
    """The digests where memory is shared by all, by the number of ranks."""
    if native_library() is None:
        pytest.skip("nothing is compiled for this machine")
    found = {}
    for ranks in (2, 4):
        nodes, found[ranks] = run(tmp_path_factory.mktemp("shared"), ranks)
        assert nodes == [["SharedMemoryReducer", str(Path(mpistrat.__file__).parent)]] * ranks
    return found


def copy_of_the_package(folder, reason):
    """Return a folder with a copy of the package, which cannot use what is compiled."""
    copy = folder / "copy"
    shutil.copytree(Path(mpistrat.__file__).parent, copy / "mpistrat")
    for library in copy.glob("mpistrat/_native*.so"):
        if reason == "never compiled":
            library.unlink()
        elif reason == "damaged":
            library.write_text("no library")
    if reason == "compiled from another source":
        with open(copy / "mpistrat/native/sequences.c", "a") as file:
            file.write("/* newer than the library */\n")
    return copy


@pytest.mark.parametrize(
    ("reason", "where"),
    [
        ("never compiled", "True"),
        ("never compiled", "rank == 1"),
        ("compiled from another source", "rank == 0"),
        ("damaged", "rank == 1"),
    ],
)
def test_what_is_not_compiled_is_not_missed(tmp_path, digests, reason, where):
    copy = copy_of_the_package(tmp_path, reason)
    paths = f"if {where}:\n    sys.path.insert(0, {str(copy)!r})"
    # The warning of it has its own test.
    nodes, digest = run(tmp_path, 2, paths, PYTHONWARNINGS="ignore")
    assert [node for node, _ in nodes] == ["NoneType"] * 2
    without = [place for _, place in nodes if place == str(copy / "mpistrat")]
    assert len(without) == (2 if where == "True" else 1)
    assert digest == digests[2]


@pytest.mark.skipif(launch.is_open_mpi(), reason="MPICH can take one node for several")
@pytest.mark.parametrize("ranks", [2, 4])
def test_two_nodes(tmp_path, digests, ranks):
    nodes, digest = run(tmp_path, ranks, MPIR_CVAR_NUM_CLIQUES="2")
    assert {node for node, _ in nodes} == {"HierarchicalReducer" if ranks == 4 else "NoneType"}
    assert digest == digests[ranks]


@pytest.mark.parametrize("refusal", ["os.memfd_create", "mmap.mmap"])
def test_where_the_system_gives_no_memory(tmp_path, digests, refusal):
    module = refusal.split(".")[0]
    paths = f"""
import {module}
def refuse(*arguments):
    raise OSError("not here")
if rank == 0:
    {refusal} = refuse
"""
    nodes, digest = run(tmp_path, 2, paths)
    assert {node for node, _ in nodes} == {"NoneType"}
    assert digest == digests[2]
