"""Parameters of optimizers: checked when they are given, and again when a program sets them."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.optimizers import SGD, Adam, LossScale


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: SGD("0.1"), TypeError, "SGD: learning_rate must be a number.*str"),
        (lambda: SGD([0.1]), TypeError, "learning_rate must be a number.*list"),
        (lambda: SGD(np.array([0.1, 0.2])), TypeError, "learning_rate must be a number"),
        (lambda: SGD(1j), TypeError, "learning_rate must be a number"),
        (lambda: SGD(np.nan), ValueError, "learning_rate must be finite, not nan"),
        (lambda: SGD(np.inf), ValueError, "learning_rate must be finite"),
        (lambda: SGD(-1), ValueError, "SGD: learning_rate must be at least 0, not -1.0"),
        (lambda: SGD(momentum=1.0), ValueError, r"SGD: momentum must be in \[0, 1\), not 1.0"),
        (lambda: SGD(nesterov=True), ValueError, "nesterov=True needs a momentum above 0"),
        (lambda: SGD(momentum=None), TypeError, "SGD: momentum must be a number"),
        (lambda: SGD(weight_decay="1"), TypeError, "weight_decay must be a number"),
        (lambda: SGD(weight_decay=np.inf), ValueError, "weight_decay must be finite"),
        (lambda: SGD(global_clipnorm=1j), TypeError, "global_clipnorm must be a number"),
        (lambda: SGD(global_clipnorm=np.nan), ValueError, "global_clipnorm must be above 0"),
        (lambda: SGD(global_clipnorm=-1), ValueError, "global_clipnorm must be above 0"),
        (lambda: SGD(global_clipnorm=0), ValueError, "global_clipnorm must be above 0, not 0"),
        (lambda: SGD(loss_scale=1024), TypeError, "loss_scale must be a LossScale, not 1024"),
        (lambda: Adam(beta_1=1.0), ValueError, r"Adam: beta_1 must be in \[0, 1\), not 1.0"),
        (lambda: Adam(epsilon=0), ValueError, "Adam: epsilon must be positive, not 0"),
        (lambda: Adam(weight_decay=-1), ValueError, "Adam: weight_decay must be at least 0"),
        (lambda: Adam(beta_1="0.9"), TypeError, "Adam: beta_1 must be a number"),
        (lambda: Adam(epsilon=np.inf), ValueError, "Adam: epsilon must be finite"),
        (lambda: LossScale(0.5), ValueError, "LossScale: initial_scale is 0.5, not at least 1"),
        (lambda: LossScale(np.inf), ValueError, "LossScale: initial_scale must be finite"),
        (lambda: LossScale(growth_interval=0), ValueError, "growth_interval is 0, not at least 1"),
        (lambda: LossScale(growth_factor=1.0), ValueError, "growth_factor is 1.0, not above 1"),
        (lambda: LossScale(backoff_factor=1.0), ValueError, "backoff_factor is 1.0, not in"),
        (lambda: LossScale("1"), TypeError, "LossScale: initial_scale must be a number"),
        (lambda: LossScale(growth_interval=2.5), TypeError, "growth_interval must be an integer"),
        (lambda: LossScale(growth_factor=None), TypeError, "growth_factor must be a number"),
        (lambda: LossScale(backoff_factor=np.nan), ValueError, "backoff_factor must be finite"),
    ],
)
def test_bad_ones_are_refused_in_words(strategy, size, make, error, text):
    with strategy.scope(), pytest.raises(error, match=text):
        make()
    assert strategy.reduce("sum", 1) == size, "the strategy stays usable"


def a_step(strategy, optimizer, variable):
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), variable)]))


@pytest.mark.parametrize("rate", [0.5, np.float32(0.5), np.array(0.5), lambda step: 0.5])
def test_a_learning_rate_is_any_number_or_a_function(strategy, size, rate):
    with strategy.scope():
        variable, optimizer = ms.Variable(np.zeros(2)), SGD(rate)
    a_step(strategy, optimizer, variable)
    assert variable.numpy().tolist() == [-0.5 * size] * 2


def test_a_learning_rate_may_be_a_variable(strategy, size):
    with strategy.scope():
        variable, rate = ms.Variable(np.zeros(2)), ms.Variable(0.5, trainable=False)
        optimizer = SGD(rate)
    a_step(strategy, optimizer, variable)
    rate.assign(0.25)
    a_step(strategy, optimizer, variable)
    assert variable.numpy().tolist() == [-0.75 * size] * 2


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ("0.1", TypeError, "must be a number, not '0.1'"),
        (None, TypeError, "must be a number"),
        (np.array([0.1]), TypeError, "must be a number"),
        (np.nan, ValueError, "must be finite"),
        (-0.1, ValueError, "at least 0"),
    ],
)
def test_a_function_that_gives_no_rate_changes_nothing(strategy, size, value, error, text):
    with strategy.scope():
        variable, optimizer = ms.Variable(np.zeros(2)), SGD(lambda step: value)
    with pytest.raises(error, match=rf"SGD: learning_rate\(0\).*{text}"):
        a_step(strategy, optimizer, variable)
    assert optimizer.iterations.numpy() == 0
    assert variable.numpy().tolist() == [0, 0]


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.5), (0.5, 0.0)])
def test_a_momentum_that_comes_or_goes(strategy, size, before, after):
    with strategy.scope():
        variable, optimizer = ms.Variable(np.zeros(2)), SGD(1.0, before)
    a_step(strategy, optimizer, variable)
    optimizer.momentum = after
    a_step(strategy, optimizer, variable)
    assert variable.numpy().tolist() == [-2.0 * size] * 2
    optimizer.momentum = 0.5
    a_step(strategy, optimizer, variable)
    velocity = 0.5 * size + size  # the velocity is that of the only step with momentum before
    assert variable.numpy().tolist() == [-2.0 * size - velocity] * 2


@pytest.mark.parametrize("in_run", [True, False])
@pytest.mark.parametrize(
    ("name", "value"),
    [("momentum", 0.5), ("weight_decay", 0.5), ("global_clipnorm", 1e-3), ("nesterov", True)],
)
def test_one_that_is_set_on_one_rank_alone_is_noticed(strategy, others, name, value, in_run):
    with strategy.scope():
        variable, optimizer = ms.Variable(np.zeros(2)), SGD(0.1, momentum=0.25)
    if not others:
        setattr(optimizer, name, value)
    step = lambda: optimizer.apply_gradients([(np.ones(2), variable)])  # noqa: E731
    with pytest.raises(ms.errors.CollectiveMismatchError, match=name):
        strategy.run(step) if in_run else step()
    assert variable.numpy().tolist() == [0, 0]


def test_a_bad_one_that_is_set_later_changes_nothing(strategy, size):
    with strategy.scope():
        variable, optimizer = ms.Variable(np.zeros(2)), SGD(0.1)
    optimizer.weight_decay = -1
    with pytest.raises(ValueError, match="weight_decay must be at least 0"):
        a_step(strategy, optimizer, variable)
    assert optimizer.iterations.numpy() == 0
    assert variable.numpy().tolist() == [0, 0]


def test_a_shorter_interval_than_the_checkpoint_s_still_grows(strategy, mpi_tmp_path):
    def make(interval):
        with strategy.scope():
            scale = LossScale(4.0, growth_interval=interval)
            return ms.Variable(np.zeros(2), name="w"), SGD(0.1, loss_scale=scale), scale

    variable, optimizer, _ = make(10)
    for _ in range(3):
        a_step(strategy, optimizer, variable)
    ms.Checkpoint(w=variable, optimizer=optimizer).write(mpi_tmp_path / "run.h5")
    variable, optimizer, scale = make(2)
    ms.Checkpoint(w=variable, optimizer=optimizer).restore(mpi_tmp_path / "run.h5")
    a_step(strategy, optimizer, variable)
    assert scale.value == 8
