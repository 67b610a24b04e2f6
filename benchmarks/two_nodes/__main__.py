"""Command line: ``python -m benchmarks.two_nodes``. It starts the ranks on both nodes."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.two_nodes.nodes import DEVICE, Node, two_nodes, why_impossible
from mpistrat.mpi.mpiexec import Mpiexec, mpiexec_program
from mpistrat.testing import launch

_AGENT = """#!/bin/sh
# Starts a command on the node of an address, in place of ssh: AGENT [-x] ADDRESS COMMAND...
while [ "${{1#-}}" != "$1" ]; do shift; done
address=$1
shift
case $address in
{cases}
*) echo "no node has the address $address" >&2; exit 255;;
esac
"""
_TCP = {
    # MPICH: UCX or libfabric between nodes. Inside of a node it uses shared memory of its own.
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": DEVICE,
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": DEVICE,
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,self,sm",
    "OMPI_MCA_btl_tcp_if_include": DEVICE,
    "GLOO_SOCKET_IFNAME": DEVICE,
}
"""Variables that leave TCP as the only path between the nodes."""
_SHARED_CORES = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}


def main(given: Sequence[str] | None = None) -> int:
    """Run a Python program on two nodes, and return its exit code."""
    arguments = [*(sys.argv[1:] if given is None else given)]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.two_nodes",
        description="Run a Python program under MPI on two nodes that namespaces of this machine "
        "form, over TCP.",
        epilog="After -- come the arguments of python, such as: -- -m mpistrat bench allreduce",
    )
    parser.add_argument("--per-node", type=int, default=1, metavar="N", help="ranks on each node")
    parser.add_argument(
        "--rate", default="10gbit", help="rate of the link, as of tc (default: %(default)s)"
    )
    options, program = parser.parse_args(arguments[:at]), arguments[at + 1 :]
    if not program:
        parser.error("name a program after --")
    why = why_impossible()
    if why is not None:
        parser.error(why)
    path = mpiexec_program()
    if path is None:
        parser.error(f"there is no mpiexec next to {sys.executable} or on PATH")
    with two_nodes(options.rate) as nodes, tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "agent"
        agent.write_text(_AGENT.format(cases="\n".join(map(_case, nodes))))
        agent.chmod(0o700)
        start = _start(Mpiexec.open(path), nodes, options.per_node, agent)
        variables = launch.environment(_TCP)
        if options.per_node > len(nodes[0].cores):
            variables |= _SHARED_CORES
        command = nodes[0].command([*start, sys.executable, *program])
        return subprocess.run(command, env=variables, stdin=subprocess.DEVNULL).returncode


def _case(node: Node) -> str:
    return f'{node.address}|{node.name}) exec {shlex.join(node.command(["sh", "-c"]))} "$*";;'


def _start(mpiexec: Mpiexec, nodes: Sequence[Node], num_per_node: int, agent: Path) -> list[str]:
    """Return the command, for the first node, that starts ranks on all nodes."""
    places = ",".join(f"{node.address}:{num_per_node}" for node in nodes)
    number = ["-n", str(num_per_node * len(nodes))]
    if mpiexec.family == "Open MPI":
        # All nodes have this machine's cores, so a rank of each would be bound to the first one.
        agent_of = ["--prtemca", "plm_ssh_agent", str(agent)]
        by = ["--bind-to", "none", "--map-by", "slot"]
        return [mpiexec.path, *agent_of, "--host", places, *by, *number]
    agent_of = ["-launcher", "ssh", "-launcher-exec", str(agent)]
    own = ["-localhost", nodes[0].address]
    return [mpiexec.path, *agent_of, "-hosts", places, *own, *number]


if __name__ == "__main__":
    sys.exit(main())
