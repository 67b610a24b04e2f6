"""Ranks with different versions of the package are refused when the first strategy is made."""

import re
import shutil
from pathlib import Path

import pytest

import mpistrat
from mpistrat.testing import launch
from tests.programs.running import ours

pytestmark = pytest.mark.launches

PROGRAM = """
import os, sys
rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))
if rank == {rank}:
    sys.path.insert(0, "{folder}")
import mpistrat as ms
try:
    ms.MPIStrategy()
except ms.errors.LaunchError as error:
    with open(f"caught-{{rank}}", "w") as file:
        file.write(str(error))
    {then}
"""


def changed_copy(folder, constant):
    """Copy the package to `folder`, with another value of a constant of its version.py."""
    shutil.copytree(Path(mpistrat.__file__).parent, folder / "mpistrat")
    path = folder / "mpistrat" / "version.py"
    text, count = re.subn(rf"(?m)^{constant} = .*$", f'{constant} = "x.y"', path.read_text())
    assert count == 1
    path.write_text(text)


@pytest.mark.quick("__version__-2-1")
@pytest.mark.parametrize(
    ("constant", "ranks", "rank"),
    [
        ("__version__", 2, 1),
        ("__version__", 4, 0),
        ("ORDER_VERSION", 3, 2),
        ("CHECKPOINT_FORMAT_VERSION", 3, 1),
        ("PROTOCOL_VERSION", 3, 1),
    ],
)
def test_a_rank_with_another_version(tmp_path, constant, ranks, rank):
    folder = tmp_path / "copy"
    changed_copy(folder, constant)
    (tmp_path / "program.py").write_text(PROGRAM.format(rank=rank, folder=folder, then="raise"))
    done = launch.run([tmp_path / "program.py"], ranks, 30, cwd=tmp_path)
    assert done.returncode != 0
    assert ours(done.stderr).count("Traceback") == 1, done.stderr
    caught = {(tmp_path / f"caught-{each}").read_text() for each in range(ranks)}
    assert len(caught) == 1
    message = caught.pop()
    assert "The ranks run different versions of mpistrat" in message
    assert re.search(rf"rank {rank}: mpistrat .*x\.y.* from {folder}/mpistrat on ", message)
    assert f"from {Path(mpistrat.__file__).parent} on " in message


def test_ranks_that_catch_it_end_well(tmp_path):
    changed_copy(tmp_path / "copy", "__version__")
    (tmp_path / "program.py").write_text(
        PROGRAM.format(rank=1, folder=tmp_path / "copy", then="pass")
    )
    done = launch.run([tmp_path / "program.py"], 3, 30, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_copies_of_one_version_work_together(tmp_path):
    shutil.copytree(Path(mpistrat.__file__).parent, tmp_path / "copy" / "mpistrat")
    (tmp_path / "program.py").write_text(
        PROGRAM.format(rank=1, folder=tmp_path / "copy", then="raise")
    )
    done = launch.run([tmp_path / "program.py"], 2, 30, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
