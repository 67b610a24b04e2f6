"""torchmetrics and torchdata on a process group: each rank has a part, all get the whole."""

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

import mpistrat as ms
import mpistrat.torch as mst

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


def predictions(rank, num_examples=6):
    """Return what a rank predicts of three classes, and the labels."""
    generator = torch.Generator().manual_seed(rank)
    logits = torch.randn(num_examples, 3, generator=generator)
    return logits, torch.randint(3, (num_examples,), generator=generator)


@pytest.fixture
def torchmetrics():
    return pytest.importorskip("torchmetrics")


class TestTorchmetrics:
    @pytest.mark.parametrize(
        "name", ["MulticlassAccuracy", "MulticlassConfusionMatrix", "MulticlassAUROC"]
    )
    def test_classification(self, name, rank, size, torchmetrics):
        # Sums of counts; a matrix; lists of all predictions, of another length on each rank.
        made = getattr(torchmetrics.classification, name)
        metric, alone = made(3), made(3, sync_on_compute=False)
        metric.update(*predictions(rank, 6 + rank))
        for each in range(size):
            alone.update(*predictions(each, 6 + each))
        torch.testing.assert_close(metric.compute(), alone.compute())

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("SumMetric", sum),
            ("MeanMetric", lambda values: sum(values) / len(values)),
            ("MaxMetric", max),
            ("MinMetric", min),
        ],
    )
    def test_aggregation(self, name, expected, rank, size, torchmetrics):
        metric = getattr(torchmetrics, name)()
        metric.update(float(rank))
        assert float(metric.compute()) == expected(range(size))
        # What a rank has is its own again after the reduction.
        metric.update(float(rank))
        assert float(metric.compute()) == expected([*range(size), *range(size)])

    def test_concatenation_of_unequal_lengths(self, rank, size, torchmetrics):
        metric = torchmetrics.CatMetric()
        metric.update(torch.full((rank + 1,), float(rank)))
        expected = [float(each) for each in range(size) for _ in range(each + 1)]
        assert metric.compute().reshape(-1).tolist() == expected

    def test_states_that_are_neither_sums_nor_lists(self, rank, size, torchmetrics):
        def values(each):
            return torch.randn(2, 20, generator=torch.Generator().manual_seed(each))

        made = torchmetrics.PearsonCorrCoef
        metric, alone = made(), made(sync_on_compute=False)
        metric.update(*values(rank))
        alone.update(*torch.cat([values(each) for each in range(size)], dim=1))
        torch.testing.assert_close(metric.compute(), alone.compute())

    def test_a_value_of_each_step(self, rank, size, torchmetrics):
        metric = torchmetrics.MeanMetric(dist_sync_on_step=True)
        for step in range(3):
            assert float(metric(float(rank + step))) == step + (size - 1) / 2

    def test_a_collection(self, rank, size, torchmetrics):
        made = {"mean": torchmetrics.MeanMetric(), "max": torchmetrics.MaxMetric()}
        metrics = torchmetrics.MetricCollection(made)
        metrics.update(float(rank))
        found = {name: float(value) for name, value in metrics.compute().items()}
        assert found == {"mean": (size - 1) / 2, "max": size - 1}

    def test_a_metric_is_saved_as_a_module(self, rank, size, torchmetrics, shared_tmp_path):
        metric, other = (torchmetrics.MeanMetric() for _ in range(2))
        for each in (metric, other):
            each.persistent(True)
        metric.update(3.0)
        ms.Checkpoint(metric=metric).write(shared_tmp_path / "metric.h5")
        ms.Checkpoint(metric=other).restore(shared_tmp_path / "metric.h5").assert_consumed()
        assert float(other.mean_value) == 3


def stateful_loader(rank, size):
    """Return a loader of torchdata over this rank's part of some numbers, in batches of two."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    numbers = TensorDataset(torch.arange(8 * size))
    sampler = DistributedSampler(numbers, size, rank, shuffle=True, seed=5)
    return torchdata.StatefulDataLoader(numbers, batch_size=2, sampler=sampler)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_stateful_loader_resumes_on_each_rank(rank, size):
    whole = [batch.tolist() for (batch,) in stateful_loader(rank, size)]
    loader = stateful_loader(rank, size)
    seen = iter(loader)
    assert next(seen)[0].tolist() == whole[0]
    state = loader.state_dict()
    resumed = stateful_loader(rank, size)
    resumed.load_state_dict(state)
    assert [batch.tolist() for (batch,) in resumed] == whole[1:]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_stateful_loader_over_hdf5_resumes_from_a_checkpoint(rank, size, shared_tmp_path):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def made():
        numbers = ms.data.Dataset.range(12 * size).shuffle(seed=1).batch(2 * size)
        return torchdata.StatefulDataLoader(mst.HDF5Dataset(numbers), batch_size=None)

    whole = [batch.tolist() for batch in made()]
    loader = made()
    seen = iter(loader)
    assert [next(seen).tolist() for _ in range(2)] == whole[:2]
    ms.Checkpoint(loader=loader).write(shared_tmp_path / "loader.h5")
    resumed = made()
    ms.Checkpoint(loader=resumed).restore(shared_tmp_path / "loader.h5").assert_consumed()
    assert [batch.tolist() for batch in resumed] == whole[2:]
