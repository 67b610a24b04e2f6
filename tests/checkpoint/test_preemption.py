"""Saving before the job is taken away."""

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


TRAINS = """
import os, sys, time
import numpy as np
import mpistrat as ms

folder, num_steps = sys.argv[1], int(sys.argv[2])
strategy = ms.MPIStrategy(device="cpu")
rank, size = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
dataset = ms.data.Dataset.range(1000).shuffle(seed=0).batch(10)
batches = strategy.experimental_distribute_dataset(dataset)
with strategy.scope():
    total = ms.metrics.Sum(name="total")
    step_counter = ms.Variable(np.int64(0), name="step")
manager = ms.CheckpointManager(
    ms.Checkpoint(total=total, batches=batches, step=step_counter), folder,
    step_counter=step_counter,
)
manager.restore_or_initialize()
handler = ms.PreemptionCheckpointHandler(manager)
print(f"pid {rank} {os.getpid()}", flush=True)
for batch in batches:
    strategy.run(total.update_state, args=(batch,))
    step_counter.assign(step_counter.value() + 1)
    if handler.save_checkpoint_if_preempted():
        sys.exit(handler.EXIT_CODE)
    time.sleep(0.02 if num_steps else 0)
figures = [int(step_counter.value()), float(total.result())]
if rank == 0:
    print("done", figures, flush=True)
"""


@pytest.mark.launches
def test_sigterm_to_one_rank_saves_and_the_next_run_goes_on_at_another_size(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(TRAINS)
    folder = tmp_path / "ckpt"
    first = launch.Launched([program, folder, "1"], ranks=3)
    first.wait_for_output("pid 1 ")
    time.sleep(0.3)
    os.kill(int(re.search(r"pid 1 (\d+)", first.stdout())[1]), signal.SIGTERM)
    assert first.wait(30) == ms.PreemptionCheckpointHandler.EXIT_CODE, first.stderr()
    assert "got SIGTERM" in first.stderr()
    (name,) = os.listdir(folder)
    assert 0 < int(re.fullmatch(r"checkpoint-(\d+)\.h5", name)[1]) < 100
    second = launch.run([program, folder, "0"], ranks=2)
    assert second.returncode == 0, second.stderr
    figures = json.loads(re.search(r"done (.*)", second.stdout)[1])
    assert figures == [100, 999 * 1000 / 2]
