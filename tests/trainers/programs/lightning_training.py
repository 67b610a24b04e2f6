"""Trainings of Lightning: over MPI equal to gloo, and interrupted ones equal to whole ones.

lightning_training.py compare FOLDER   train on the group of torchrun or MPI, and write the weights
lightning_training.py checks FOLDER    interrupt, resume, and pass wrong arguments

See `shared.main` for the others.
"""

import os
import sys

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from of_lightning import At, DataLoader, Network, Training, ml, ms, mst, pl, rows
from shared import (
    BATCH,
    EPOCHS,
    STEPS,
    assert_equal,
    damage,
    end,
    exit_code,
    main,
    raises,
    run_each,
    save_results,
    shared_folder,
)


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
    ).run()
    found = {"ddp": whole}
    place = shared_folder(folder, "stopped")
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    assert exit_code(Training(place, At(7, lambda: end("term")), **options)) == 75
    again = Training(place, **options)
    assert_equal(again.run(), whole)
    assert again.saved.restored_path.endswith("checkpoint-7.h5")
    whole = sharded(None).run()
    found["sharded"] = whole
    place = shared_folder(folder, "sharded")
    assert exit_code(sharded(place, At(11, lambda: end("term")))) == 75
    again = sharded(place)
    assert_equal(again.run(), whole)
    assert again.saved.restored_path.endswith("checkpoint-11.h5")
    data = Training(shared_folder(folder, "hdf5"), kind="hdf5").run()
    save_results(folder, found | {"hdf5": data})


def interrupted(folder):
    """Be interrupted within an epoch, at its ends, and where validation follows a step."""
    for kind, options, steps in (
        ("loader", {}, (1, STEPS, STEPS + 3, EPOCHS * STEPS)),
        ("hdf5", {"val_check_interval": 3}, (3, STEPS + 5)),
        ("hdf5", {"limit_train_batches": 5}, (5, 7)),
    ):
        name = "-".join([kind, *options])
        whole = Training(shared_folder(folder, name), kind=kind, **options).run()
        for step in steps:
            place = shared_folder(folder, f"{name}-{step}")
            first = Training(place, At(step, lambda: end("term")), kind=kind, **options)
            assert exit_code(first) == 75
            again = Training(place, kind=kind, **options)
            assert_equal(again.run(), whole)
            assert again.saved.restored_path.endswith(f"checkpoint-{step}.h5")


def in_steps(folder):
    """`max_steps` ends a training within an epoch, from which a longer one continues."""
    whole = Training(None, kind="hdf5", max_steps=20, max_epochs=-1).run()
    place = shared_folder(folder, "steps")
    options = {"every_n_steps": 4, "max_to_keep": 2}
    Training(place, kind="hdf5", max_steps=11, max_epochs=-1, options=options).run()
    shared_folder(folder, "")
    assert sorted(os.listdir(place)) == ["checkpoint-11.h5", "checkpoint-8.h5"]
    again = Training(place, kind="hdf5", max_steps=20, max_epochs=-1, options=options)
    assert_equal(again.run(), whole)
    assert again.saved.restored_path.endswith("checkpoint-11.h5")


def damaged(folder):
    whole = Training(None).run()
    place = shared_folder(folder, "damaged")
    assert exit_code(Training(place, At(11, lambda: end("term")))) == 75
    damage(os.path.join(place, "checkpoint-11.h5"))
    again = Training(place)
    assert_equal(again.run(), whole)
    assert again.saved.restored_path.endswith("checkpoint-6.h5")


def mistakes(folder):
    place = shared_folder(folder, "mistakes")
    assert exit_code(Training(place, At(3, lambda: end("term")), kind="hdf5")) == 75
    mismatch = ms.errors.CheckpointMismatchError
    wider = Training(place, kind="hdf5", model=Network(width=9))
    raises(mismatch, "net.0.weight", wider.run)
    other = mst.HDF5Dataset(ms.data.Dataset.from_arrays(rows()).shuffle(4).batch(BATCH))
    wrong = Training(place, kind="hdf5", options={"data": other})
    wrong.loader = DataLoader(other, batch_size=None)
    raises(mismatch, "the files, the seed or the steps of the dataset differ", wrong.run)
    fresh = shared_folder(folder, "fresh")
    wrong = Training(fresh, kind="hdf5", options={"data": other})
    raises(ValueError, "fit does not train on the object of data=", wrong.run)
    wrong = Training(fresh, kind="hdf5", options={"data": ()})
    raises(ValueError, "Pass HDF5Checkpoint(..., data=dataset)", wrong.run)
    wrong = Training(place, kind="loader", model=Network())
    raises(mismatch, "it was saved with 1 data, but HDF5Checkpoint was given data= of 0", wrong.run)
    alone = Training(fresh, devices=1, strategy="auto")
    raises(ms.errors.LaunchError, "the trainer trains on 1 rank(s)", alone.run)
    raises(TypeError, "data must hold objects", lambda: ml.HDF5Checkpoint("x", data=[1]))
    raises(ValueError, "every_n_steps", lambda: ml.HDF5Checkpoint("x", every_n_steps=0))


def checks(folder):
    run_each((interrupted, in_steps, damaged, mistakes), folder)


def chained(folder, *others):
    return Training(folder, *others, kind="hdf5", options={"every_n_steps": 5})


if __name__ == "__main__":
    pl.utilities.disable_possible_user_warnings()
    torch.use_deterministic_algorithms(True)
    main(chained, At, {"compare": compare, "checks": checks}, *sys.argv[1:])
