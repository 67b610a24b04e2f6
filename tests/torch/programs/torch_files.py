"""A file of torch's own tests, unmodified, on the ranks of mpiexec instead of spawned processes.

What asks for gloo gets the backend BACKEND: mpistrat, or gloo itself for comparison. With
``--list`` one process prints each test with its number of ranks. Otherwise each rank writes its
outcomes to the file ``$RESULTS/RANK.jsonl``: test, outcome, number of groups, and why.
Arguments: the file, then the tests.
"""

import json
import os
import sys
import time
import traceback
import types
import unittest
import unittest.mock
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal import common_distributed, common_utils
from torch.testing._internal.common_distributed import TEST_SKIPS, MultiProcessTestCase

BACKEND = os.environ.get("BACKEND", "mpistrat")
SKIP_CODES = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
OTHER_KINDS = (
    "MultiThreadedTestCase",  # threads, on a backend of torch for tests
    "MultiProcContinuousTest",
    "MultiProcContinousTest",
)
num_groups = 0


Gloo = dist.ProcessGroupGloo


class GlooStandIn:
    """What tests call as ``ProcessGroupGloo(store, rank, size, options)``."""

    def __new__(cls, store, rank, size, *options, **named):
        global num_groups
        num_groups += 1
        if BACKEND == "gloo":
            return Gloo(store, rank, size, *options, **named)
        from mpistrat.torch import process_group

        options = [*options, *named.values()]
        limits = [getattr(each, "_timeout", each) for each in options]
        opts = types.SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=size,
            group_id=f"gloo stand-in {num_groups}",
            timeout=limits[0] if limits else distributed_c10d.default_pg_timeout,
            global_ranks_in_group=[],
        )
        return process_group.create_group(opts, None)


for name in ("_Options", "Options", "create_device", "create_default_device"):
    if hasattr(Gloo, name):
        setattr(GlooStandIn, name, getattr(Gloo, name))


def replace_gloo():
    """Count the groups of gloo, and create those of BACKEND in their place."""
    create = distributed_c10d._new_process_group_helper
    backend_at = 3

    def created(*args, **kwargs):
        global num_groups
        asked = kwargs.get("backend", args[backend_at] if len(args) > backend_at else None)
        if str(asked) in ("undefined", "gloo") or "cpu:gloo" in str(asked):
            num_groups += 1
            if BACKEND != "gloo":
                args, kwargs = [*args], {**kwargs, "backend_options": None, "pg_options": None}
                own = dist.Backend(BACKEND)
                if "backend" in kwargs:
                    kwargs["backend"] = own
                else:
                    args[backend_at] = own
                known = create.__code__.co_varnames[: create.__code__.co_argcount]
                kwargs = {key: each for key, each in kwargs.items() if key in known}
        return create(*args, **kwargs)

    distributed_c10d._new_process_group_helper = created
    dist.ProcessGroupGloo = GlooStandIn
    if BACKEND == "gloo":
        return
    from mpistrat.torch.process_group import MpiProcessGroup

    MpiProcessGroup.create_device = staticmethod(Gloo.create_device)  # asked on the way to DDP
    for feature in ("ddp", "subgroup", "plugin"):
        common_distributed.DistTestCases.backend_feature[feature].add("mpistrat")


def load(path):
    """Return the tests of a file by name."""
    sys.path[:0] = [str(path.parent), str(path.parents[1]), os.environ.get("TORCH_TESTS", "")]
    sys.argv[1:] = []
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    common_utils.DISABLE_RUNNING_SCRIPT_CHK = True
    tests = {}
    pending = [*unittest.defaultTestLoader.loadTestsFromModule(module)]
    while pending:
        each = pending.pop(0)
        if isinstance(each, unittest.TestSuite):
            pending[:0] = [*each]
        elif not any(base.__name__ in OTHER_KINDS for base in type(each).__mro__):
            tests[f"{type(each).__name__}.{each._testMethodName}"] = each
    return tests


def ranks_of(test):
    """Return how many ranks a test needs."""
    return int(test.world_size) if isinstance(test, MultiProcessTestCase) else 1


def outcome_in_one_process(test):
    result = unittest.TestResult()
    unittest.TestSuite([test]).run(result)
    for kind in (result.errors, result.failures):
        if kind:
            return "failed", kind[0][1]
    return ("skipped", result.skipped[0][1]) if result.skipped else ("passed", "")


def outcome_on_rank(test, rank, file_name):
    """Run what a spawned process of torch runs, and return what became of it."""
    method = getattr(type(test), test._testMethodName)
    for each in (type(test), method):
        if getattr(each, "__unittest_skip__", False):
            return "skipped", each.__unittest_skip_why__
    try:
        type(test).setUpClass()
        with unittest.mock.patch.object(MultiProcessTestCase, "_start_processes"):
            test.setUp()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    ours, childs = torch.multiprocessing.Pipe()
    code = 0
    text = ""
    try:
        type(test)._run(rank, test._testMethodName, file_name, childs, fake_pg=False)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        code, text = MultiProcessTestCase.TEST_ERROR_EXIT_CODE, traceback.format_exc()
    if not text and code == MultiProcessTestCase.TEST_ERROR_EXIT_CODE and ours.poll():
        text = ours.recv()
    if code in SKIP_CODES:
        return "skipped", SKIP_CODES[code]
    return ("passed", "") if code == 0 else ("failed", text or f"exit code {code}")


def clean_up():
    """Leave no group and no default of torch to the next test."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:
        traceback.print_exc()
    torch.set_default_dtype(torch.float32)


def main():
    global num_groups
    path, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    replace_gloo()
    if names == ["--list"]:
        listed = {name: ranks_of(test) for name, test in load(path).items()}
        Path(os.environ["RESULTS"]).write_text(json.dumps(listed))
        return
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if names and names[0].startswith("@"):
        names = Path(names[0][1:]).read_text().split("\n")
    tests = load(path)
    folder = Path(os.environ["RESULTS"])
    environment = dict(os.environ)
    with (folder / f"{comm.rank}.jsonl").open("a") as results:
        for name in names:
            file_name = comm.bcast(str(folder / f"store_{time.time_ns()}"))
            os.environ.clear()
            os.environ.update(environment)
            num_groups, test, began = 0, tests[name], time.monotonic()
            if isinstance(test, MultiProcessTestCase):
                outcome, why = outcome_on_rank(test, comm.rank, file_name)
            else:
                outcome, why = outcome_in_one_process(test)
            took_s = round(time.monotonic() - began, 1)
            results.write(json.dumps([name, outcome, num_groups, why[-4000:], took_s]) + "\n")
            results.flush()
            clean_up()
    os._exit(0)


main()
