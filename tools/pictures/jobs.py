"""Runs of the programs in jobs/, for the pictures of the gallery."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpistrat.testing import launch
from tools.house import ROOT

__all__ = ["digits", "heat_inverse", "infer", "kmeans", "logistic_regression", "torch_ddp"]

_RANKS = 2
_LIMIT_S = 300


def _in_folder(work: Callable[[Path], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Return a function that calls `work` with a temporary folder."""

    def record() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return {"ranks": _RANKS} | work(Path(folder))

    return record


def _run(job: str, *options: object) -> str:
    """Return what a job prints on two ranks."""
    done = launch.run([f"jobs/{job}.py", *map(str, options)], _RANKS, _LIMIT_S, cwd=ROOT)
    if done.returncode != 0:
        raise RuntimeError(f"{job}.py failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _newest(folder: Path) -> Path:
    return max(folder.glob("checkpoint-*.h5"), key=lambda path: int(path.stem.split("-")[1]))


def _rounded(values: Any, digits: int = 4) -> list[Any]:
    rounded: list[Any] = np.round(np.asarray(values, np.float64), digits).tolist()
    return rounded


def _digits_file(folder: Path) -> Path:
    data = folder / "digits.h5"
    prepare = [sys.executable, "jobs/prepare_digits.py", "--output", str(data)]
    subprocess.run(
        prepare, cwd=ROOT, env=launch.environment(), check=True, stdout=subprocess.DEVNULL
    )
    return data


@_in_folder
def digits(folder: Path) -> dict[str, Any]:
    """Train the perceptron; return the losses of each epoch and the last accuracy."""
    options = ["--data", _digits_file(folder), "--output", folder / "run", "--device", "cpu"]
    printed = _run("train_digits", *options)
    rows = json.loads((folder / "run" / "learning_curve.json").read_text())
    return {
        "train": _rounded([row["loss"] for row in rows]),
        "test": _rounded([row["test_loss"] for row in rows]),
        "accuracy": float(re.findall(r"test accuracy: ([\d.]+)", printed)[-1]),
    }


@_in_folder
def kmeans(folder: Path) -> dict[str, Any]:
    """Cluster the table; return some points and the centres, in the plane of largest variance."""
    printed = _run("kmeans", "--data", folder / "table.h5", "--output", folder / "run")
    with h5py.File(folder / "table.h5") as file:
        points = file["points"][::50].astype(np.float64)
    with h5py.File(_newest(folder / "run")) as file:
        centres = file["variables/centres"][...]
    distances = ((points[:, None] - centres) ** 2).sum(axis=2)
    middle = points.mean(axis=0)
    _, _, axes = np.linalg.svd(points - middle, full_matrices=False)
    return {
        "points": _rounded((points - middle) @ axes[:2].T, 2),
        "cluster": distances.argmin(axis=1).tolist(),
        "centres": _rounded((centres - middle) @ axes[:2].T, 2),
        "iterations": len(re.findall(r"^iteration ", printed, re.MULTILINE)),
    }


@_in_folder
def logistic_regression(folder: Path) -> dict[str, Any]:
    """Fit the examples; return the true weights and the fitted ones."""
    printed = _run("logistic_regression", "--data", folder / "clicks", "--output", folder / "run")
    with h5py.File(_newest(folder / "run")) as file:
        weight = file["variables/weight"][...]
    # As in the job's make_data.
    truth = np.random.default_rng(2).standard_normal(weight.size)
    accuracy = float(re.findall(r"accuracy: ([\d.]+)", printed)[-1])
    return {"truth": _rounded(truth), "found": _rounded(weight), "accuracy": accuracy}


@_in_folder
def torch_ddp(folder: Path) -> dict[str, Any]:
    """Train the convolutional network; return loss and test accuracy of each epoch."""
    options = ["--data", _digits_file(folder), "--output", folder / "run"]
    printed = _run("train_torch_ddp", *options)
    rows = re.findall(r"loss: ([\d.]+), test accuracy: ([\d.]+)", printed)
    return {"loss": [float(a) for a, _ in rows], "accuracy": [float(b) for _, b in rows]}


@_in_folder
def heat_inverse(folder: Path) -> dict[str, Any]:
    """Find the conductivity of the plate; return it and the true one."""
    _run("heat_inverse", "--data", folder / "plate.h5", "--output", folder / "run")
    with h5py.File(folder / "plate.h5") as file:
        truth = file["log_conductivity"][...]
    with h5py.File(_newest(folder / "run")) as file:
        found = file["variables/log_conductivity"][...]
    return {"truth": _rounded(truth, 3), "found": _rounded(found, 3)}


@_in_folder
def infer(folder: Path) -> dict[str, Any]:
    """Find the spots; return two images, and the places of their spots."""
    printed = _run("infer", "--data", folder / "spots.h5", "--output", folder / "found.h5")
    with h5py.File(folder / "found.h5") as file:
        counts, spots = file["count"][...], file["spot"][...]
    ends = np.cumsum(counts)
    chosen = [int(each) for each in np.argsort(-counts, kind="stable")[:2]]
    with h5py.File(folder / "spots.h5") as file:
        images = [_rounded(file["image"][each], 2) for each in chosen]
    found = [_rounded(spots[ends[each] - counts[each] : ends[each], :2], 1) for each in chosen]
    total = [int(each) for each in re.findall(r"\d+", printed)[:2]]
    return {"images": images, "spots": found, "numbers": chosen, "total": total}
