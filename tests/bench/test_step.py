"""The loops that `benchmarks/step.py` compares learn the same, and what the job learns."""

import importlib.util

import numpy as np
import pytest

import mpistrat as ms
from benchmarks import small_network as networks
from benchmarks.small_network import random_batch
from benchmarks.step import HandwrittenLoop, PackageLoop
from tests import ROOT

NUM_STEPS = 4


@pytest.fixture(params=[False, True], ids=["each", "packed"])
def by_hand(request, rank, size):
    from mpistrat.mpi.world import open_world

    loop = HandwrittenLoop(open_world(None).comm, random_batch(rank, size), request.param)
    for _ in range(NUM_STEPS):
        loop.step()
    return loop


def assert_same(loop, other):
    for one, two in zip(loop.weights(), other.weights(), strict=True):
        assert one.dtype == two.dtype == np.float32
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def test_by_hand_the_loss_falls(by_hand, rank, size):
    first = networks.cross_entropy(
        networks.forward(networks.first_weights(), random_batch(0, 1).image)[0],
        random_batch(0, 1).label,
    )[0]
    batch = random_batch(rank, size)
    last = networks.cross_entropy(networks.forward(by_hand.weights(), batch.image)[0], batch.label)[
        0
    ]
    assert last.mean() < first.mean()
    assert by_hand.num_examples == NUM_STEPS * len(batch.label)
    assert 0 <= by_hand.num_correct <= by_hand.num_examples


def test_the_package_learns_the_same(strategy, by_hand, rank, size):
    loop = PackageLoop(strategy, random_batch(rank, size))
    for _ in range(NUM_STEPS):
        loop.step()
    assert_same(loop, by_hand)


@pytest.mark.thorough
def test_ddp_learns_the_same(strategy, by_hand, rank, size):
    pytest.importorskip("torch")
    from benchmarks.step import DdpLoop, open_ddp_loop

    collectives = strategy.extended._collectives
    loop = open_ddp_loop(collectives, "127.0.0.1", size, random_batch(rank, size))
    assert isinstance(loop, DdpLoop), loop
    try:
        for _ in range(NUM_STEPS):
            loop.step()
        assert_same(loop, by_hand)
        assert loop.num_examples == by_hand.num_examples
        assert loop.num_correct == by_hand.num_correct
        assert loop.loss_sum == pytest.approx(by_hand.loss_sum, rel=1e-4)
    finally:
        loop.close()


def test_the_parts_make_up_one_batch(size):
    parts = [random_batch(each, size) for each in range(size)]
    whole = random_batch(0, 1)
    np.testing.assert_array_equal(np.concatenate([part.image for part in parts]), whole.image)
    np.testing.assert_array_equal(np.concatenate([part.label for part in parts]), whole.label)
    assert {part.global_size for part in parts} == {len(whole.label)}


def test_the_network_is_that_of_the_job(strategy, rank, size):
    path = ROOT / "jobs" / "train_digits.py"
    spec = importlib.util.spec_from_file_location("train_digits", path)
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    assert job.LAYER_SIZES == networks.LAYER_SIZES
    batch = random_batch(rank, size)
    with strategy.scope():
        layers = job.make_layers(0)
    weights = networks.first_weights()

    def gradients():
        logits, tape = job.forward(np, layers, batch.image, training=True)
        _, error = job.cross_entropy(np, logits, batch.label)
        pairs = job.backward(layers, tape, error)
        return {variable.name.partition(":")[0]: gradient for gradient, variable in pairs}

    of_job = strategy.experimental_local_results(strategy.run(gradients))[0]
    logits, tape = networks.forward(weights, batch.image)
    ours = networks.backward(weights, tape, networks.cross_entropy(logits, batch.label)[1])
    for k, layer in enumerate(layers):
        for part, name in enumerate(("kernel", "bias")):
            np.testing.assert_array_equal(layer[name].value(), weights[2 * k + part])
            np.testing.assert_allclose(of_job[f"layer{k}/{name}"], ours[2 * k + part], rtol=1e-5)


def test_what_moved_an_array_is_read_from_the_call(strategy, rank):
    from mpistrat.bench.measure import facts_of_last_collective
    from mpistrat.tracing import spans

    before = spans.active()

    def reduce():
        return ms.get_replica_context().all_reduce("sum", np.full(10, rank, np.float32))

    facts = facts_of_last_collective(lambda: strategy.run(reduce))
    assert spans.active() is before
    assert facts["implementation"]
    assert set(facts) <= {"implementation", "why"}
    assert facts_of_last_collective(lambda: None) == {}
