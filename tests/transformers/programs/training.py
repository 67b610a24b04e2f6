"""Trainings of Hugging Face: over MPI equal to gloo, and interrupted ones equal to whole ones.

training.py checks FOLDER             train, write the weights, interrupt, and resume
training.py reference FILE            train to the end on one process, and write the result
training.py ended FOLDER HOW STEP     train, and end after a step: by `term`, or `kill`
training.py resumed FOLDER FILE       train to the end, and compare with the reference
"""

import os
import re
import sys

import pytest
from task import (
    EPOCHS,
    STEPS,
    At,
    Training,
    assert_equal,
    dist,
    end,
    exit_code,
    model,
    ms,
    mt,
    np,
    rank_and_size,
    shared_folder,
)


def raises(kind, text, call):
    with pytest.raises(kind, match=re.escape(text)):
        call()


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
        whole = results[name] = Training(shared_folder(folder, name), **options).train()
        for step in steps if "WORLD_SIZE" not in os.environ else steps[-1:]:
            place = shared_folder(folder, f"{name}-{step}")
            first = Training(place, At(step, lambda: end("term")), **options)
            assert exit_code(first) == 75
            again = Training(place, **options)
            assert_equal(again.train(), whole)
            assert again.saved.restored_path.endswith(f"checkpoint-{step}.h5")
    if rank_and_size()[0] == 0:
        np.savez(
            os.path.join(folder, "found.npz"),
            **{
                f"{kind} {name}": each
                for kind, result in results.items()
                for name, each in result.items()
            },
        )


def in_steps(folder):
    """`max_steps` ends a training within an epoch, from which a longer one continues."""
    place = shared_folder(folder, "steps")
    usual = {"lr_scheduler_type": "constant"}
    whole = Training(None, **usual).train()
    Training(place, max_steps=11, options={"every_n_steps": 4, "max_to_keep": 2}, **usual).train()
    shared_folder(folder, "")
    assert sorted(os.listdir(place)) == ["checkpoint-11.h5", "checkpoint-8.h5"]
    again = Training(place, **usual)
    result = again.train()
    assert again.saved.restored_path.endswith("checkpoint-11.h5")
    assert_equal(result, whole)
    finished = Training(place, **usual)
    np.testing.assert_array_equal(finished.train()["weights"], whole["weights"])


def damaged(folder):
    place = shared_folder(folder, "damaged")
    whole = Training(place).train()
    dist.barrier()
    if rank_and_size()[0] == 0:
        with open(os.path.join(place, f"checkpoint-{EPOCHS * STEPS}.h5"), "r+b") as file:
            file.seek(-3000, os.SEEK_END)
            file.write(b"\xff" * 100)
    dist.barrier()
    again = Training(place)
    assert_equal(again.train(), whole)
    assert again.saved.restored_path.endswith(f"checkpoint-{(EPOCHS - 1) * STEPS}.h5")


def mistakes(folder):
    place = shared_folder(folder, "mistakes")
    assert exit_code(Training(place, At(3, lambda: end("term")))) == 75
    wider = Training(place, net=model(width=10))
    raises(ms.errors.CheckpointMismatchError, "bert.embeddings.word_embeddings", wider.train)
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
    for check in every if "WORLD_SIZE" not in os.environ else every[:1]:
        try:
            check(folder)
        except BaseException as error:
            error.add_note(f"in {check.__name__} on rank {rank_and_size()[0]}")
            raise


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


def main(command, *arguments):
    if command == "reference":
        (path,) = arguments
        np.savez(path, **chained(None).train())
        return
    if command == "checks":
        checks(*arguments)
    elif command == "ended":
        folder, how, step = arguments
        chained(folder, At(int(step), lambda: end(how))).train()
    else:
        folder, path = arguments
        again = chained(folder)
        result = again.train()
        with np.load(path) as expected:
            assert_equal(result, dict(expected), rtol=2e-4, atol=2e-5)
        print("resumed from", os.path.basename(again.saved.restored_path), flush=True)
    is_with_mpi = any(each.partition(".")[0] == "mpi4py" for each in sys.modules)
    print("is done", "with MPI" if is_with_mpi else "without MPI", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
