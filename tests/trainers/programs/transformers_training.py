"""Trainings of Hugging Face: over MPI equal to gloo, and interrupted ones equal to whole ones.

transformers_training.py checks FOLDER   train, write the weights, interrupt, and resume

See `shared.main` for the others.
"""

import os
import sys

import numpy as np
import torch.distributed as dist
from of_transformers import At, Training, model, mt
from shared import (
    EPOCHS,
    STEPS,
    assert_equal,
    damage,
    end,
    exit_code,
    main,
    raises,
    rank_and_size,
    run_each,
    save_results,
    shared_folder,
)

import mpistrat as ms


def interrupted(folder):
    """Be interrupted within an epoch, at its ends, and where an evaluation follows a step."""
    size = rank_and_size()[1]
    accumulated = {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 6 // size,
    }
    results = {}
    for name, steps, options in (
        ("plain", (1, 5, STEPS, EPOCHS * STEPS, 11), {}),
        ("accumulated", (8,), accumulated),
        ("limited", (7,), {"max_steps": 15}),
    ):
        whole = results[name] = Training(shared_folder(folder, name), **options).run()
        for step in steps if "WORLD_SIZE" not in os.environ else steps[-1:]:
            place = shared_folder(folder, f"{name}-{step}")
            first = Training(place, At(step, lambda: end("term")), **options)
            assert exit_code(first) == 75
            again = Training(place, **options)
            assert_equal(again.run(), whole)
            assert again.saved.restored_path.endswith(f"checkpoint-{step}.h5")
    save_results(os.path.dirname(folder), results)


def in_steps(folder):
    """`max_steps` ends a training within an epoch, from which a longer one continues."""
    place = shared_folder(folder, "steps")
    usual = {"lr_scheduler_type": "constant"}
    whole = Training(None, **usual).run()
    Training(place, max_steps=11, options={"every_n_steps": 4, "max_to_keep": 2}, **usual).run()
    shared_folder(folder, "")
    assert sorted(os.listdir(place)) == ["checkpoint-11.h5", "checkpoint-8.h5"]
    again = Training(place, **usual)
    result = again.run()
    assert again.saved.restored_path.endswith("checkpoint-11.h5")
    assert_equal(result, whole)
    finished = Training(place, **usual)
    np.testing.assert_array_equal(finished.run()["weights"], whole["weights"])


def damaged(folder):
    place = shared_folder(folder, "damaged")
    whole = Training(place).run()
    damage(os.path.join(place, f"checkpoint-{EPOCHS * STEPS}.h5"))
    again = Training(place)
    assert_equal(again.run(), whole)
    assert again.saved.restored_path.endswith(f"checkpoint-{(EPOCHS - 1) * STEPS}.h5")


def mistakes(folder):
    place = shared_folder(folder, "mistakes")
    assert exit_code(Training(place, At(3, lambda: end("term")))) == 75
    wider = Training(place, net=model(width=10))
    raises(ms.errors.CheckpointMismatchError, "bert.embeddings.word_embeddings", wider.run)
    twice = Training(place)
    os.makedirs(shared_folder(folder, "theirs"), exist_ok=True)
    twice.trainer.save_model(os.path.join(folder, "theirs"))
    dist.barrier()
    theirs = os.path.join(folder, "theirs")
    raises(
        ValueError,
        "train got resume_from_checkpoint, but HDF5Checkpoint has restored",
        lambda: twice.trainer._inner_training_loop(
            batch_size=4, args=twice.trainer.args, resume_from_checkpoint=theirs
        ),
    )
    raises(ValueError, "every_n_steps", lambda: mt.HDF5Checkpoint("x", every_n_steps=0))
    raises(RuntimeError, "works only as a callback", lambda: outside())


def outside():
    mt.HDF5Checkpoint("x").on_train_begin(None, None, None)


def checks(folder):
    every = (interrupted, in_steps, damaged, mistakes)
    run_each(every if "WORLD_SIZE" not in os.environ else every[:1], folder)


def chained(folder, *others):
    # Adam would turn gradients that are zero but for rounding, those of key biases, into steps.
    return Training(
        folder,
        *others,
        net=model(dropout=0.0),
        options={"every_n_steps": 5},
        optim="sgd",
        learning_rate=0.1,
        # Otherwise the mean over examples is multiplied by the number of ranks, as if over tokens.
        average_tokens_across_devices=False,
    )


if __name__ == "__main__":
    main(chained, At, {"checks": checks}, *sys.argv[1:])
