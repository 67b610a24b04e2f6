"""Times candidates in turns, creates arrays for them, and describes the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.arrays import Device
from mpistrat.collectives.collectives import Collectives
from mpistrat.mpi.world import World, library_version
from mpistrat.settings import environment
from mpistrat.tracing.spans import Recorder, active, record_on
from mpistrat.version import __version__

_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
"""Number and width of the bottleneck blocks in each stage (He et al., 2016, table 1)."""


def _normalized(*kernel: int) -> list[tuple[int, ...]]:
    """Return the shapes of a convolution, and of the scale and offset of its normalization."""
    return [kernel, (kernel[0],), (kernel[0],)]


def _shapes() -> tuple[tuple[int, ...], ...]:
    shapes = _normalized(64, 3, 7, 7)
    channels = 64
    for num_blocks, width in _STAGES:
        for block in range(num_blocks):
            shapes += _normalized(width, channels, 1, 1)
            shapes += _normalized(width, width, 3, 3)
            shapes += _normalized(4 * width, width, 1, 1)
            if block == 0:
                shapes += _normalized(4 * width, channels, 1, 1)
            channels = 4 * width
    return (*shapes, (1000, channels), (1000,))


SHAPES = _shapes()
NUM_PARAMETERS = sum(prod(shape) for shape in SHAPES)


def random_arrays(shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Return float32 arrays of `shapes`, with numbers as small as gradients."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
    for array in arrays:
        array *= np.float32(1e-3)
    return arrays


_TARGET_S = 0.02
"""Target time of one sample. A sample repeats shorter calls, which warms the caches."""


class Timings:
    """Times of one call of each candidate in seconds, with one sample per round."""

    # Ratios and differences are computed within each round, and then the median over the rounds.
    # So times at which the whole machine is slow cancel out.

    def __init__(self, samples: Mapping[str, Sequence[float]]) -> None:
        self._samples = samples

    def median_s(self, name: str) -> float:
        """Return the median time of the candidate `name`."""
        return statistics.median(self._samples[name])

    def medians(self) -> dict[str, Any]:
        """Return row entries for each candidate: ``<name>_s``, and its quartiles."""
        row: dict[str, Any] = {}
        for name in self._samples:
            row |= self.time(f"{name}_s", name)
        return row

    def time(self, key: str, name: str) -> dict[str, Any]:
        """Return the median time of a candidate and its quartiles, as row entries."""
        return _with_quartiles(key, self._samples[name])

    def ratio(self, key: str, above: str, *below: str, factor: float = 1.0) -> dict[str, Any]:
        """Return `median_ratio` times `factor` and its quartiles, as row entries."""
        return _with_quartiles(key, [factor * each for each in self._ratios(above, *below)])

    def median_ratio(self, above: str, *below: str) -> float:
        """Return the median of `above` divided by the sum of `below`."""
        return statistics.median(self._ratios(above, *below))

    def _ratios(self, above: str, *below: str) -> list[float]:
        below_s = map(sum, zip(*(self._samples[each] for each in below), strict=True))
        rounds = zip(self._samples[above], below_s, strict=True)
        return [first / second for first, second in rounds]

    def median_difference_s(self, first: str, second: str) -> float:
        """Return the median of `first` minus `second`."""
        rounds = zip(self._samples[first], self._samples[second], strict=True)
        return statistics.median(a - b for a, b in rounds)


def _with_quartiles(key: str, samples: Sequence[float]) -> dict[str, Any]:
    """Return the median and its quartiles as row entries, for `mpistrat.bench.benchmark`."""
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75)).tolist()
    return {key: middle, f"{key}_quartiles": [low, high]}


def take_turns(
    candidates: Mapping[str, Callable[[], object]], collectives: Collectives, num_samples: int
) -> Timings:
    """Time one call of each candidate in each of `num_samples` rounds. **Collective**.

    A sample ends when the device of `collectives` has done its work.
    """
    repeats, device = {}, collectives.device
    for name, call in candidates.items():
        # The first call pays for connections and new memory.
        call()
        # Use the time of the slowest rank, so that all ranks repeat a collective equally often.
        once_s = max(collectives.gather_json(_time(call, 3, device)))
        repeats[name] = max(1, round(_TARGET_S / max(once_s, 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    order = random.Random(0)  # equal on all ranks
    for _ in range(num_samples):
        # Shuffle the order in each round, because each candidate leaves its caches to the next one.
        order.shuffle(names)
        for name in names:
            # Start all ranks together. Otherwise the others would also measure their wait for a
            # late rank.
            collectives.gather_json(None)
            seconds = _time(candidates[name], repeats[name], device)
            # Use the time of the slowest rank, so that all ranks get equal numbers.
            samples[name].append(max(collectives.gather_json(seconds)))
    return Timings(samples)


def _time(call: Callable[[], object], repeats: int, device: Device) -> float:
    # Wait for earlier work, which does not belong to this sample.
    device.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    device.synchronize()
    return (time.perf_counter() - began) / repeats


class _Observer(Recorder):
    """Recorder that keeps the facts of collectives in memory."""

    def __init__(self) -> None:
        self.push = self.pop = None
        self.facts: list[dict[str, Any]] = []

    def add(
        self, category: str, name: str, began_ns: int, ended_ns: int, facts: dict[str, Any]
    ) -> None:
        if category == "collective":
            self.facts.append(facts)


def facts_of_last_collective(call: Callable[[], object]) -> dict[str, str]:
    """Call `call`, and return the reducer of its last collective and why it was selected."""
    observer, before = _Observer(), active()
    record_on(observer)
    try:
        call()
    finally:
        record_on(before)
    # With MPISTRAT_CHECKS=off nothing is recorded.
    last = observer.facts[-1] if observer.facts else {}
    return {key: str(last[key]) for key in ("implementation", "why") if key in last}


_PACKAGES = ("mpi4py", "torch", "h5py", "isal")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def describe_machine(world: World) -> dict[str, Any]:
    """Return the facts that a reader needs to judge the figures, as JSON values."""
    variables = environment()
    return {
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count() or 1,
            "architecture": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "threads": {name: variables[name] for name in _THREAD_VARIABLES if name in variables},
        },
        "versions": {
            "mpistrat": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            **_installed(),
        },
        "mpi_library": library_version(),
        "num_ranks": world.size,
        "num_nodes": len(world.hosts),
    }


def _installed() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
