"""Cost of `mpistrat watch` for a call of MPI: the recorder and the library itself, alternating.

    python benchmarks/watch_cost.py                     # one rank
    mpiexec -n 2 python benchmarks/watch_cost.py        # an 8-byte Allreduce of two ranks

Both functions are called from C in the same process, round by round: the recorder's MPI_Allreduce,
and PMPI_Allreduce of the library. The table shows the median and the best round of each.
"""

import argparse
import ctypes
import importlib
import statistics
import sys
from typing import Any

from mpistrat.watch.choices import STARTUP

_ROUNDS = 25


def main() -> int:
    """Measure, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=20_000, help="calls in a round")
    calls = parser.parse_args().calls
    sys.path.insert(0, str(STARTUP))
    rank_module: Any = importlib.import_module("mpistrat_watch_rank")
    recorder = rank_module._open_recorder()
    import numpy as np
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    library = ctypes.CDLL(rank_module._mpi_library())
    value, total = np.ones(1), np.zeros(1)
    kinds = {"recorder": recorder.MPI_Allreduce, "library": library.PMPI_Allreduce}
    arguments = (ctypes.c_long * 6)(
        value.ctypes.data, total.ctypes.data, 1, MPI.DOUBLE.handle, MPI.SUM.handle, comm.handle
    )
    recorder.recorder_repeat.restype = ctypes.c_double
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(_ROUNDS):
        for name, function in kinds.items():
            comm.Barrier()
            took_s = recorder.recorder_repeat(function, arguments, calls)
            times[name].append(took_s / calls * 1e9)
    if comm.rank == 0:
        print(f"{MPI.Get_library_version().split(',')[0].splitlines()[0]}, {comm.size} ranks")
        for name, each in times.items():
            print(f"{name:9} median {statistics.median(each):8.1f} ns, best {min(each):8.1f} ns")
        medians = [statistics.median(each) for each in times.values()]
        bests = [min(each) for each in times.values()]
        of_medians, of_bests = medians[0] - medians[1], bests[0] - bests[1]
        print(f"difference: median {of_medians:.1f} ns, best {of_bests:.1f} ns")
    return 0


if __name__ == "__main__":
    sys.exit(main())
