"""Learning-rate schedules: pure functions, so no ranks are needed."""

import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.optimizers import schedules
from tests.devices import assert_allclose

rates = st.floats(1e-9, 1e3)
shares = st.floats(0, 1)
lengths = st.integers(1, 40)
steps = st.integers(0, 500)


def curve(schedule, num_steps):
    return [schedule(step) for step in range(num_steps)]


@given(rates, steps)
def test_constant(rate, step):
    assert schedules.Constant(rate)(step) == rate


@given(st.lists(st.integers(0, 50), unique=True, max_size=5), st.data())
def test_each_stretch_ends_with_its_boundary(boundaries, data):
    boundaries.sort()
    values = data.draw(st.lists(rates, min_size=len(boundaries) + 1, max_size=len(boundaries) + 1))
    schedule = schedules.PiecewiseConstantDecay(boundaries, values)
    for boundary, before, after in zip(boundaries, values, values[1:], strict=False):
        assert schedule(boundary) == before
        assert schedule(boundary + 1) == after or boundary + 1 in boundaries
    assert schedule(max(boundaries, default=0) + 1000) == values[-1]
    assert set(curve(schedule, 60)) <= set(values)


@given(rates, lengths, st.floats(0.01, 1), st.booleans())
def test_exponential_decay_falls_by_its_rate(rate, decay_steps, decay_rate, staircase):
    schedule = schedules.ExponentialDecay(rate, decay_steps, decay_rate, staircase)
    values = curve(schedule, 3 * decay_steps + 1)
    assert values[0] == rate
    assert all(later <= earlier for earlier, later in itertools.pairwise(values))
    for cycle in range(4):
        expected = rate * decay_rate**cycle
        assert values[cycle * decay_steps] == pytest.approx(expected, rel=1e-12)
    if staircase:
        assert len(set(values[:decay_steps])) == 1


@given(rates, lengths, shares)
def test_cosine_decay_falls_to_its_floor_and_stays(rate, decay_steps, alpha):
    schedule = schedules.CosineDecay(rate, decay_steps, alpha)
    values = curve(schedule, decay_steps + 10)
    assert values[0] == pytest.approx(rate, rel=1e-12)
    assert all(later <= earlier for earlier, later in itertools.pairwise(values))
    assert set(values[decay_steps:]) == {rate * alpha}
    middle = rate * (1 + alpha) / 2
    if decay_steps % 2 == 0:
        assert values[decay_steps // 2] == pytest.approx(middle, rel=1e-12)


@given(rates, rates, lengths, lengths, shares)
def test_warm_up_rises_in_a_line_and_meets_the_fall(start, peak, warmup_steps, decay_steps, alpha):
    schedule = schedules.CosineDecay(start, decay_steps, alpha, peak, warmup_steps)
    without = schedules.CosineDecay(peak, decay_steps, alpha)
    values = curve(schedule, warmup_steps + decay_steps + 10)
    line = np.linspace(start, peak, warmup_steps + 1)
    assert_allclose(values[: warmup_steps + 1], line, rtol=1e-9)
    assert values[warmup_steps:] == curve(without, decay_steps + 10)
    jumps = np.abs(np.diff(values))
    slope = max(abs(peak - start) / warmup_steps, peak * (1 - alpha) * math.pi / 2 / decay_steps)
    assert jumps.max() <= slope * (1 + 1e-9) + 1e-12 * max(start, peak)


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (lambda: schedules.Constant(-0.1), ValueError, "learning_rate must be at least 0"),
        (lambda: schedules.Constant(math.nan), ValueError, "learning_rate must be finite"),
        (lambda: schedules.Constant("0.1"), TypeError, "learning_rate must be a number.*str"),
        (
            lambda: schedules.PiecewiseConstantDecay([10], [0.1]),
            ValueError,
            "1 values and 1 boundaries",
        ),
        (
            lambda: schedules.PiecewiseConstantDecay([10, 10], [3, 2, 1]),
            ValueError,
            r"rise.*\(10, 10\)",
        ),
        (lambda: schedules.PiecewiseConstantDecay([-1], [2, 1]), ValueError, "rise from 0"),
        (lambda: schedules.PiecewiseConstantDecay([1.5], [2, 1]), TypeError, "boundary.*integer"),
        (lambda: schedules.PiecewiseConstantDecay([1], [2, -1]), ValueError, "values must be"),
        (lambda: schedules.ExponentialDecay(0.1, 0, 0.5), ValueError, "decay_steps.*least 1.*0"),
        (lambda: schedules.ExponentialDecay(0.1, 1.0, 0.5), TypeError, "decay_steps.*float"),
        (lambda: schedules.ExponentialDecay(0.1, 10, 0), ValueError, r"decay_rate.*\(0, 1\]"),
        (lambda: schedules.ExponentialDecay(0.1, 10, 1.5), ValueError, r"decay_rate.*\(0, 1\]"),
        (lambda: schedules.CosineDecay(0.1, 10, alpha=1.1), ValueError, r"alpha.*\[0, 1\]"),
        (lambda: schedules.CosineDecay(0.1, 10, warmup_steps=5), ValueError, "needs both"),
        (lambda: schedules.CosineDecay(0.1, 10, warmup_target=1.0), ValueError, "needs both"),
        (lambda: schedules.CosineDecay(0.1, 10, 0, 1.0, -1), ValueError, "warmup_steps.*least 0"),
        (lambda: schedules.CosineDecay(0.1, 10, 0, -1.0, 1), ValueError, "warmup_target"),
        (lambda: schedules.Constant(0.1)(-1), ValueError, "from 0 on, not -1"),
        (lambda: schedules.Constant(0.1)(1.5), TypeError, "integer, not 1.5"),
    ],
)
def test_bad_parameters(bad, error, words):
    with pytest.raises(error, match=words):
        bad()


