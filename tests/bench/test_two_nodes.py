"""Two nodes of one machine: programs on them see two hosts, and only a network between them."""

import subprocess
import sys

import pytest

from benchmarks.two_nodes.__main__ import main
from benchmarks.two_nodes.nodes import two_nodes, why_impossible

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(why_impossible() is not None, reason=why_impossible() or ""),
]

PROGRAM = """
import socket
import mpistrat as ms
s = ms.MPIStrategy()
print(s.rank, socket.gethostname(), len(s.cluster_resolver.hosts), s.reduce("sum", 1.0), flush=True)
"""


def test_nodes_have_names_links_and_memory_of_their_own():
    with two_nodes("1gbit") as nodes:
        for node, other in (nodes, nodes[::-1]):
            code = (
                "import os, socket; print(socket.gethostname(), os.listdir('/dev/shm'), "
                f"socket.gethostbyname({other.name!r}), sorted(os.sched_getaffinity(0)))"
            )
            found = subprocess.run(
                node.command([sys.executable, "-c", code]), capture_output=True, text=True
            ).stdout
            assert found.strip() == f"{node.name} [] {other.address} {sorted(node.cores)}"
    assert not {*nodes[0].cores} & {*nodes[1].cores}


@pytest.mark.parametrize("num_per_node", [1, 2])
def test_ranks_of_both_nodes_reduce_over_tcp(num_per_node, capfd):
    assert main(["--per-node", str(num_per_node), "--", "-c", PROGRAM]) == 0
    size = 2 * num_per_node
    hosts = ["node-a"] * num_per_node + ["node-b"] * num_per_node
    lines = [f"{rank} {host} 2 {size:.1f}" for rank, host in enumerate(hosts)]
    assert sorted(capfd.readouterr().out.splitlines()) == lines


def test_a_program_is_needed(capsys):
    with pytest.raises(SystemExit):
        main(["--per-node", "2"])
    assert "name a program after --" in capsys.readouterr().err
