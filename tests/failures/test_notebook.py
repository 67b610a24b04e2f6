"""Cells of notebooks on MPI engines: the page's code, cells that fail, interruptions."""

import re
import signal
import time

import pytest

from tests import ROOT

ipyparallel = pytest.importorskip("ipyparallel", reason="needs ipyparallel and ipykernel")

pytestmark = [
    pytest.mark.launches,
    # Of its sockets and event loops.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LIMIT_S = 20
PAGE = (ROOT / "docs" / "howto" / "jupyter.md").read_text()
REMAKE = "strategy = ms.MPIStrategy(); print(strategy.reduce('sum', 1.0))"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ipython")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder))
        found = ipyparallel.Cluster(engines="mpi", n=2)
        try:
            found.start_and_connect_sync(n=2)
            yield found
        finally:
            found.stop_cluster_sync()


@pytest.fixture(scope="module")
def view(cluster):
    return cluster.connect_client_sync()[:]


class Cell:
    """A cell that all engines run."""

    def __init__(self, view, code):
        self.result = view.execute(code, silent=False, block=False)

    def texts(self):
        """Return what each engine has printed."""
        self.result.get(LIMIT_S)
        self.result.wait_for_output(LIMIT_S)  # which comes by another way
        return [each["stdout"].strip() for each in self.result.metadata]

    def errors(self):
        """Return the error of each engine as a text, ``None`` where the cell has ended well."""
        self.result.wait(LIMIT_S)
        assert self.result.ready(), "an engine waits for ever"
        errors = [each["error"] for each in self.result.metadata]
        return [each and f"{each.ename}: {each.evalue}" for each in errors]


def test_the_cells_of_the_page_run(view):
    cells = re.findall(r"^```py\n%%px\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(cells) == 2
    texts = [Cell(view, cell).texts() for cell in cells]
    assert texts[-1] == ["[2. 2. 2.]", "[2. 2. 2.]"]


def test_a_cell_that_fails_on_one_engine_ends_the_wait_of_the_others(view):
    Cell(view, "import numpy as np, mpistrat as ms\n" + REMAKE).texts()
    began = time.monotonic()
    first, second = Cell(
        view,
        "if strategy.rank == 1:\n    raise KeyError('missing')\nstrategy.reduce('sum', 1.0)",
    ).errors()
    assert time.monotonic() - began < 10
    assert "rank 1 failed, so reduce at" in first
    assert "KeyError at" in first
    assert "has ended its cell" in first
    assert second.startswith("KeyError")
    assert Cell(view, REMAKE).texts() == ["2.0", "2.0"]


def test_a_cell_that_fails_where_nobody_waits_leaves_the_strategy_usable(view):
    Cell(view, "import mpistrat as ms\n" + REMAKE).texts()
    assert Cell(view, "if strategy.rank == 1:\n    1 / 0").errors()[0] is None
    time.sleep(2)  # it has been reported
    assert Cell(view, "print(strategy.reduce('sum', 1.0))").texts() == ["2.0", "2.0"]


def test_engines_that_are_interrupted_make_a_new_strategy(cluster, view):
    Cell(view, "import mpistrat as ms, time\n" + REMAKE).texts()
    cell = Cell(view, "time.sleep(60) if strategy.rank else strategy.reduce('sum', 1.0)")
    time.sleep(2)
    cluster.signal_engines_sync(signal.SIGINT)
    assert all("KeyboardInterrupt" in error for error in cell.errors())
    assert Cell(view, REMAKE).texts() == ["2.0", "2.0"]
