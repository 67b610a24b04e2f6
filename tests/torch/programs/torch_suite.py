"""Torch's own tests of process groups, unmodified, one after the other on the ranks of mpiexec.

Each test gets a new world group. Rank 0 prints one JSON line per test: name, outcome, and why.
Arguments: names of tests, or part of them; none for all.
"""

import json
import os
import sys
import tempfile
import time
import traceback
import unittest
from datetime import timedelta

from mpi4py import MPI

COMM = MPI.COMM_WORLD
os.environ["BACKEND"] = os.environ.get("BACKEND", "mpistrat")
os.environ["WORLD_SIZE"], os.environ["RANK"] = str(COMM.size), str(COMM.rank)
os.environ["TEMP_DIR"] = COMM.bcast(tempfile.mkdtemp() if COMM.rank == 0 else None)
if COMM.rank == 0:
    for folder in ("barrier", "init_dir", "test_dir"):
        os.makedirs(os.path.join(os.environ["TEMP_DIR"], folder))
COMM.Barrier()

import torch.distributed as dist
from torch.testing._internal.common_distributed import (
    TEST_SKIPS,
    DistTestCases,
)

import mpistrat.torch  # noqa: F401

for feature in ("ddp", "subgroup", "plugin"):
    DistTestCases.backend_feature[feature].add("mpistrat")

from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed.distributed_test import (
    CUSTOM_PG_TIMEOUT,
    DistributedTest,
)

GROUP_BACKEND = os.environ.get("GROUP_BACKEND", "mpistrat")
SKIP_CODES = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


class Suite(DistributedTest._DistTestBase, TestCase):
    rank = COMM.rank
    world_size = COMM.size
    file_name = os.path.join(os.environ["TEMP_DIR"], "file")
    init_method = "mpi://"

    barriers = None
    """Communicator of one test, because a rank whose test fails leaves the others waiting."""

    def _barrier(self, wait_for=None, timeout=60):
        arrival = self.barriers.Ibarrier()
        end = time.monotonic() + timeout
        while not arrival.Test():
            if time.monotonic() > end:
                raise RuntimeError("barrier timeout")
            time.sleep(0.001)


def outcome_of(name):
    """Return what became of one test on this rank."""
    method = getattr(Suite, name)
    if getattr(method, "__unittest_skip__", False):
        return "skipped", method.__unittest_skip_why__
    case = Suite(name)
    try:
        case.setUp()
        getattr(case, name)()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        return ("skipped", SKIP_CODES[end.code]) if end.code in SKIP_CODES else ("exit", end.code)
    except BaseException as error:
        text = traceback.format_exc() if "-v" in sys.argv else ""
        return "failed", f"{type(error).__name__}: {error}"[:2000] + text
    return "passed", ""


def main():
    asked = [each for each in sys.argv[1:] if not each.startswith("-")]
    names = [name for name in dir(Suite) if name.startswith("test_")]
    names = [name for name in names if not asked or any(each in name for each in asked)]
    names = [name for name in names if name not in os.environ.get("LEFT_OUT", "").split()]
    for name in names:
        limit_s = CUSTOM_PG_TIMEOUT.get(name, 60)
        began = time.monotonic()
        dist.init_process_group(
            GROUP_BACKEND, init_method="mpi://", timeout=timedelta(seconds=limit_s)
        )
        Suite.barriers = COMM.Dup()
        # On all ranks: like torch's own runner, none destroys its group while others need it.
        outcomes = COMM.allgather(outcome_of(name))
        if dist.is_initialized():
            dist.destroy_process_group()
        if COMM.rank == 0:
            took_s = round(time.monotonic() - began, 1)
            worst = next((each for each in outcomes if each[0] not in ("passed", "skipped")), None)
            if worst is None:
                worst = next((each for each in outcomes if each[0] == "passed"), outcomes[0])
            rank = outcomes.index(worst)
            print(json.dumps([name, worst[0], worst[1], rank, took_s]), flush=True)


main()
