"""Train a multi-layer perceptron on scans of handwritten digits, on any number of MPI ranks.

    python jobs/prepare_digits.py --output data/digits.h5
    mpiexec -n 4 python jobs/train_digits.py --data data/digits.h5 --output runs/digits

The output folder receives a checkpoint per epoch, and the learning curve at the end. An earlier run
in it is moved aside, or resumed with --resume or by `mpistrat run --restarts`. When any rank gets
SIGTERM or SIGUSR1, or when the end of a Slurm job is near, the job saves in the middle of the epoch
and exits with code 75: run it again.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

import mpistrat as ms

LAYER_SIZES = (64, 128, 64, 10)


def make_layers(seed, batch_norm="none"):
    """Return the variables of the model, a list of layers; the hidden ones may be normalized."""
    rng = np.random.default_rng(seed)
    layers = []
    for k, (n, m) in enumerate(itertools.pairwise(LAYER_SIZES)):
        kernel = (rng.standard_normal((n, m)) / np.sqrt(n)).astype(np.float32)
        bias = np.zeros(m, np.float32)
        layers.append(
            {
                "kernel": ms.Variable(kernel, name=f"layer{k}/kernel"),
                "bias": ms.Variable(bias, name=f"layer{k}/bias"),
            }
        )
        if batch_norm != "none" and m != LAYER_SIZES[-1]:
            layers[-1]["norm"] = ms.layers.BatchNorm(
                m, momentum=0.9, synchronized=batch_norm == "synchronized", name=f"layer{k}/norm"
            )
    return layers


def forward(xp, layers, image, training):
    """Return the logits of shape ``(local_batch_size, 10)``, and what `backward` needs."""
    x = image.reshape(-1, LAYER_SIZES[0]).astype(xp.float32) / 16
    tape = []
    for layer in layers:
        logits, saved = x @ layer["kernel"].value() + layer["bias"].value(), None
        if "norm" in layer:
            logits, saved = layer["norm"].forward(logits, training)
        tape.append((x, saved))
        x = xp.tanh(logits)
    return logits, tape


def cross_entropy(xp, logits, label):
    """Return the loss of each example, and the gradient of their sum with respect to the logits."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probability = shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))
    target = (label[:, None] == xp.arange(logits.shape[1])).astype(xp.float32)
    return -(target * log_probability).sum(axis=1), xp.exp(log_probability) - target


def backward(layers, tape, error):
    """Return ``(gradient, variable)`` pairs, given the gradient with respect to the logits."""
    pairs = []
    for layer, (x, saved) in zip(reversed(layers), reversed(tape), strict=True):
        if "norm" in layer:
            error, of_norm = layer["norm"].backward(saved, error)
            pairs += of_norm
        pairs += [(x.T @ error, layer["kernel"]), (error.sum(axis=0), layer["bias"])]
        error = (error @ layer["kernel"].value().T) * (1 - x * x)  # the slope of tanh
    return pairs


class Training:
    """The model, and everything else that a run needs to resume after an interruption."""

    def __init__(self, strategy, args):
        self.strategy = strategy
        self.xp = strategy.extended.xp
        train, test = open_data(args, "train"), open_data(args, "test")
        self.num_examples = train.cardinality()
        self.train_batches = strategy.distribute_dataset(
            train.shuffle(seed=args.seed).batch(args.batch_size)
        )
        self.test_batches = strategy.distribute_dataset(test.batch(args.batch_size))
        with strategy.scope():
            self.layers = make_layers(args.seed, args.batch_norm)
            self.optimizer = ms.optimizers.SGD(learning_rate=0.05, momentum=0.9)
            self.loss = ms.metrics.Mean(name="loss")
            self.accuracy = ms.metrics.Accuracy(name="accuracy")
        self.history = History()
        self.checkpoint = ms.Checkpoint(
            model={"layers": self.layers},
            optimizer=self.optimizer,
            metrics={"loss": self.loss, "accuracy": self.accuracy},
            batches=self.train_batches,
            history=self.history,
        )

    def train_step(self, image, label):
        """Train on this rank's part of a global batch, which may be empty."""
        logits, tape = forward(self.xp, self.layers, image, training=True)
        losses, error = cross_entropy(self.xp, logits, label)
        # The loss is the mean over the global batch. The sizes are summed: the last is short.
        global_batch_size = int(ms.get_replica_context().all_reduce("sum", len(label)))
        self.optimizer.apply_gradients(backward(self.layers, tape, error / global_batch_size))
        self.loss.update_state(losses)
        self.accuracy.update_state(label, logits.argmax(axis=1))

    def test_step(self, image, label):
        """Test on this rank's part of a global batch."""
        logits, _ = forward(self.xp, self.layers, image, training=False)
        self.loss.update_state(cross_entropy(self.xp, logits, label)[0])
        self.accuracy.update_state(label, logits.argmax(axis=1))

    def run_batches(self, step, batches, after_step=lambda: None):
        """Run `step` on all batches; return the mean loss and the accuracy. **Collective**."""
        for image, label in batches:
            self.strategy.run(step, args=(image, label))
            after_step()
        figures = float(self.loss.result()), float(self.accuracy.result())
        # Not before the epoch: a resumed epoch continues with the totals of its first part.
        self.loss.reset_state()
        self.accuracy.reset_state()
        return figures

    def run_epoch(self, after_step):
        """Train for one epoch, test, and add the results to the history. **Collective**."""
        loss, accuracy = self.run_batches(self.train_step, self.train_batches, after_step)
        test_loss, test_accuracy = self.run_batches(self.test_step, self.test_batches)
        self.history.rows.append(
            {
                "epoch": len(self.history.rows) + 1,
                "loss": loss,
                "accuracy": accuracy,
                "test_loss": test_loss,
                "test_accuracy": test_accuracy,
            }
        )


