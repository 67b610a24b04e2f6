"""A training that is interrupted and resumed, compared with one process without a stop.

training.py reference FILE             train to the end without a stop, and write the result
training.py ended FOLDER HOW STEP      train, and end after a step: by `term`, or `kill`
training.py resumed FOLDER FILE        train to the end, and compare with the reference
training.py within FILE                be interrupted after each step, and compare each time
"""

import os
import signal
import sys

from task import (
    STEPS,
    At,
    assert_same_on_all_ranks,
    batches,
    compiled,
    dist,
    keras,
    mk,
    ms,
    network,
    np,
    raises,
    rank_and_size,
    weights_of,
)

EPOCHS = 6  # 48 steps


class Trained:
    """A model with its data and callbacks, as at the start of a job."""

    def __init__(
        self,
        folder=None,
        *others,
        repeats=False,
        steps=None,
        epochs=EPOCHS,
        is_random=False,
        **options,
    ):
        layers = {}
        if is_random:
            dropout = [keras.layers.Dropout(0.3), keras.layers.Dropout(0.3, seed=9)]
            layers = {"dropout": dropout, "normalize": True}
        optimizer = keras.optimizers.Adam(0.01)
        self.model = compiled(network(built=folder is None, **layers), optimizer)
        dataset = batches().repeat() if repeats else batches()
        self.steps = steps
        self.data = mk.HDF5Dataset(dataset)
        self.test = mk.HDF5Dataset(batches(40, seed=None))
        self.epochs = epochs
        self.stopping = keras.callbacks.EarlyStopping("loss", patience=50)
        self.plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1)
        watched = [self.stopping, self.plateau]
        self.callbacks = [*watched, *others]
        if folder is not None:
            saved = mk.HDF5Checkpoint(folder, data=self.data, callbacks=watched, **options)
            self.callbacks.append(saved)
            self.saved = saved

    def fit(self):
        """Train, and return what must not depend on interruptions or the number of ranks."""
        history = self.model.fit(
            self.data,
            epochs=self.epochs,
            steps_per_epoch=self.steps,
            validation_data=self.test,
            verbose=0,
            callbacks=self.callbacks,
        )
        found = {
            "weights": weights_of(self.model),
            "iterations": int(self.model.optimizer.iterations),
            "rate": float(self.model.optimizer.learning_rate),
            "last epoch": history.epoch[-1],
            "wait": self.stopping.wait,
            "best": self.stopping.best,
            "position": [self.data.state_dict()[each] for each in ("pass", "batch")],
        }
        found |= {name: values[-1] for name, values in sorted(history.history.items())}
        assert_same_on_all_ranks(found["weights"])
        return found


def assert_equal(found, expected):
    assert found.keys() == set(expected), (found.keys(), set(expected))
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=2e-4, atol=2e-5, err_msg=name)


def end(how):
    rank, size = rank_and_size()
    if rank == size - 1:
        os.kill(os.getpid(), {"term": signal.SIGTERM, "kill": signal.SIGKILL}[how])


def exit_code(call):
    try:
        call()
    except SystemExit as error:
        return error.code
    return None


def within(folder, expected):
    """Be interrupted by a signal after each step of two epochs, in the same processes."""
    for step in range(1, 2 * STEPS + 1):
        place = os.path.join(folder, str(step))
        first = Trained(place, At(step, lambda: end("term")))
        before = signal.getsignal(signal.SIGTERM)
        assert exit_code(first.fit) == 75, step
        signal.signal(signal.SIGTERM, before)  # of a program that has ended
        if step not in (1, 7, 8, 9, 16):  # of others only the file is looked at
            assert os.listdir(place) == [f"checkpoint-{step}.h5"] or step > STEPS
            continue
        again = Trained(place, save_freq=5)
        assert_equal(again.fit(), expected)
        assert again.saved.restored_path.endswith(f"checkpoint-{step}.h5")
        names = [f"checkpoint-{each}.h5" for each in (30, 35, 40, 45, 48)]
        dist.barrier()
        assert sorted(os.listdir(place)) == sorted(names)
        finished = Trained(place)
        finished.model.fit(finished.data, epochs=EPOCHS, verbose=0, callbacks=[finished.saved])
        assert np.array_equal(weights_of(finished.model), weights_of(again.model))


