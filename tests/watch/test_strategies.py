"""Programs with strategies of mpistrat: what the watch sees of their agreements."""

import json

import pytest

from mpistrat.testing.launch import is_open_mpi, run

pytestmark = pytest.mark.launches

START = """
import time
import numpy as np
from mpi4py import MPI
import mpistrat as ms

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def sum_of_ones():
    return ms.get_replica_context().all_reduce("sum", np.float64(1))

"""
HEALTHY = {
    "late": """
strategy = ms.MPIStrategy()
time.sleep(6 * (rank == 1))
print(strategy.run(sum_of_ones))
""",
    "num_replicas": """
strategy = ms.MPIStrategy(num_replicas=4)
time.sleep(6 * (rank == 1))
print(strategy.run(sum_of_ones))
""",
    "elastic": """
strategy = ms.MPIStrategy(num_replicas=4, elastic=True)
time.sleep(6 * (rank == 1))
print(strategy.run(sum_of_ones))
""",
    "parameter_server": """
strategy = ms.ParameterServerStrategy(num_ps=0)


def work():
    time.sleep(6)
    return 7


def ask():
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    print(coordinator.fetch(coordinator.schedule(work)))
    strategy.close()


if strategy.cluster_resolver.task_type == "chief":
    ask()
else:
    strategy.serve()
""",
    "torch_groups": """
import torch
import torch.distributed as dist

dist.init_process_group("mpistrat", init_method="mpi://")
group = dist.new_group([0, 1])
time.sleep(6 * (rank == 1))
value = torch.ones(3)
if rank < 2:
    dist.all_reduce(value, group=group)
dist.all_reduce(value)
print(value.tolist())
dist.destroy_process_group()
""",
    "late_at_the_end": """
strategy = ms.MPIStrategy()
strategy.run(sum_of_ones)
time.sleep(6 * (rank == 1))
""",
    "longer_than_the_limit_of_the_watch": """
options = ms.CommunicationOptions(timeout_seconds=60)
strategy = ms.MPIStrategy(communication_options=options)
time.sleep(8 * (rank == 1))
print(strategy.run(sum_of_ones))
""",
}


@pytest.mark.parametrize(
    "name",
    [
        each if each == "late" else pytest.param(each, marks=pytest.mark.campaign)
        for each in HEALTHY
    ],
)
def test_a_late_rank_is_left_alone(name, tmp_path):
    program = tmp_path / f"{name}.py"
    program.write_text(START + HEALTHY[name])
    command = ["-n", "2", "--oversubscribe"]
    if name == "elastic" and is_open_mpi():
        command.append("--mpi-args=--with-ft ulfm")
    limits = ["--after", "1", *(["--busy-after", "2"] if "longer" in name else [])]
    plain = run(["-m", "mpistrat", "run", *command, str(program)], limit_s=200)
    done = run(["-m", "mpistrat", "watch", *command, *limits, str(program)], limit_s=200)
    assert "mpistrat watch" not in done.stderr
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)


HANGING = {
    "endless": ("busy", "strategy.run(sum_of_ones if rank == 0 else endless)"),
    "endless_at_the_end": ("busy", "strategy.run(sum_of_ones)\nif rank == 1:\n    endless()"),
    "receive": (
        "missing ranks",
        "MPI.COMM_WORLD.recv(source=0) if rank == 1 else strategy.run(sum_of_ones)",
    ),
}
ENDLESS = "def endless():\n    while True:\n        pass\n\n\nstrategy = ms.MPIStrategy({})\n"


@pytest.mark.campaign
@pytest.mark.parametrize("replicas", ["", "num_replicas=4"])
@pytest.mark.parametrize("name", HANGING)
def test_a_hang_beside_an_agreement(name, replicas, tmp_path):
    kind, body = HANGING[name]
    program, file = tmp_path / f"{name}.py", tmp_path / "report.json"
    program.write_text(START + ENDLESS.format(replicas) + body + "\n")
    limits = ["--after", "2", "--busy-after", "8", "--json", str(file)]
    env = {"MPISTRAT_TIMEOUT_S": "none"}
    command = ["-m", "mpistrat", "watch", "-n", "2", "--oversubscribe", *limits, str(program)]
    done = run(command, limit_s=200, env=env)
    assert done.returncode == 86
    report = json.loads(file.read_text())
    assert (report["kind"], report["odd"]) == (kind, [1])
    assert "agreement o" in done.stderr


@pytest.mark.campaign
def test_the_limit_of_an_agreement_comes_first(tmp_path):
    program = tmp_path / "receive.py"
    program.write_text(START + ENDLESS.format("") + HANGING["receive"][1] + "\n")
    command = ["-n", "2", "--oversubscribe", "--after", "1", str(program)]
    done = run(["-m", "mpistrat", "watch", *command], limit_s=200, env={"MPISTRAT_TIMEOUT_S": "4"})
    assert done.returncode not in (0, 86)
    assert "CollectiveTimeoutError" in done.stderr
    assert "no progress" not in done.stderr
