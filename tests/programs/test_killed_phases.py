"""A rank is killed in each phase of a save by all ranks: the file is that of before or of after."""

import itertools

import h5py
import numpy as np
import pytest

from mpistrat.checkpoint.reader import open_checkpoint
from tests.programs.running import Case, check, run_case

pytestmark = pytest.mark.launches

PHASES = {
    "room": ("mpistrat.checkpoint.write", "Room.reserve", [0]),
    "rows": ("mpistrat.checkpoint.write", "write_box", [0, 1]),
    "digests": ("mpistrat.checkpoint.raw_io", "digests_in_file", [0, 1]),
    "join": ("mpistrat.checkpoint.write", "join_runs", [0]),
    "mirrored": ("mpistrat.checkpoint.write", "_Share.write", [0, 1]),
    "flush": ("os", "fsync", [0]),
    "name": ("os", "replace", [0]),
}
USUAL = [("rows", 1, "before"), ("digests", 1, "after"), ("name", 0, "before")]
KILLS = [
    pytest.param(*kill, marks=() if kill in USUAL else pytest.mark.slow)
    for phase, (_, _, ranks) in PHASES.items()
    for kill in itertools.product([phase], ranks, ("before", "after"))
]
PROGRAM = """
import importlib, signal
strategy.close()
strategy = ms.MPIStrategy(variable_partitioner=ms.partitioners.FixedShardsPartitioner(9))
rows = (9 << 20) // 64  # three pages of a rank each, and some bytes
with strategy.scope():
    table = ms.Variable(np.ones((rows, 16), np.float32), name="table")
    plain = ms.Variable(np.ones((1, 1 << 21), np.float32), name="plain")
    adam = ms.optimizers.Adam(0.1, sharded_slots=True)
checkpoint = ms.Checkpoint(table=table, plain=plain, adam=adam)
adam.apply_gradients([(np.zeros_like(plain), plain)])
checkpoint.write("run.h5", parallel=True)
for each in table, plain:
    each.assign_add(np.ones(each.shape, np.float32), read_value=False)
owner = importlib.import_module("{module}")
*path, name = "{function}".split(".")
for each in path:
    owner = getattr(owner, each)
function = getattr(owner, name)
def killing(*args, **kwargs):
    if "{when}" == "after":
        function(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
if rank == {rank}:
    setattr(owner, name, killing)
checkpoint.write("run.h5", parallel=True)
"""


@pytest.mark.parametrize(("phase", "rank", "when"), KILLS)
def test_the_file_is_one_or_the_other(tmp_path, phase, rank, when):
    module, function, _ = PHASES[phase]
    program = PROGRAM.format(module=module, function=function, rank=rank, when=when)
    case = Case(f"{phase}, {when}, on rank {rank}", program, ranks=3)
    check(case, run_case(case, tmp_path / "job"))
    path = tmp_path / "job" / "run.h5"
    with open_checkpoint(path) as reader:
        reader.verify()
    with h5py.File(path) as file:
        values = [np.unique(file["variables"][name]) for name in ("table", "plain")]
    found = set(np.concatenate(values).tolist())
    assert found == ({2} if (phase, when) == ("name", "after") else {1})
    assert [each.name for each in path.parent.glob("*.h5")] == ["run.h5"]
