"""Saving before the job is taken away."""

import contextlib
import json
import os
import re
import signal
import threading
import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import launch


@pytest.fixture
def manager(strategy, mpi_tmp_path):
    with strategy.scope():
        weight = ms.Variable(np.zeros(3), name="weight")
    return ms.CheckpointManager(ms.Checkpoint(weight=weight), mpi_tmp_path, asynchronous=True)


@pytest.fixture
def make(manager):
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    made = []

    def make(**arguments):
        made.append(ms.PreemptionCheckpointHandler(manager, **arguments))
        return made[-1]

    yield make
    for each in reversed(made):
        each.close()
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == before


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_saves_on_all_at_the_same_step(manager, make, rank, size, number):
    handler = make()
    saved_at = None
    for step in range(5):
        if step == 2 and rank == size - 1:
            os.kill(os.getpid(), number)
        if handler.save_checkpoint_if_preempted():
            saved_at = step
            break
    assert saved_at == 2
    assert [os.path.basename(path) for path in manager.checkpoints] == ["checkpoint-1.h5"]
    assert os.path.exists(manager.latest_checkpoint)
    os.kill(os.getpid(), number)  # disturbs nobody any more
    assert handler.save_checkpoint_if_preempted()
    assert len(manager.checkpoints) == 1


@pytest.mark.mpi
def test_the_end_of_the_job_is_known_from_slurm(manager, make, monkeypatch, rank, size):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert not make(walltime_margin_s=1e9).save_checkpoint_if_preempted()
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    assert not make(walltime_margin_s=900).save_checkpoint_if_preempted()
    assert not make().save_checkpoint_if_preempted()
    # One rank's clock is ahead.
    ahead = 0 if rank < size - 1 else 200
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000 - ahead))
    assert make(walltime_margin_s=900).save_checkpoint_if_preempted()
    assert len(manager.checkpoints) == 1


@pytest.mark.mpi
def test_a_slurm_job_without_a_known_end_is_named(make, monkeypatch, caplog, rank):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    make()
    assert not caplog.records
    make(walltime_margin_s=60)
    assert len(caplog.records) == (rank == 0)
    assert all("SLURM_JOB_END_TIME" in each.message for each in caplog.records)


@pytest.mark.mpi
def test_a_save_that_fails_is_tried_again(manager, make, monkeypatch, rank):
    handler = make()
    os.kill(os.getpid(), signal.SIGUSR1)
    with monkeypatch.context() as patch:
        patch.setattr(manager, "_directory", os.devnull)
        with pytest.raises(ms.errors.CheckpointError):
            handler.save_checkpoint_if_preempted()
    assert handler.save_checkpoint_if_preempted()
    assert os.path.exists(manager.latest_checkpoint)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"signals": "TERM"}, TypeError),
        ({"signals": [1.5]}, TypeError),
        ({"signals": [12345]}, ValueError),
        ({"signals": [signal.SIGKILL]}, ValueError),
        ({"walltime_margin_s": 0}, ValueError),
        ({"walltime_margin_s": "60"}, TypeError),
    ],
)
def test_bad_arguments_are_refused_on_every_rank(make, rank, size, arguments, error):
    with pytest.raises(error):
        make(**arguments)
    assert not make().save_checkpoint_if_preempted()


@pytest.mark.mpi
def test_it_is_made_in_the_main_thread(manager):
    raised = []

    def make():
        try:
            ms.PreemptionCheckpointHandler(manager)
        except ValueError as error:
            raised.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in raised[0]
    with pytest.raises(TypeError, match="needs a CheckpointManager"):
        ms.PreemptionCheckpointHandler(None)


class Startled:
    """An object whose state takes so long that signals come to this process meanwhile."""

    def __init__(self, signals):
        self.signals = signals
        self.value = 0

    def state_dict(self):
        self._startle()
        return {"value": self.value}

    def load_state_dict(self, state):
        self._startle()
        self.value = state["value"]

    def _startle(self):
        for number in self.signals:
            os.kill(os.getpid(), number)


