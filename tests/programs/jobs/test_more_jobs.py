"""The jobs beside train_digits.py, in small: what they find, and that any number of ranks does."""

import contextlib
import re
import runpy

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import launch
from tests import ROOT

pytestmark = pytest.mark.launches


def run_job(name, *options, ranks=2, **env):
    """Run a job, which must succeed, and return what it prints."""
    done = launch.run([ROOT / "jobs" / name, *map(str, options), "--device", "cpu"], ranks, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def last_number(text):
    return float(re.search(r": (\S+)\n*$", text)[1])


def variable(path, name):
    with h5py.File(path) as file:
        return file[f"variables/{name}"][()]


class TestKmeans:
    def centres(self, folder):
        last = max(folder.iterdir(), key=lambda path: int(path.stem.split("-")[1]))
        found = variable(last, "centres")
        return found[np.lexsort(found.T)]

    def test_it_finds_the_groups_and_goes_on(self, tmp_path):
        data, output = tmp_path / "new" / "table.h5", tmp_path / "runs"
        options = ("--data", data, "--output", output)
        assert run_job("kmeans.py", *options, "--iterations", 1, ranks=3).count("iteration ") == 1
        resumed = run_job("kmeans.py", *options, ranks=2)
        assert f"resumes from {output}/checkpoint-1.h5" in resumed
        assert "iteration 1," not in resumed
        with h5py.File(data) as file:
            points, middles = file["points"][:].astype(float), file["middles"][:]
        found = self.centres(output)
        np.testing.assert_allclose(found, middles[np.lexsort(middles.T)], atol=0.1)
        squares = ((points[:, None] - found) ** 2).sum(axis=2).min(axis=1)
        assert last_number(resumed) == pytest.approx(squares.mean(), rel=1e-5)

    def test_clusters_without_points_begin_again(self, tmp_path):
        # The first rows, which begin as centres, are all the same.
        data = tmp_path / "table.h5"
        corners = np.array([[0, 0], [0, 0], [0, 0], [0, 8], [8, 0], [0, 8], [8, 0]], float)
        with h5py.File(data, "w") as file:
            file["points"] = corners
        options = ("--data", data, "--clusters", 3, "--init", "first")
        for ranks in (1, 3):
            text = run_job("kmeans.py", *options, "--output", tmp_path / str(ranks), ranks=ranks)
            assert last_number(text) == 0
            np.testing.assert_allclose(
                self.centres(tmp_path / str(ranks)), [[0, 0], [8, 0], [0, 8]], atol=1e-12
            )


class TestLogisticRegression:
    def optimum(self, folder, l2):
        """Return the best weights, with the bias last, by Newton's method."""
        parts = sorted(folder.glob("part-*.h5"))
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(h5py.File(path)) for path in parts]
            x = np.concatenate([file["x"][:] for file in files]).astype(float)
            y = np.concatenate([file["y"][:] for file in files])
        x = np.c_[x, np.ones(len(x))]
        penalty = np.append(np.full(x.shape[1] - 1, l2), 0)
        weight = np.zeros(x.shape[1])
        for _ in range(20):
            p = 1 / (1 + np.exp(-x @ weight))
            hessian = (x.T * (p * (1 - p))) @ x / len(x) + np.diag(penalty)
            weight -= np.linalg.solve(hessian, x.T @ (p - y) / len(x) + penalty * weight)
        return weight

    def fitted(self, folder):
        last = max(folder.iterdir(), key=lambda path: int(path.stem.split("-")[1]))
        names = ("weight", "bias")
        return np.concatenate([np.atleast_1d(variable(last, name)) for name in names])

    def test_it_fits_and_resumes_within_an_epoch(self, tmp_path):
        data = tmp_path / "new" / "clicks"
        options = ("--data", data, "--l2", 0.01, "--epochs", 3, "--batch-size", 350)
        command = [ROOT / "jobs" / "logistic_regression.py", *map(str, options)]
        command += ["--output", tmp_path / "a", "--device", "cpu"]
        stopped = launch.run([*command, "--max-steps", "50"], 2)  # in the second epoch
        assert stopped.returncode == 75, stopped.stderr
        resumed = run_job(*command[0].parts[-1:], *options, "--output", tmp_path / "a", ranks=3)
        assert "resumes from" in resumed
        whole = run_job("logistic_regression.py", *options, "--output", tmp_path / "b", ranks=1)
        np.testing.assert_allclose(
            self.fitted(tmp_path / "a"), self.fitted(tmp_path / "b"), rtol=1e-3, atol=1e-4
        )
        assert last_number(resumed) == pytest.approx(last_number(whole), abs=1e-3)
        assert last_number(whole) > 0.85

    @pytest.mark.slow
    def test_files_of_their_own_give_the_same_fit(self, tmp_path):
        data, output = tmp_path / "clicks", tmp_path / "runs"
        options = ("--data", data, "--output", output, "--l2", 0.01, "--policy", "file")
        run_job("logistic_regression.py", *options, ranks=3)
        np.testing.assert_allclose(self.fitted(output), self.optimum(data, 0.01), atol=0.03)