def test_a_schedule_is_known_by_its_repr():
    first = schedules.CosineDecay(1, np.int32(10), alpha=np.float64(0.5))
    assert (
        repr(first)
        == repr(schedules.CosineDecay(1.0, 10, 0.5))
        == (
            "CosineDecay(initial_learning_rate=1.0, decay_steps=10, alpha=0.5, warmup_target=None, "
            "warmup_steps=0)"
        )
    )
    assert first == schedules.CosineDecay(1.0, 10, 0.5) != schedules.CosineDecay(1.0, 11, 0.5)
    steps = schedules.PiecewiseConstantDecay([np.int64(5)], (1, np.float32(0.5)))
    assert repr(steps) == "PiecewiseConstantDecay(boundaries=(5,), values=(1.0, 0.5))"
    with pytest.raises(AttributeError):
        first.alpha = 0.1


def torch_rates(make, num_steps):
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    found = []
    with warnings.catch_warnings():
        # Inside SequentialLR torch warns about its own use of `step(epoch)`.
        warnings.simplefilter("ignore")
        schedule = make(torch.optim.lr_scheduler, optimizer)
        for _ in range(num_steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    return found


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (
            schedules.Constant(0.5),
            lambda torch, optimizer: torch.ConstantLR(optimizer, factor=1.0),
        ),
        (
            # torch's milestone is the first step of a stretch, a boundary the last one before.
            schedules.PiecewiseConstantDecay([4, 9], [0.5, 0.05, 0.005]),
            lambda torch, optimizer: torch.MultiStepLR(optimizer, [5, 10], gamma=0.1),
        ),
        (
            schedules.ExponentialDecay(0.5, 1, 0.9),
            lambda torch, optimizer: torch.ExponentialLR(optimizer, 0.9),
        ),
        (
            schedules.ExponentialDecay(0.5, 7, 0.3, staircase=True),
            lambda torch, optimizer: torch.StepLR(optimizer, 7, gamma=0.3),
        ),
        (
            schedules.CosineDecay(0.5, 29, alpha=0.2),
            lambda torch, optimizer: torch.CosineAnnealingLR(optimizer, 29, eta_min=0.1),
        ),
        (
            schedules.CosineDecay(0.05, 22, alpha=0.2, warmup_target=0.5, warmup_steps=8),
            lambda torch, optimizer: torch.SequentialLR(
                optimizer,
                [
                    torch.LinearLR(optimizer, start_factor=0.1, total_iters=8),
                    torch.CosineAnnealingLR(optimizer, 22, eta_min=0.1),
                ],
                milestones=[8],
            ),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rates_are_those_of_pytorch(schedule, make):
    assert_allclose(curve(schedule, 30), torch_rates(make, 30), rtol=1e-9)
