"""torch.compile, the profiler, hooks in C++, Ctrl-C and groups in another order, in programs."""

from pathlib import Path

import pytest

from mpistrat.testing import launch

pytest.importorskip("torch")
pytestmark = pytest.mark.launches

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_tools_of_torch(tmp_path, ranks):
    program = ["-W", "ignore", PROGRAMS / "torch_tools.py", tmp_path]
    chosen = [] if ranks > 1 else ["compiled", "hooks", "profile", "meta", "numpy_values"]
    result = launch.run([*program, *chosen], ranks, 120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("all is well") == ranks


ORDERS = {
    "crossed": (2, "[[0, 1], [0]]", "[[0], [0, 1]]"),
    "other members": (3, "[[0, 1]]", "[[0, 1, 2]]"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_groups_that_ranks_make_differently_are_named(tmp_path, order):
    ranks, of_first, of_others = ORDERS[order]
    path = tmp_path / "groups.py"
    path.write_text(
        "import torch.distributed as dist\n"
        "import mpistrat.torch as mst\n"
        "mst.init(timeout=20)\n"
        f"of_first, of_others = {of_first}, {of_others}\n"
        "if dist.get_rank() == 0:\n"
        "    groups = [dist.new_group(each) for each in of_first]\n"
        "else:\n"
        "    groups = [dist.new_group(each) for each in of_others]\n"
    )
    result = launch.run(["-W", "ignore", path], ranks, 60)
    said = result.stdout + result.stderr
    assert result.returncode, said
    assert "The ranks make different groups" in said
    assert "rank 0: new_group([0, 1]) at groups.py:6" in said
    members = "[0, 1]" if order == "crossed" else "[0, 1, 2]"
    assert f"rank 1: new_group({members}) at groups.py:8" in said


def test_a_member_that_never_comes_is_named_within_the_timeout_of_init(tmp_path):
    path = tmp_path / "groups.py"
    path.write_text(
        "import time\n"
        "import torch.distributed as dist\n"
        "import mpistrat.torch as mst\n"
        "mst.init(timeout=3)\n"
        "if dist.get_rank() == 0:\n"
        "    dist.new_group([0, 1])\n"
        "time.sleep(30)\n"
    )
    result = launch.run(["-W", "ignore", path], 2, 60, env={"MPISTRAT_EXIT_GRACE_S": "1"})
    said = result.stdout + result.stderr
    assert result.returncode, said
    assert (
        "rank 1 did not come to new_group([0, 1]) at groups.py:6 within the timeout of 3 s" in said
    )