class TestHeatInverse:
    def test_the_adjoint_is_the_gradient(self):
        job = runpy.run_path(ROOT / "jobs" / "heat_inverse.py")
        rng = np.random.default_rng(0)
        size, steps = job["SIZE"], job["NUM_STEPS"]
        value, direction = rng.normal(0, 0.3, (2, size, size))
        heater = rng.random((3, size, size))
        measured = rng.random((3, steps, size // 2, size // 2))

        def misfit(shift):
            return job["misfit_and_gradient"](np, value + shift * direction, heater, measured)

        slope = (misfit(0)[1] * direction).sum()
        differences = (misfit(1e-5)[0] - misfit(-1e-5)[0]) / 2e-5
        assert slope == pytest.approx(differences, rel=1e-6)
        none = job["misfit_and_gradient"](np, value, heater[:0], measured[:0])
        assert none[0] == 0
        assert not none[1].any()

    def test_it_finds_the_inclusions_and_goes_on(self, tmp_path):
        data = tmp_path / "new" / "plate.h5"
        options = ("--data", data, "--output")
        for ranks in (1, 3):
            folder = tmp_path / str(ranks)
            run_job("heat_inverse.py", *options, folder, "--iterations", 20, ranks=ranks)
        fields = [variable(tmp_path / n / "checkpoint-20.h5", "log_conductivity") for n in "13"]
        np.testing.assert_allclose(*fields, atol=1e-8)
        resumed = run_job("heat_inverse.py", *options, tmp_path / "3", "--iterations", 40)
        assert "resumes from" in resumed
        assert "iteration 20," not in resumed
        with h5py.File(data) as file:
            truth = file["log_conductivity"][:]
        found = variable(tmp_path / "3" / "checkpoint-40.h5", "log_conductivity")
        errors = [np.linalg.norm(field - truth) for field in (fields[0], found)]
        assert errors[1] < 0.2 * np.linalg.norm(truth)
        assert errors[1] < 0.5 * errors[0]


def test_inference_writes_the_same_on_any_number_of_ranks(tmp_path):
    data = tmp_path / "new" / "spots.h5"
    found = []
    for ranks in (1, 3):
        output = tmp_path / "runs" / f"{ranks}.h5"
        run_job("infer.py", "--data", data, "--output", output, ranks=ranks)
        with h5py.File(output) as file:
            found.append({name: file[name][:] for name in file})
    for name, values in found[0].items():
        assert values.tobytes() == found[1][name].tobytes()
    with h5py.File(data) as file:
        np.testing.assert_array_equal(found[0]["count"], file["count"][:])
    spots = found[0]["spot"]
    assert len(spots) == found[0]["count"].sum()
    on_grid = np.abs(spots[:, :2] - 8 * np.round(spots[:, :2] / 8)) <= 1
    assert on_grid.all()
    assert sorted(path.name for path in output.parent.iterdir()) == ["1.h5", "3.h5"]


class TestTensorParallel:
    def serial(self, data, num_hidden, batch_size, num_epochs):
        """Return the weights of the whole network, trained by NumPy alone."""
        rng = np.random.default_rng(0)
        first = (rng.standard_normal((64, num_hidden)) / 8).astype(np.float32)
        second = rng.standard_normal((num_hidden, 10)) / np.sqrt(num_hidden)
        values = [first, np.zeros(num_hidden), second.astype(np.float32), np.zeros(10)]
        values = [each.astype(float) for each in values]
        momenta = [np.zeros_like(each) for each in values]
        fields = ("train/image", "train/label")
        dataset = ms.data.Dataset.from_hdf5(data, fields=fields).shuffle(seed=0).batch(batch_size)
        batches = (batch for number in range(num_epochs) for batch in passes(dataset, number))
        for image, label in batches:
            w1, b1, w2, b2 = values
            x = image.reshape(-1, 64) / 16
            hidden = np.tanh(x @ w1 + b1)
            odds = np.exp(hidden @ w2 + b2)
            error = (odds / odds.sum(axis=1, keepdims=True) - np.eye(10)[label]) / len(x)
            inner = (error @ w2.T) * (1 - hidden**2)
            gradients = [x.T @ inner, inner.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
            for value, gradient, momentum in zip(values, gradients, momenta, strict=True):
                momentum *= 0.9
                momentum -= 0.1 * gradient
                value += momentum
        return values

    def test_any_division_learns_what_the_whole_network_does(self, digits, tmp_path):
        expected = self.serial(digits, num_hidden=33, batch_size=300, num_epochs=2)
        output = tmp_path / "model.h5"
        options = ("--data", digits, "--output", output, "--hidden", 33, "--batch-size", 300)
        for ranks, per_replica in ((1, 1), (2, 1), (2, 2), (4, 2)):
            text = run_job(
                "tensor_parallel.py",
                *options,
                "--epochs",
                2,
                "--ranks-per-replica",
                per_replica,
                ranks=ranks,
            )
            assert text.count("epoch ") == 2
            assert 0.5 < last_number(text) < 2
            names = ("first", "first_bias", "second", "second_bias")
            for name, value in zip(names, expected, strict=True):
                found = variable(output, f"model/{name}")
                np.testing.assert_allclose(found, value, atol=1e-4, err_msg=name)


def passes(dataset, number):
    """Return the batches of one pass of a shuffled data set."""
    strategy = ms.OneDeviceStrategy()
    batches = strategy.experimental_distribute_dataset(dataset)
    for _ in range(number):
        next(iter(batches))
    return [tuple(each.values[0] for each in batch) for batch in batches]


class TestEmbedding:
    def run(self, tmp_path, output, rows, ranks, epochs):
        # Tables of 192,000 and 32,000 bytes: to bring the first one to a rank is an error.
        options = ("--data", tmp_path / "ratings.h5", "--output", tmp_path / output)
        options += ("--rows-per-rank", rows, "--epochs", epochs)
        return run_job("embedding.py", *options, ranks=ranks, MPISTRAT_GATHER_LIMIT="100000")

    def test_tables_that_no_rank_holds_go_on_at_another_number_of_ranks(self, tmp_path):
        first = self.run(tmp_path, "runs", 1500, 2, 2)
        assert "3000 users, at most 1500 of them on one rank" in first
        resumed = self.run(tmp_path, "runs", 1000, 3, 4)
        assert "at most 1000 of them" in resumed
        assert f"resumes from {tmp_path}/runs/checkpoint-2.h5" in resumed
        assert "epoch 2," not in resumed
        straight = self.run(tmp_path, "straight", 750, 4, 4)
        assert "at most 750 of them" in straight
        assert last_number(resumed) == pytest.approx(last_number(straight), abs=1e-3)
        assert last_number(straight) < 0.25  # 0.51 for a guess of 0
        for name in ("users", "items"):
            tables = [
                variable(tmp_path / output / "checkpoint-4.h5", name)
                for output in ("runs", "straight")
            ]
            assert tables[0].shape == ({"users": 3000, "items": 500}[name], 16)
            np.testing.assert_allclose(*tables, atol=1e-3)

    def test_too_few_ranks_are_refused(self, tmp_path):
        options = ["--data", tmp_path / "ratings.h5", "--rows-per-rank", "1000", "--device", "cpu"]
        done = launch.run([ROOT / "jobs" / "embedding.py", *map(str, options)], 2)
        assert done.returncode == 1
        assert "3000 rows need 3 ranks of 1000 rows, but there are 2" in done.stderr


class TestTrainOnGroups:
    def figures(self, text):
        """Return the number of each epoch that is told, its loss and its accuracy."""
        lines = re.findall(r"epoch (\d+), loss: (\S+), test accuracy: (\S+)\n", text)
        return {int(epoch): (float(loss), float(found)) for epoch, loss, found in lines}

    def test_any_number_of_ranks_learns_the_same_and_goes_on(self, tmp_path):
        data = tmp_path / "new" / "groups.h5"

        def train(output, epochs, ranks):
            options = ("--data", data, "--output", tmp_path / output, "--epochs", epochs)
            return run_job("train_on_groups.py", *options, ranks=ranks)

        whole = train("one", 8, ranks=1)
        assert last_number(whole) >= 0.95
        assert "1560 images, 60 to 182 of a digit" in whole
        first, resumed = train("some", 3, ranks=3), train("some", 8, ranks=2)
        assert f"resumes from {tmp_path}/some/checkpoint-3.h5" in resumed
        again = self.figures(first) | self.figures(resumed)
        assert list(again) == list(range(1, 9))
        assert [*self.figures(first), *self.figures(resumed)] == list(again)
        np.testing.assert_allclose(
            list(again.values()), list(self.figures(whole).values()), rtol=1e-4
        )
        assert last_number(resumed) == last_number(whole)

    def test_the_file_has_a_group_with_a_label_for_each_image(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(ROOT / "jobs")  # where it finds the network
        job = runpy.run_path(ROOT / "jobs" / "train_on_groups.py")
        path = tmp_path / "groups.h5"
        job["make_groups"](path)
        labels = job["read_labels"](path)
        rare = np.isin(labels, job["RARE"])
        assert np.bincount(labels[rare])[list(job["RARE"])].tolist() == [job["KEPT"]] * 2
        with h5py.File(path) as file:
            assert len(file["digits"]) == len(labels)
            lengths = {len(group["png"]) for group in file["digits"].values()}
            group = file["digits/digit_7"]
            image, label = job["decode"](group["png"][()], group.attrs["label"])
        assert len(lengths) > 1
        assert image.shape == (8, 8)
        assert label == labels[7]
        assert image.max() <= 16
        # No example is in both parts, and all digits are drawn about equally often.
        train, test = job["open_data"](path, labels, 64, None)
        seen = np.concatenate([label for _, label in train])
        shares = np.bincount(seen) / len(seen)
        assert shares.min() > 0.07
        assert shares.max() < 0.13
        assert len(seen) + sum(len(label) for _, label in test) == len(labels)
