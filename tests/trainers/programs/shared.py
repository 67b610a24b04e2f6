"""What the trainings of both trainers share: ends, folders, comparisons, and the commands."""

import os
import re
import signal
import sys

import numpy as np
import pytest
import torch.distributed as dist

ROWS, BATCH, EPOCHS = 72, 12, 3
STEPS = ROWS // BATCH
"""Steps of an epoch, on any number of ranks."""


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def end(how):
    """Let the last rank be ended by the scheduler, or by a fault."""
    rank, size = rank_and_size()
    if rank == size - 1:
        os.kill(os.getpid(), {"term": signal.SIGTERM, "kill": signal.SIGKILL}[how])


def exit_code(training):
    """Return the exit code by which a training ends the program, with usual signals afterwards."""
    try:
        training.run()
    except SystemExit as error:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return error.code
    return None


def assert_equal(found, expected, rtol=1e-6, atol=0.0):
    assert found.keys() == set(expected)
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=rtol, atol=atol, err_msg=name)


def shared_folder(folder, name):
    """Return the path of a folder, once all ranks are here."""
    if dist.is_initialized():
        dist.barrier()
    return os.path.join(folder, name)


def raises(kind, text, call):
    with pytest.raises(kind, match=re.escape(text)):
        call()


def damage(path):
    dist.barrier()
    if rank_and_size()[0] == 0:
        with open(path, "r+b") as file:
            file.seek(-3000, os.SEEK_END)
            file.write(b"\xff" * 100)
    dist.barrier()


def save_results(folder, results):
    """Write results of trainings, by name, where the test looks for them."""
    if rank_and_size()[0] == 0:
        found = {f"{kind} {key}": each for kind, of in results.items() for key, each in of.items()}
        np.savez(os.path.join(folder, "found.npz"), **found)


def run_each(checks, folder):
    for check in checks:
        try:
            check(shared_folder(folder, check.__name__))
        except BaseException as error:
            error.add_note(f"in {check.__name__} on rank {rank_and_size()[0]}")
            raise


class At:
    """Does something after a step, counted over all epochs: part of a callback."""

    def __init__(self, step, do):
        self.step, self.do = step, do

    def reached(self, step):
        if step == self.step:
            self.do()


def main(chained, at, others, command, *arguments):
    """Run a command of a program.

    Parameters
    ----------
    chained : callable
        Function of a folder and callbacks that returns the training that jobs continue.
    at : type
        The callback `At` of the trainer.
    others : dict
        Further commands, as functions of the arguments.
    command, *arguments : str
        ``reference FILE`` trains to the end on one process, and writes the result.
        ``ended FOLDER HOW STEP`` trains, and ends after a step.
        ``resumed FOLDER FILE`` trains to the end, and compares with the reference.
    """
    if command == "reference":
        (path,) = arguments
        np.savez(path, **chained(None).run())
        return
    if command == "ended":
        folder, how, step = arguments
        chained(folder, at(int(step), lambda: end(how))).run()
    elif command == "resumed":
        folder, path = arguments
        again = chained(folder)
        result = again.run()
        with np.load(path) as expected:
            assert_equal(result, dict(expected), rtol=2e-4, atol=2e-5)
        print("resumed from", os.path.basename(again.saved.restored_path), flush=True)
    else:
        others[command](*arguments)
    is_with_mpi = any(each.partition(".")[0] == "mpi4py" for each in sys.modules)
    print("is done", "with MPI" if is_with_mpi else "without MPI", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