class History:
    """The results of each epoch, saved in the checkpoint."""

    def __init__(self):
        self.rows = []

    def state_dict(self):
        """Return the state to save in a checkpoint."""
        return {"rows": self.rows}

    def load_state_dict(self, state):
        """Load the state from a checkpoint."""
        self.rows = list(state["rows"])


def open_data(args, part):
    """Return one part of the data, ``"train"`` or ``"test"``."""
    dataset = ms.data.Dataset.from_hdf5(args.data, fields=(f"{part}/image", f"{part}/label"))
    num_examples = dataset.cardinality()
    if part == "train" and args.batch_size > num_examples:
        raise ValueError(
            f"--batch-size {args.batch_size} is larger than the data: {args.data} holds "
            f"{num_examples} examples under {part}."
        )
    return dataset


@contextlib.contextmanager
def progress_display(speaks, num_epochs):
    """Yield ``show(row, num_examples, seconds)`` for each epoch: a bar, or lines in a log file."""
    console = Console(stderr=True)
    is_live = speaks and console.is_terminal
    columns = [TextColumn("{task.description}"), BarColumn()]
    with Progress(*columns, console=console, disable=not is_live) as progress:
        task = progress.add_task("", total=num_epochs)

        def show(row, num_examples, seconds):
            epoch = row["epoch"]
            text = (
                f"epoch {epoch:{len(str(num_epochs))}}/{num_epochs}  loss {row['loss']:.4f}  "
                f"test accuracy {row['test_accuracy']:.3f}  {num_examples / seconds:,.0f} "
                f"examples/s  {seconds * (num_epochs - epoch):.0f} s left"
            )
            progress.update(task, completed=epoch, description=text)
            if speaks and not is_live:
                print(text, flush=True)

        yield show