IN_STEPS = {
    "endless": {"repeats": True, "steps": STEPS // 2, "epochs": 4},
    "divided": {"steps": STEPS // 2, "epochs": 5},
    "uneven": {"steps": 3, "epochs": 6},
}
"""With `steps_per_epoch`, as in the tutorials of TensorFlow."""


def in_steps(folder, references):
    for kind, options in IN_STEPS.items():
        expected = references[kind]
        for step in (3, 4, 5, 9):
            place = os.path.join(folder, f"{kind}-{step}")
            first = Trained(place, At(step, lambda: end("term")), **options)
            assert exit_code(first.fit) == 75
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            assert_equal(Trained(place, **options).fit(), expected)


def several_steps_at_once(folder, expected):
    """With `steps_per_execution`, also if that does not divide the steps of an epoch."""
    for step in (2, 3):  # executions of three steps; the third has the last two of the epoch
        place = os.path.join(folder, f"several-{step}")
        first = Trained(place, At(step, lambda: end("term")))
        again = Trained(place)
        for each in (first, again):
            each.model.steps_per_execution = 3
        assert exit_code(first.fit) == 75
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert_equal(again.fit(), expected)


def random_layers(folder):
    """On the same ranks, a resumed run draws what the first one would have drawn."""
    options = {"is_random": True, "epochs": 2}
    whole = Trained(os.path.join(folder, "random"), **options).fit()
    for step in (3, STEPS):
        place = os.path.join(folder, f"random-{step}")
        first = Trained(place, At(step, lambda: end("term")), **options)
        assert exit_code(first.fit) == 75
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        again = Trained(place, mk.Replicas(), **options)
        assert_equal(again.fit(), whole)
    other = Trained(os.path.join(folder, "other"), **options)
    keras.utils.set_random_seed(77)
    assert not np.allclose(other.fit()["weights"], whole["weights"], rtol=1e-3)


def mistakes(folder):
    def changed(step=3):
        place = os.path.join(folder, f"mistakes-{len(os.listdir(folder))}")
        assert_same_on_all_ranks(place)
        first = Trained(place, At(step, lambda: end("term")))
        assert exit_code(first.fit) == 75
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        dist.barrier()
        return place, Trained(place)

    place, again = changed()
    again.data = mk.HDF5Dataset(batches(seed=4))
    saved = mk.HDF5Checkpoint(place, data=again.data, callbacks=[again.stopping, again.plateau])
    again.callbacks = [saved]
    mismatch = ms.errors.CheckpointMismatchError
    raises(mismatch, "the files, the seed or the steps of the dataset differ", again.fit)
    _, again = changed()
    again.steps = 2
    raises(ValueError, "Use the same steps_per_epoch", again.fit)
    again.data, again.steps = mk.HDF5Dataset(batches()), None
    raises(ValueError, "is not the dataset that fit trains on", again.fit)
    place, again = changed()
    again.callbacks = [mk.HDF5Checkpoint(place, data=again.data)]
    raises(mismatch, "callbacks= of 2, but HDF5Checkpoint was given callbacks= of 0", again.fit)
    watched = [again.stopping, again.plateau]
    again.callbacks = [mk.HDF5Checkpoint(place, callbacks=watched)]
    raises(mismatch, "was given no data=", again.fit)
    more = Trained(place)
    more.model.compile(
        more.model.optimizer,
        more.model.loss,
        metrics=["accuracy", "sparse_top_k_categorical_accuracy"],
    )
    raises(mismatch, "with 4 variables of metrics, but the model has 6", more.fit)
    assert int(more.model.optimizer.iterations) == 0
    # Without `data`, the epoch begins again.
    place = os.path.join(folder, "without-data")
    for at in ([At(3, lambda: end("term"))], []):
        last = Trained(place)
        last.callbacks = [*at, mk.HDF5Checkpoint(place)]
        assert exit_code(last.fit) == (75 if at else None)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert int(last.model.optimizer.iterations) == EPOCHS * STEPS + 3


def damaged(folder, expected):
    """A damaged file is passed over."""
    place = os.path.join(folder, "damaged")
    first = Trained(place, At(2 * STEPS + 1, lambda: end("term")))
    assert exit_code(first.fit) == 75
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if rank_and_size()[0] == 0:
        with open(os.path.join(place, f"checkpoint-{2 * STEPS + 1}.h5"), "r+b") as file:
            file.seek(-3000, os.SEEK_END)
            file.write(b"\xff" * 100)
    dist.barrier()
    again = Trained(place)
    assert_equal(again.fit(), expected)
    assert again.saved.restored_path.endswith(f"checkpoint-{2 * STEPS}.h5")


def main(command, *arguments):
    if command != "reference":
        mk.init()
    if command == "reference":
        (path,) = arguments
        plain = Trained().fit()
        found = {f"plain: {name}": each for name, each in plain.items()}
        for kind, options in IN_STEPS.items():
            result = Trained(**options).fit()
            found |= {f"{kind}: {name}": each for name, each in result.items()}
        np.savez(path, **found)
    elif command == "ended":
        folder, how, step = arguments
        Trained(folder, At(int(step), lambda: end(how)), save_freq=3).fit()
    elif command == "resumed":
        folder, path = arguments
        again = Trained(folder, save_freq=3)
        assert_equal(again.fit(), references_in(path)["plain"])
        print(f"resumed from {os.path.basename(again.saved.restored_path)}", flush=True)
    else:
        (path,) = arguments
        folder = os.path.dirname(path)
        references = references_in(path)
        expected = references["plain"]
        within(folder, expected)
        in_steps(folder, references)
        several_steps_at_once(folder, expected)
        random_layers(folder)
        damaged(folder, expected)
        mistakes(folder)
        print("is done", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def references_in(path):
    references = {}
    with np.load(path) as found:
        for key in found:
            kind, _, name = key.partition(": ")
            references.setdefault(kind, {})[name] = found[key]
    return references


if __name__ == "__main__":
    main(*sys.argv[1:])
