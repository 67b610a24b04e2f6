"""A real Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd.

It has its own folder, ports and key, so that it disturbs no other munged or Slurm, and it
needs neither systemd nor root.
"""

import contextlib
import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpistrat.testing import launch
from tests.programs.slurm import guard

__all__ = ["NETWORK", "NODES", "Cluster", "missing_programs"]

NODES = ("n1", "n2")
CPUS_PER_NODE = 4
NETWORK = {"MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "tcp"}
"""What lets MPICH start on two nodes: see jobs/train.sbatch."""
LIVE_STATES = (None, "PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

CONFIGURATION = """
ClusterName=tests
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
TmpFS={folder}/tmp.%n
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# The nodes claim more CPUs than there may be.
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
KillWait=2
ReturnToService=2
MailProg=/bin/true
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus}
PartitionName=tests Nodes=n1,n2 Default=YES MaxTime=60
"""


def _path():
    # Debian keeps daemons where only root's PATH leads.
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"


def missing_programs():
    """Return the names of the programs that a cluster needs and this machine does not have."""
    names = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
    return [name for name in names if shutil.which(name, path=_path()) is None]


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_until(condition, limit_s):
    """Return whether `condition` has come true within `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


class Cluster:
    """Two nodes, ``n1`` and ``n2``, while the context is open."""

    def __init__(self):
        # A short path, because sockets lie below it.
        self._folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self._configuration = guard.configuration_of(self._folder)
        self._daemons = []
        self._guard = subprocess.Popen(
            [sys.executable, guard.__file__, self._folder],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        with contextlib.suppress(subprocess.SubprocessError):
            self.cancel_all()
        # The controller goes first: it must not start again what the nodes end.
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
        self._guard.communicate()
        for daemon in self._daemons:
            daemon.wait(5)

    def _start(self):
        folder = self._folder
        folder.chmod(0o755)
        for name in ("state", *(f"{part}.{node}" for part in ("spool", "tmp") for node in NODES)):
            (folder / name).mkdir()
        self._configuration.write_text(
            CONFIGURATION.format(
                host=socket.gethostname().partition(".")[0],
                ports=_free_ports(3),
                user=getpass.getuser(),
                folder=folder,
                cpus=CPUS_PER_NODE,
                # MPICH names its files in /dev/shm by the number of the job. One that was killed
                # leaves them, and a job of another cluster with the same number would open them.
                first_job=1 + secrets.randbelow(60_000_000),
            )
        )
        self._start_munge()
        for node in NODES:
            # PMIx asks for the peers of this host, and knows the node by its name alone.
            self._daemon("slurmd", "-D", "-N", node, PMIX_HOSTNAME=node)
        self._daemon("slurmctld", "-D", "-c")
        self._expect(self._is_idle, "The nodes")

    def _expect(self, condition, what, limit_s=60):
        if not _wait_until(condition, limit_s):
            logs = "\n".join(f"{log}:\n{log.read_text()}" for log in self._folder.glob("*.log"))
            raise RuntimeError(f"{what} did not come up within {limit_s} s.\n{logs}")

    def _start_munge(self):
        key = self._folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {
            "socket": self._folder / "munge.socket",
            "key-file": key,
            "pid-file": self._folder / "munged.pid",
            "log-file": self._folder / "munged.log",
            "seed-file": self._folder / "munged.seed",
        }
        # A folder in /tmp is not where munged wants its log: --force makes that a warning.
        self._daemon("munged", "--foreground", "--force", *(f"--{k}={v}" for k, v in files.items()))
        self._expect(files["socket"].exists, "munged")

    def _daemon(self, *command, **variables):
        with (self._folder / f"output.{len(self._daemons)}.log").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self._environment(variables),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    def _is_idle(self):
        if any(daemon.poll() is not None for daemon in self._daemons):
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            states = self._call(["sinfo", "--noheader", "--Node", "--format=%T"], 10).stdout.split()
            return states == ["idle"] * len(NODES)
        return False

    def _environment(self, changes):
        own = {"PATH": _path(), "SLURM_CONF": str(self._configuration)}
        return launch.environment({**own, **changes})

    def _call(self, command, limit_s, cwd=None, env=None):
        return subprocess.run(
            command,
            cwd=cwd,
            env=self._environment(env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )

    def run(self, *command, limit_s=30, cwd=None, env=None):
        """Run a command of Slurm; fail, and end all jobs, if it takes more than `limit_s`."""
        try:
            return self._call([str(each) for each in command], limit_s, cwd, env)
        except subprocess.TimeoutExpired as late:
            self.cancel_all()
            raise AssertionError(f"{late}:\n{late.stdout}\n{late.stderr}") from None

    def batch(self, *arguments, limit_s=60, cwd):
        """Submit a batch job from the folder `cwd`; return its exit code and all it has printed."""
        submitted = self.run("sbatch", "--parsable", "--output=%j.out", *arguments, cwd=cwd)
        assert submitted.returncode == 0, submitted.stderr
        job = submitted.stdout.strip()
        facts = {}

        def has_ended():
            text = self._call(["scontrol", "--oneliner", "show", "job", job], 10).stdout
            facts.update(re.findall(r"(JobState|ExitCode)=(\S+)", text))
            return facts.get("JobState") not in LIVE_STATES

        ended = _wait_until(has_ended, limit_s)
        if not ended:
            self.cancel_all()
        log = Path(cwd, f"{job}.out")
        text = log.read_text() if log.exists() else ""
        assert ended, f"job {job} ran over {limit_s:g} s:\n{text}"
        code, _, signal_number = facts["ExitCode"].partition(":")
        return subprocess.CompletedProcess(arguments, int(code) or -int(signal_number), text, "")

    def pids(self):
        """Return the processes of this cluster: its daemons, and the steps and tasks of jobs."""
        return guard.processes_of(self._folder)

    def cancel_all(self):
        """End all jobs, and wait until the nodes are idle."""
        for job in self._call(["squeue", "--noheader", "--format=%i"], 10).stdout.split():
            self._call(["scancel", "--signal=KILL", job], 10)
            self._call(["scancel", job], 10)
        _wait_until(self._is_idle, 10)
