"""Start of the watch: bad input, and `python -m mpistrat.watch` below a launcher."""

import pytest

from mpistrat.testing.launch import run

pytestmark = pytest.mark.launches


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        ([], {}, "PROGRAM"),
        (["--after", "0", "p.py"], {}, "is not a number of seconds above 0"),
        (["--after", "soon", "p.py"], {}, "is not a number of seconds above 0"),
        (["-n", "0", "p.py"], {}, "it must be at least 1"),
        (["absent.py"], {}, "There is no program 'absent.py'"),
        (["--json", "no/such/r.json", "p.py"], {}, "its folder must exist"),
        (["p.py"], {"MPISTRAT_WATCH": "off"}, "MPISTRAT_WATCH=off"),
        (["p.py"], {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, "already started"),
    ],
)
def test_bad_input(arguments, env, message, tmp_path):
    tmp_path.joinpath("p.py").write_text("print('started')\n")
    done = run(["-m", "mpistrat", "watch", *arguments], cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert message in done.stderr
    assert "started" not in done.stdout


HANGS = "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 0:\n    MPI.COMM_WORLD.Barrier()\n"


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_below_a_launcher(size, tmp_path):
    program = tmp_path / "hangs.py"
    program.write_text(HANGS)
    done = run(["-m", "mpistrat.watch", "--after", "2", str(program)], size, limit_s=100)
    assert done.returncode == 86
    assert "rank 0: MPI.COMM_WORLD.Barrier at hangs.py:3 (MPI_Barrier)" in done.stderr
    assert done.stderr.count("no progress") == 1


@pytest.mark.slow
def test_startup_folder(tmp_path):
    program = tmp_path / "hangs.py"
    program.write_text(HANGS)
    folder = run(["-m", "mpistrat", "watch", "--startup-folder"]).stdout.strip()
    (tmp_path / "sitecustomize.py").write_text("print('site', flush=True)\n")
    env = {"PYTHONPATH": f"{folder}:{tmp_path}", "MPISTRAT_WATCH_AFTER_S": "2"}
    done = run([str(program)], 3, limit_s=100, env=env)
    assert done.returncode == 86
    assert done.stdout.splitlines() == ["site"] * 3
    assert "MPI.COMM_WORLD.Barrier at hangs.py:3" in done.stderr
