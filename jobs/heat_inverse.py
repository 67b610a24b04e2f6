"""Find the heat conductivity of a plate from temperatures, by the adjoint of the heat equation.

    mpiexec -n 4 python jobs/heat_inverse.py --data data/plate.h5 --output runs/plate

Each experiment heats the plate at another place and measures temperatures over time; the job
makes them if the file is absent. The ranks share the experiments. The same command resumes a run.
"""

import argparse
from pathlib import Path

import h5py
import numpy as np

import mpistrat as ms

SIZE, NUM_STEPS, TIME_STEP = 12, 60, 0.1


def along_both_axes(*fields):
    """Return `fields` twice, for differences along the last axis: as they are, and transposed."""
    return fields, [field.swapaxes(-2, -1) for field in fields]


def conduct(xp, conductivity, temperature):
    """Return the heat that flows into each cell of the plates: div(k grad u), insulated."""
    inflow = xp.zeros_like(temperature)
    for k, u, into in along_both_axes(conductivity, temperature, inflow):
        flow = (k[:, 1:] + k[:, :-1]) / 2 * xp.diff(u, axis=-1)
        into[..., :-1] += flow
        into[..., 1:] -= flow
    return inflow


def simulate(xp, conductivity, heater):
    """Return the temperatures, of shape ``(NUM_STEPS + 1, *heater.shape)``."""
    u = xp.zeros((NUM_STEPS + 1, *heater.shape))
    for t in range(NUM_STEPS):
        u[t + 1] = u[t] + TIME_STEP * (conduct(xp, conductivity, u[t]) + heater)
    return u


def misfit_and_gradient(xp, log_conductivity, heater, measured):
    """Return half the sum of squared errors of some experiments, and its gradient."""
    conductivity = xp.exp(log_conductivity)
    u = simulate(xp, conductivity, heater)
    error = u[1:, :, ::2, ::2] - measured.swapaxes(0, 1)
    adjoint = xp.zeros_like(u)  # the derivative of the misfit by each temperature
    for t in range(NUM_STEPS, 0, -1):
        adjoint[t, :, ::2, ::2] += error[t - 1]
        adjoint[t - 1] = adjoint[t] + TIME_STEP * conduct(xp, conductivity, adjoint[t])
    gradient = xp.zeros_like(conductivity)
    for before, after, by in along_both_axes(u[:-1], adjoint[1:], gradient):
        share = (xp.diff(before, axis=-1) * xp.diff(after, axis=-1)).sum(axis=(0, 1))
        by[:, :-1] -= TIME_STEP / 2 * share
        by[:, 1:] -= TIME_STEP / 2 * share
    return (error**2).sum() / 2, gradient * conductivity


def make_experiments(path):
    """Measure, with noise, at every second cell of a plate with two inclusions."""
    rng = np.random.default_rng(3)
    y, x = np.mgrid[:SIZE, :SIZE] / (SIZE - 1)
    bumps = [np.exp(-20 * ((x - a) ** 2 + (y - b) ** 2)) for a, b in ((0.3, 0.3), (0.7, 0.6))]
    truth, place = 0.7 * (bumps[0] - bumps[1]), rng.random((8, 2, 1, 1))
    heater = np.exp(-30 * ((x - place[:, 0]) ** 2 + (y - place[:, 1]) ** 2))
    measured = simulate(np, np.exp(truth), heater)[1:, :, ::2, ::2].swapaxes(0, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path.with_suffix(".tmp"), "w") as file:
        file["heater"], file["log_conductivity"] = heater, truth
        file["measured"] = measured + rng.normal(0, 0.01, measured.shape)
    path.with_suffix(".tmp").replace(path)


def main():
    """Minimize the misfit. **Collective**: every rank runs this program."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default=Path("data/plate.h5"), metavar="FILE", help="made if absent")
    add("--output", default="runs/plate", metavar="FOLDER", help="of the checkpoints")
    add("--iterations", type=int, default=100, metavar="N", help="each 20th is saved")
    add("--smoothness", type=float, default=0.1, metavar="X", help="weight of the regularization")
    add("--device", default="auto", help='"auto", "cpu", "gpu" or "gpu:K"')
    args = parser.parse_args()
    strategy = ms.MPIStrategy(device=args.device)
    xp, is_first = strategy.extended.xp, strategy.extended.should_save_summary
    if is_first and not args.data.exists():
        make_experiments(args.data)
    strategy.reduce("sum", 0)  # the others wait until the file is there
    data = ms.data.Dataset.from_hdf5(args.data, fields=("heater", "measured"))
    data = data.batch(data.cardinality())  # all of them, divided among the ranks
    part = next(iter(strategy.distribute_dataset(data)))
    with strategy.scope():
        unknown = ms.Variable(np.zeros((SIZE, SIZE)), name="log_conductivity")
        optimizer = ms.optimizers.Adam(0.05)
    saved = ms.Checkpoint(log_conductivity=unknown, optimizer=optimizer)
    manager = ms.CheckpointManager(saved, args.output, step_counter=optimizer.iterations)

    def step(heater, measured):
        value = unknown.value()
        misfit, gradient = misfit_and_gradient(xp, value, heater, measured)
        # The smoothness penalty, |grad value|^2, counts once over all ranks.
        weight = args.smoothness / strategy.num_replicas_in_sync
        gradient -= weight * conduct(xp, xp.ones_like(value), value)
        optimizer.apply_gradients([(gradient, unknown)])
        return misfit

    if (path := manager.restore_or_initialize()) and is_first:
        print(f"resumes from {path}")
    while (iteration := int(optimizer.iterations.numpy())) < args.iterations:
        misfit = strategy.reduce("sum", strategy.run(step, args=part))
        if (iteration + 1) % 20 == 0:
            manager.save()
            if is_first:
                print(f"iteration {iteration + 1}, misfit: {misfit:.6g}", flush=True)


if __name__ == "__main__":
    main()