def write_learning_curve(rows, folder, title):
    """Write the history as JSON and as a picture; each file appears once it is complete."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    figure.suptitle(title, fontweight="bold")
    epochs = [row["epoch"] for row in rows]
    for axes, quantity in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for part, colour in (("", "#0f4c92"), ("test_", "#d67d00")):  # also for the colour-blind
            values = [row[part + quantity] for row in rows]
            axes.plot(epochs, values, color=colour, marker="." if len(rows) < 10 else None)
            label = f"{'test' if part else 'train'} {values[-1]:.3g}"
            # The two labels would overlap where the curves meet.
            up = 6 if values[-1] >= max(rows[-1][quantity], rows[-1]["test_" + quantity]) else -6
            axes.annotate(label, (epochs[-1], values[-1]), (8, up), color=colour, va="center",
                          textcoords="offset points", annotation_clip=False)  # fmt: skip
        axes.set(xlabel="epoch", title=quantity, yscale="log" if quantity == "loss" else "linear")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3, which="both")
    temporary = folder / ".learning_curve.tmp"
    figure.savefig(temporary, format="png", dpi=150)
    os.replace(temporary, folder / "learning_curve.png")
    temporary.write_text(json.dumps(rows, indent=1) + "\n")
    os.replace(temporary, folder / "learning_curve.json")


def move_aside(folder):
    """Rename the folder of an earlier run, so that nothing is mixed with it or overwritten."""
    if any(folder.glob("checkpoint-*.h5")):
        names = (Path(f"{folder}.{number}") for number in itertools.count(1))
        free = next(name for name in names if not name.exists())
        folder.rename(free)
        print(f"moved the earlier run in {folder} to {free}; --resume would have gone on with it")


class RankZeroParser(argparse.ArgumentParser):
    """A parser whose help and error messages only rank 0 prints."""

    def print_help(self, file=None):
        """Print the help once."""
        if ms.MPIStrategy(device="cpu").extended.should_save_summary:
            super().print_help(file)

    def error(self, message):
        """Print the usage and `message` once, and exit on every rank."""
        if ms.MPIStrategy(device="cpu").extended.should_save_summary:
            super().error(message)
        raise SystemExit(2)


def parse_arguments():
    """Return the command line's options."""
    parser = RankZeroParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", default="data/digits.h5", metavar="FILE", help="made by prepare_digits.py")
    add("--output", type=Path, default=Path("runs/digits"), metavar="FOLDER")
    add(
        "--resume",
        action="store_true",
        default="MPISTRAT_RESTART" in os.environ,  # mpistrat run --restarts has started it again
        help="go on from the newest checkpoint, if there is one",
    )
    add("--epochs", type=int, default=30, metavar="N")
    add("--batch-size", type=int, default=128, metavar="N", help="examples over all ranks")
    add("--seed", type=int, default=0, metavar="N", help="of the first weights and the shuffling")
    add(
        "--batch-norm",
        choices=("none", "replica", "synchronized"),
        default="none",
        help="normalize hidden layers by the statistics of each rank's examples, or of all ranks'",
    )
    add(
        "--replicas",
        type=int,
        metavar="R",
        help="divide the training into R parts, and get the same bits on any number of ranks up to "
        "R; the last line printed is then a digest of the weights",
    )
    add(
        "--walltime-margin",
        type=float,
        default=60,
        metavar="SECONDS",
        help="save and end so long before the end of a Slurm job",
    )
    add("--device", default="auto", help='"auto", "cpu", "gpu" or "gpu:K"')
    return parser.parse_args()


def digest_of(layers):
    """Return a digest of the bits of all weights."""
    digest = hashlib.sha256()
    for layer in layers:
        for variable in (layer["kernel"], layer["bias"]):
            digest.update(variable.numpy().tobytes())
    return digest.hexdigest()


def describe(strategy):
    """Return on how many ranks, with which MPI library and on which device a job runs."""
    from mpi4py import MPI  # here, because the strategy starts MPI

    library, version = MPI.get_vendor()
    version = ".".join(map(str, version))
    ranks = strategy.size
    return f"{ranks} rank(s), {library} {version}, {strategy.extended.device}"


def main():
    """Train, test and save. **Collective**: every rank runs this program."""
    args = parse_arguments()
    strategy = ms.MPIStrategy(device=args.device, num_replicas=args.replicas)
    speaks = strategy.extended.should_save_summary  # on rank 0
    if args.epochs < 1:
        raise ValueError(f"--epochs must be at least 1, not {args.epochs}.")
    training = Training(strategy, args)
    history = training.history
    if speaks and not args.resume:
        move_aside(args.output)
    manager = ms.CheckpointManager(training.checkpoint, args.output, max_to_keep=3)
    handler = ms.PreemptionCheckpointHandler(manager, walltime_margin_s=args.walltime_margin)
    if args.resume and manager.latest_checkpoint:
        status = training.checkpoint.restore(manager.latest_checkpoint)
        status.assert_existing_objects_matched()
        if speaks:
            print(f"resumes from {manager.latest_checkpoint}")
    else:
        manager.save(step=0)  # fails now if the folder is not writable, not after an epoch

    def leave_if_preempted():
        if handler.save_checkpoint_if_preempted(step=len(history.rows) + 1):
            raise SystemExit(handler.EXIT_CODE)

    if speaks:
        print(f"training on {describe(strategy)}", file=sys.stderr, flush=True)
    with progress_display(speaks, args.epochs) as show:
        while len(history.rows) < args.epochs:
            began = time.perf_counter()
            training.run_epoch(leave_if_preempted)
            manager.save(step=len(history.rows))
            show(history.rows[-1], training.num_examples, time.perf_counter() - began)
    if speaks:
        num_ranks = strategy.size
        title = (
            f"Digits: {args.epochs} epochs on {num_ranks} rank{'s' if num_ranks > 1 else ''}, "
            f"global batch size {args.batch_size}"
        )
        write_learning_curve(history.rows, args.output, title)
        print(f"test accuracy: {history.rows[-1]['test_accuracy']:.4f}")
        if args.replicas is not None:
            print(f"weights: {digest_of(training.layers)}")


if __name__ == "__main__":
    main()
