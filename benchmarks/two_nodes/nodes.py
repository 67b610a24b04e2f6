"""Nodes made of the kernel's namespaces, as containers are, and the link between them."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpistrat.system.cpu import own_cores

DEVICE = "eth0"
"""Network device of each node."""
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount")
_TOOLS = ("ip", "tc", "nsenter", "unshare", "taskset")
_BURST = 2**17
"""Bytes that the link takes at once: a few packets of 64 KiB, as the kernel hands them over. More
would let short messages through at the speed of memory."""
_QUEUE = 2**24
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Node:
    """One of the nodes: processes that see a network, a host name and a /dev/shm of their own."""

    name: str
    address: str
    pid: int
    """Process that keeps the namespaces alive."""
    cores: tuple[int, ...]
    """Cores of this machine that the node has for itself."""

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on this node."""
        enter = ["nsenter", f"--target={self.pid}", *_NAMESPACES, f"--wdns={os.getcwd()}"]
        return ["taskset", "--cpu-list", ",".join(map(str, self.cores)), *enter, "--", *command]

    def run(self, *command: str) -> None:
        """Run a command on this node, and wait for its end."""
        subprocess.run(self.command(command), check=True, stdin=subprocess.DEVNULL)


def why_impossible() -> str | None:
    """Return what this machine lacks to make nodes, ``None`` if it lacks nothing."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} are missing: install iproute2 and util-linux."
    if os.geteuid() != 0:
        return "only root can make network namespaces."
    if len(own_cores()) < 2:
        return "each node needs a core of its own."
    return None


@contextlib.contextmanager
def two_nodes(rate: str) -> Iterator[tuple[Node, Node]]:
    """Make two nodes, joined by a link of `rate`, as ``tc`` writes it: ``"10gbit"``."""
    cores = sorted(own_cores())
    half = len(cores) // 2
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="two-nodes-")))
        nodes = tuple(
            Node(f"node-{letter}", f"10.77.0.{number}", _keep_namespaces(stack), tuple(part))
            for number, (letter, part) in enumerate(
                (("a", cores[:half]), ("b", cores[half : 2 * half])), start=1
            )
        )
        hosts = folder / "hosts"
        lines = [f"{node.address} {node.name}\n" for node in nodes]
        hosts.write_text("".join(["127.0.0.1 localhost\n", *lines]))
        ends = [f"mpi{os.getpid()}{node.name[-1]}" for node in nodes]
        # The names must not exist in this namespace, so they hold the process id. A device goes
        # with its namespace, and so does the other end.
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for node, end in zip(nodes, ends, strict=True):
            _run("ip", "link", "set", end, "netns", str(node.pid))
        for node, end in zip(nodes, ends, strict=True):
            node.run("sh", "-ec", _setup(node, end, rate, hosts))
        yield nodes[0], nodes[1]


def _setup(node: Node, device: str, rate: str, hosts: Path) -> str:
    return f"""
hostname {node.name}
mount -t tmpfs tmpfs /dev/shm
mount --bind {shlex.quote(str(hosts))} /etc/hosts
ip link set lo up
ip link set {device} name {DEVICE}
ip addr add {node.address}/24 dev {DEVICE}
ip link set {DEVICE} up
tc qdisc add dev {DEVICE} root tbf rate {rate} burst {_BURST} limit {_QUEUE}
"""


def _keep_namespaces(stack: contextlib.ExitStack) -> int:
    """Start a process with new namespaces, which ends with `stack`, and return its id."""
    # It reads its input, so it ends with this program too, however that ends.
    command = ["unshare", *_NAMESPACES, "--propagation=private", "cat"]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    stack.callback(keeper.wait)
    assert keeper.stdin is not None
    stack.callback(keeper.stdin.close)
    # unshare(1) becomes the command once the namespaces exist.
    end = time.monotonic() + _PATIENCE_S
    while Path(f"/proc/{keeper.pid}/comm").read_text().strip() != "cat":
        if keeper.poll() is not None or time.monotonic() > end:
            raise RuntimeError("unshare cannot make namespaces here.")
        time.sleep(0.01)
    return keeper.pid


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
