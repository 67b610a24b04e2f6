"""Train a convolutional network of Keras on handwritten digits.

    python jobs/prepare_digits.py --output data/digits.h5
    mpiexec -n 4 python jobs/train_keras.py --data data/digits.h5 --output runs/keras

It is the program of TensorFlow's tutorial for several workers, with its strategy and its dataset
exchanged. The same command resumes from the newest checkpoint, also on a different number of ranks.
Needs Keras 3.16 or newer, and PyTorch.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"
try:
    import keras
except ImportError as error:
    package = "Keras: pip install --pre keras-nightly" if error.name == "keras" else "PyTorch"
    raise SystemExit(f"This job needs {package}") from None

import mpistrat as ms
import mpistrat.keras as mk


def parse_arguments():
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", default="data/digits.h5", metavar="FILE", help="made by prepare_digits.py")
    add("--output", default="runs/keras", metavar="FOLDER", help="of the checkpoints")
    add("--epochs", type=int, default=10, metavar="N")
    add("--batch-size", type=int, default=48, metavar="N", help="examples over all ranks")
    add("--seed", type=int, default=0, metavar="N", help="of the parameters and of the order")
    add("--walltime-margin", type=float, metavar="SECONDS", help="save so long before a job ends")
    return parser.parse_args()


def build_and_compile_cnn_model():
    """Return the network for images of 8 x 8 pixels."""
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            keras.layers.Rescaling(1 / 16),
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(1e-3),
        metrics=["accuracy"],
    )
    return model


def digits(args, part, **batching):
    """Return the batches of one part of the file. **Collective**."""
    dataset = ms.data.Dataset.from_hdf5(args.data, fields=(f"{part}/image", f"{part}/label"))
    if part == "train":
        dataset = dataset.shuffle(seed=args.seed)
    return mk.HDF5Dataset(dataset.batch(args.batch_size, **batching))


def main():
    """Train and test. **Collective**: every rank runs this program."""
    args = parse_arguments()
    group = mk.init()
    is_chief = group.rank() == 0
    keras.utils.set_random_seed(args.seed)
    model = build_and_compile_cnn_model()
    # The last batch would have fewer examples, which would count more.
    train = digits(args, "train", drop_remainder=True)
    test = digits(args, "test")

    os.makedirs(args.output, exist_ok=True)
    history = keras.callbacks.CSVLogger(os.path.join(args.output, "history.csv"), append=True)
    slower = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=3)
    saved = mk.HDF5Checkpoint(
        args.output, data=train, walltime_margin_s=args.walltime_margin, callbacks=[slower]
    )
    model.fit(
        train,
        epochs=args.epochs,
        validation_data=test,
        callbacks=[mk.on_root(history), slower, saved],
        verbose=2 if is_chief else 0,
    )
    if saved.restored_path and is_chief:
        print(f"resumed from {saved.restored_path} on {group.size()} rank(s)")
    _, accuracy = model.evaluate(test, verbose=0, callbacks=[mk.Replicas()])
    if is_chief:
        print(f"test accuracy: {accuracy:.4f}")


if __name__ == "__main__":
    main()
