"""Scan hyperparameters: 200 small trainings, each a closure that runs on any worker.

    mpiexec -n 4 python jobs/scan.py --output runs/scan.json
    mpiexec --with-ft ulfm -n 4 python jobs/scan.py     # Open MPI: goes on when a worker dies

Rank 0 shows the progress and writes the results, best first.
"""

import argparse
import functools
import itertools
import json
import os
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

import mpistrat as ms

RATES = np.geomspace(1e-3, 1.0, 20).tolist()
DECAYS = np.geomspace(1e-4, 1e-1, 10).tolist()


@functools.cache
def make_data():
    """Return examples and labels for training and validation, the same on every worker."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 20))
    y = (x @ rng.normal(size=20) + rng.normal(size=600) > 0).astype(float)
    return x[:400], y[:400], x[400:], y[400:]


def train(rate, decay, num_steps):
    """Train a logistic regression, and return what to compare: one closure."""
    x, y, x_valid, y_valid = make_data()
    weight = np.zeros(x.shape[1])
    for _ in range(num_steps):
        probability = 1 / (1 + np.exp(-x @ weight))
        weight -= rate * (x.T @ (probability - y) / len(x) + decay * weight)
    margin = (2 * y_valid - 1) * (x_valid @ weight)
    loss = float(np.logaddexp(0, -margin).mean())
    return {"rate": rate, "decay": decay, "loss": loss, "accuracy": float((margin > 0).mean())}


def scan(coordinator, args):
    """Schedule all trainings, show how many are done, and return the results. On the chief."""
    console = Console(stderr=True)
    values = [
        coordinator.schedule(train, (rate, decay, args.steps))
        for rate, decay in itertools.product(RATES, DECAYS)
    ]
    results = []
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("trainings", total=len(values))
        for number, value in enumerate(values, 1):
            results.append(value.fetch())
            progress.update(task, completed=number)
            if not console.is_terminal and number % 50 == 0:
                print(f"{number} of {len(values)} trainings are done", flush=True)
    return results


def main():
    """Run the scan on the chief, and serve it on the other ranks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/scan.json"), metavar="FILE")
    parser.add_argument("--steps", type=int, default=300, metavar="N")
    args = parser.parse_args()
    strategy = ms.ParameterServerStrategy()
    if strategy.cluster_resolver.task_type != "chief":
        strategy.serve()
        return
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    results = sorted(scan(coordinator, args), key=lambda each: each["loss"])
    args.output.parent.mkdir(parents=True, exist_ok=True)
    temporary = args.output.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(temporary, args.output)
    best = results[0]
    print(
        f"best of {len(results)}: loss {best['loss']:.4f}, accuracy {best['accuracy']:.3f} with "
        f"rate {best['rate']:.4g} and decay {best['decay']:.4g}"
    )
    strategy.close()


if __name__ == "__main__":
    main()
