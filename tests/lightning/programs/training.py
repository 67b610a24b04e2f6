"""Trainings of Lightning: over MPI equal to gloo, and interrupted ones equal to whole ones.

training.py compare FOLDER            train on the group of torchrun or MPI, and write the weights
training.py checks FOLDER             interrupt, resume, and pass wrong arguments
training.py reference FILE            train to the end on one process, and write the result
training.py ended FOLDER HOW STEP     train, and end after a step: by `term`, or `kill`
training.py resumed FOLDER FILE       train to the end, and compare with the reference
"""

import os
import re
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from task import (
    BATCH,
    EPOCHS,
    STEPS,
    At,
    DataLoader,
    Network,
    Training,
    assert_equal,
    end,
    exit_code,
    ml,
    ms,
    mst,
    pl,
    rank_and_size,
    rows,
    shared_folder,
)


def raises(kind, text, call):
    with pytest.raises(kind, match=re.escape(text)):
        call()


def sharded(folder, *others):
    return Training(
        folder,
        *others,
        model=Network(sharded=True),
        strategy=ModelParallelStrategy(),
        num_sanity_val_steps=0,
    )


def compare(folder):
    """DDP with clipped and accumulated gradients, FSDP2, and a resumed run of each."""
    whole = Training(
        shared_folder(folder, "whole"),
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        kind="loader",
    ).fit()
    found = {f"ddp {name}": each for name, each in whole.items()}
    place = shared_folder(folder, "stopped")
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    assert exit_code(Training(place, At(7, lambda: end("term")), **options)) == 75
    again = Training(place, **options)
    assert_equal(again.fit(), whole)
    assert again.saved.restored_path.endswith("checkpoint-7.h5")
    whole = sharded(None).fit()
    found |= {f"sharded {name}": each for name, each in whole.items()}
    place = shared_folder(folder, "sharded")
    assert exit_code(sharded(place, At(11, lambda: end("term")))) == 75
    again = sharded(place)
    assert_equal(again.fit(), whole)
    assert again.saved.restored_path.endswith("checkpoint-11.h5")
    data = Training(shared_folder(folder, "hdf5"), kind="hdf5").fit()
    found |= {f"hdf5 {name}": each for name, each in data.items()}
    if rank_and_size()[0] == 0:
        np.savez(os.path.join(folder, "found.npz"), **found)


def interrupted(folder):
    """Be interrupted within an epoch, at its ends, and where validation follows a step."""
    for kind, options, steps in (
        ("loader", {}, (1, STEPS, STEPS + 3, EPOCHS * STEPS)),
        ("hdf5", {"val_check_interval": 3}, (3, STEPS + 5)),
        ("hdf5", {"limit_train_batches": 5}, (5, 7)),
    ):
        name = "-".join([kind, *options])
        whole = Training(shared_folder(folder, name), kind=kind, **options).fit()
        for step in steps:
            place = shared_folder(folder, f"{name}-{step}")
            first = Training(place, At(step, lambda: end("term")), kind=kind, **options)
            assert exit_code(first) == 75
            again = Training(place, kind=kind, **options)
            assert_equal(again.fit(), whole)
            assert again.saved.restored_path.endswith(f"checkpoint-{step}.h5")


def in_steps(folder):
    """`max_steps` ends a training within an epoch, from which a longer one continues."""
    whole = Training(None, kind="hdf5", max_steps=20, max_epochs=-1).fit()
    place = shared_folder(folder, "steps")
    options = {"every_n_steps": 4, "max_to_keep": 2}
    Training(place, kind="hdf5", max_steps=11, max_epochs=-1, options=options).fit()
    shared_folder(folder, "")
    assert sorted(os.listdir(place)) == ["checkpoint-11.h5", "checkpoint-8.h5"]
    again = Training(place, kind="hdf5", max_steps=20, max_epochs=-1, options=options)
    assert_equal(again.fit(), whole)
    assert again.saved.restored_path.endswith("checkpoint-11.h5")


def damaged(folder):
    whole = Training(None).fit()
    place = shared_folder(folder, "damaged")
    assert exit_code(Training(place, At(11, lambda: end("term")))) == 75
    dist.barrier()
    if rank_and_size()[0] == 0:
        with open(os.path.join(place, "checkpoint-11.h5"), "r+b") as file:
            file.seek(-3000, os.SEEK_END)
            file.write(b"\xff" * 100)
    dist.barrier()
    again = Training(place)
    assert_equal(again.fit(), whole)
    assert again.saved.restored_path.endswith("checkpoint-6.h5")


def mistakes(folder):
    place = shared_folder(folder, "mistakes")
    assert exit_code(Training(place, At(3, lambda: end("term")), kind="hdf5")) == 75
    mismatch = ms.errors.CheckpointMismatchError
    wider = Training(place, kind="hdf5", model=Network(width=9))
    raises(mismatch, "net.0.weight", wider.fit)
    other = mst.HDF5Dataset(ms.data.Dataset.from_arrays(rows()).shuffle(4).batch(BATCH))
    wrong = Training(place, kind="hdf5", options={"data": other})
    wrong.loader = DataLoader(other, batch_size=None)
    raises(mismatch, "the files, the seed or the steps of the dataset differ", wrong.fit)
    fresh = shared_folder(folder, "fresh")
    wrong = Training(fresh, kind="hdf5", options={"data": other})
    raises(ValueError, "fit does not train on the object of data=", wrong.fit)
    wrong = Training(fresh, kind="hdf5", options={"data": ()})
    raises(ValueError, "Pass HDF5Checkpoint(..., data=dataset)", wrong.fit)
    wrong = Training(place, kind="loader", model=Network())
    raises(mismatch, "it was saved with 1 data, but HDF5Checkpoint was given data= of 0", wrong.fit)
    alone = Training(fresh, devices=1, strategy="auto")
    raises(ms.errors.LaunchError, "the trainer trains on 1 rank(s)", alone.fit)
    raises(TypeError, "data must hold objects", lambda: ml.HDF5Checkpoint("x", data=[1]))
    raises(ValueError, "every_n_steps", lambda: ml.HDF5Checkpoint("x", every_n_steps=0))


def checks(folder):
    for check in (interrupted, in_steps, damaged, mistakes):
        try:
            check(shared_folder(folder, check.__name__))
        except BaseException as error:
            error.add_note(f"in {check.__name__} on rank {rank_and_size()[0]}")
            raise


def chained(folder, *others):
    return Training(folder, *others, kind="hdf5", options={"every_n_steps": 5})


def main(command, *arguments):
    if command == "reference":
        (path,) = arguments
        np.savez(path, **chained(None).fit())
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo")
    else:
        mst.init()
    if command == "compare":
        compare(*arguments)
    elif command == "checks":
        checks(*arguments)
    elif command == "ended":
        folder, how, step = arguments
        chained(folder, At(int(step), lambda: end(how))).fit()
    else:
        folder, path = arguments
        again = chained(folder)
        result = again.fit()
        with np.load(path) as expected:
            assert_equal(result, dict(expected), rtol=2e-4, atol=2e-5)
        print("resumed from", os.path.basename(again.saved.restored_path), flush=True)
    is_with_mpi = any(each.partition(".")[0] == "mpi4py" for each in sys.modules)
    print("is done", "with MPI" if is_with_mpi else "without MPI", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    pl.utilities.disable_possible_user_warnings()
    torch.use_deterministic_algorithms(True)
    main(*sys.argv[1:])
