"""A rank that fails while data moves leaves no rank waiting for the rest."""

import pytest

from mpistrat.testing import launch
from tests.programs.running import PRELUDE, ours

CALLS = {
    "gather": "strategy.gather(np.ones(3), 0)",
    "broadcast_object": 'strategy.broadcast_object("text")',
    "gather_objects": "strategy.gather_objects(rank)",
    "reduce": "strategy.reduce('sum', np.ones(1000))",
}
FAIL = """
def fail(*_):
    raise MemoryError("no room")
transport = strategy.extended._collectives.channel.transport
if rank == last:
    for name in ("all_gather", "broadcast", "all_to_all"):
        setattr(transport, name, fail)
    try:
        {call}
    except MemoryError as error:
        print(error)
    try:
        strategy.reduce("sum", 1)
    except ms.errors.CollectiveError as error:
        print(error)
else:
    {call}
"""


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("call", CALLS)
def test_an_error_that_one_rank_catches_ends_the_others(tmp_path, ranks, call):
    script = tmp_path / "program.py"
    prelude = PRELUDE
    if call == "reduce":
        by_mpi = "implementation=ms.CommunicationImplementation.MPI"
        options = f"ms.CommunicationOptions(deterministic=True, {by_mpi})"
        prelude = prelude.replace(
            "ms.MPIStrategy()", f"ms.MPIStrategy(communication_options={options})"
        )
    script.write_text(prelude + FAIL.format(call=CALLS[call]))
    result = launch.run([script], ranks, 60, env={"MPISTRAT_EXIT_GRACE_S": "1"})
    what = f"ransfer of data in {call} at program.py:18 was interrupted by MemoryError"
    assert result.returncode != 0
    assert f"no room\nThe t{what} on rank {ranks - 1} of {ranks}." in result.stdout
    assert what in ours(result.stderr)