@pytest.mark.mpi
@pytest.mark.parametrize("asynchronous", [False, True])
def test_signals_while_a_file_is_written_or_read(strategy, mpi_tmp_path, rank, size, asynchronous):
    startled = Startled([])
    with strategy.scope():
        step = ms.Variable(np.int64(0), name="step")
        weight = ms.Variable(np.zeros(3), name="weight")
    manager = ms.CheckpointManager(
        ms.Checkpoint(step=step, startled=startled, weight=weight), mpi_tmp_path,
        step_counter=step, asynchronous=asynchronous,
    )  # fmt: skip

    def go_on(number):
        with strategy.scope():
            step.assign(np.int64(number))
            weight.assign(np.full(3, float(number)))
        startled.value = number

    def check(number):
        go_on(100)
        assert manager.restore_or_initialize() == manager.checkpoints[-1]
        assert (int(step.value()), startled.value) == (number, number)
        assert np.all(weight.value() == number)

    go_on(1)
    with ms.PreemptionCheckpointHandler(manager) as handler:
        startled.signals = [signal.SIGUSR1] if rank == size - 1 else []
        manager.save()  # is not disturbed, and what came meanwhile is not forgotten
        startled.signals = []
        go_on(2)
        assert handler.save_checkpoint_if_preempted()
        check(2)
    with ms.PreemptionCheckpointHandler(manager) as handler:
        startled.signals = [signal.SIGTERM] if rank == 0 else []
        check(2)
        go_on(3)
        # The first signal is followed by others on other ranks, while the file is written.
        startled.signals = [signal.SIGUSR1, signal.SIGTERM] if rank == size - 1 else []
        assert handler.save_checkpoint_if_preempted()
        go_on(4)
        assert handler.save_checkpoint_if_preempted()
        startled.signals = []
        check(3)
    assert [os.path.basename(path) for path in manager.checkpoints] == [
        f"checkpoint-{number}.h5" for number in (1, 2, 3)
    ]


TRAINS = """
import os, signal, sys, time
import mpistrat as ms

folder, mode = sys.argv[1:]
strategy = ms.MPIStrategy(device="cpu")
rank, size = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
dataset = ms.data.Dataset.range(1000).shuffle(seed=0).batch(10)
batches = strategy.experimental_distribute_dataset(dataset)
with strategy.scope():
    total = ms.metrics.Sum(name="total")
    step_counter = ms.Variable(0, dtype="int64", name="step")
manager = ms.CheckpointManager(
    ms.Checkpoint(total=total, batches=batches, step=step_counter), folder,
    step_counter=step_counter,
)
handler = ms.PreemptionCheckpointHandler(manager, walltime_margin_s=2)
if mode == "at once" and rank == size - 1:
    os.kill(os.getpid(), signal.SIGUSR1)
manager.restore_or_initialize()
print(f"pid {rank} {os.getpid()}\\n", end="", flush=True)
for batch in batches:
    # Each rank is somewhere else when it gets the signal.
    time.sleep(0.02 * (rank + 1) if mode == "paced" else 0)
    strategy.run(total.update_state, args=(batch,))
    step_counter.assign(step_counter.value() + 1)
    time.sleep(0.02 * (size - rank) if mode == "paced" else 0)
    if handler.save_checkpoint_if_preempted():
        print(f"saved at {int(step_counter.value())}\\n", end="", flush=True)
        sys.exit(handler.EXIT_CODE)
figures = [int(step_counter.value()), float(total.result())]
if rank == 0:
    print("done", figures, flush=True)
"""


@pytest.mark.quick("SIGTERM")
@pytest.mark.launches
@pytest.mark.parametrize(
    ("reason", "signalled"),
    [("got SIGTERM", 1), ("got SIGUSR1", 2), ("the end of the job is near", None)],
    ids=["SIGTERM", "SIGUSR1", "end_of_the_job"],
)
def test_any_rank_may_get_the_signal_and_the_next_run_resumes_at_another_size(
    tmp_path, reason, signalled
):
    program = tmp_path / "program.py"
    program.write_text(TRAINS)
    folder = tmp_path / "ckpt"
    end = {} if signalled is not None else {"SLURM_JOB_END_TIME": str(int(time.time()) + 5)}
    first = launch.Launched([program, folder, "paced"], ranks=3, env=end)
    if signalled is not None:
        first.wait_for_output(f"pid {signalled} ")
        time.sleep(0.3)
        pid = int(re.search(rf"pid {signalled} (\d+)", first.stdout())[1])
        os.kill(pid, signal.Signals[reason.split()[1]])
        with contextlib.suppress(ProcessLookupError):  # a scheduler may send two
            os.kill(pid, signal.SIGTERM)
    done = first.finish(30)
    saved_at = step_of_all_ranks(done, 3)
    assert f"{reason}: all ranks save" in done.stderr
    assert 0 < saved_at < 100
    early = launch.run([program, folder, "at once"], ranks=2)
    assert step_of_all_ranks(early, 2) == saved_at + 1
    assert "got SIGUSR1" in early.stderr
    names = [f"checkpoint-{number}.h5" for number in (saved_at, saved_at + 1)]
    assert sorted(os.listdir(folder)) == sorted(names)
    last = launch.run([program, folder, "to the end"], ranks=4)
    assert last.returncode == 0, last.stderr
    figures = json.loads(re.search(r"done (.*)", last.stdout)[1])
    assert figures == [100, 999 * 1000 / 2]


def step_of_all_ranks(done, size):
    assert done.returncode == ms.PreemptionCheckpointHandler.EXIT_CODE, done.stderr
    steps = re.findall(r"saved at (\d+)", done.stdout)
    assert steps == [steps[0]] * size
    return int(steps[0])
