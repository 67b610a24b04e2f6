"""Cost model in the manner of LogGP, fitted to measured times.

Alexandrov, Ionescu, Schauser and Scheiman ("LogGP: Incorporating Long Messages into the LogP
Model", 1995) price a message by its latency and overhead, and by a gap for each byte. Here a rank
also pays for bytes that it adds up, and for calls of this package. The time is linear in these
constants, so least squares find them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.scaling.work import Work

__all__ = ["TERMS", "Constants", "Fit", "fit"]


TERMS = ("overhead", "latency", "bandwidth", "reduction")
"""What the seconds of a prediction are made of, in the order of the constants."""


@dataclass(frozen=True)
class Constants:
    """The price in seconds of each amount of a `Work`, in the same order."""

    call_s: float
    """A collective call of this package: its overhead."""
    message_s: float
    """A message: latency and overhead of the library."""
    sent_s_per_byte: float
    """A byte sent: the inverse of the bandwidth."""
    reduced_s_per_byte: float
    """A byte of a result of the arithmetic: the inverse of the reduction rate."""

    def terms(self, work: Work) -> dict[str, float]:
        """Return the seconds that each term of the model contributes."""
        prices, amounts = dataclasses.astuple(self), dataclasses.astuple(work)
        return {
            term: price * amount for term, price, amount in zip(TERMS, prices, amounts, strict=True)
        }

    def predict_s(self, work: Work) -> float:
        """Return how long `work` takes."""
        return sum(self.terms(work).values())

    def ruling_term(self, work: Work) -> str:
        """Return the term that takes longest."""
        terms = self.terms(work)
        return max(terms, key=lambda term: terms[term])


@dataclass(frozen=True)
class Fit:
    """The constants that describe measured times best."""

    constants: Constants
    relative_error: float
    """Root of the mean square of ``predicted / measured - 1``."""
    num_samples: int


def fit(samples: Sequence[tuple[Work, float]]) -> Fit:
    """Return the non-negative constants with the least squares of relative errors."""
    # Relative, so that times of microseconds count as much as times of seconds.
    amounts = np.array([dataclasses.astuple(work) for work, _ in samples], np.float64)
    times = np.array([seconds for _, seconds in samples], np.float64)
    if not (len(times) and np.all(times > 0)):
        raise ValueError(f"fit needs positive times, not {times.tolist()}.")
    scales = np.abs(amounts).max(axis=0)
    missing = [
        field.name
        for field, scale in zip(dataclasses.fields(Work), scales, strict=True)
        if scale == 0
    ]
    if missing:
        raise ValueError(
            f"No sample tells the price of {', '.join(missing)}. Measure an operation that has it."
        )
    rows = amounts / scales / times[:, None]
    solution = _solve_non_negative(rows, np.ones(len(times)))
    error = float(np.sqrt(np.mean((rows @ solution - 1) ** 2)))
    return Fit(Constants(*(solution / scales).tolist()), error, len(times))


def _solve_non_negative(rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the least-squares solution without negative entries."""
    # At the best such solution some unknowns are zero and the others solve the problem without
    # them. There are few unknowns, so all choices are tried.
    num_unknowns = rows.shape[1]
    best, smallest = np.zeros(num_unknowns), float(targets @ targets)
    for chosen in itertools.product((False, True), repeat=num_unknowns):
        active = np.array(chosen)
        solution = np.zeros(num_unknowns)
        solution[active] = np.linalg.lstsq(rows[:, active], targets, rcond=None)[0]
        residual = rows @ solution - targets
        if np.all(solution >= 0) and residual @ residual < smallest:
            best, smallest = solution, float(residual @ residual)
    return best
