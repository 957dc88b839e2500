"""A private Slurm cluster of emulated nodes on this machine, for tests and benchmarks.

Needs the programs of Slurm and munge, no root, no systemd, no cgroup; nothing outside its folder is
touched. Each daemon runs on a machine of its own (`machine.py`), so nothing outlives the cluster or
the process that started it. Nodes are named 127.0.0.2, 127.0.0.3, ...: names that resolve on every
machine, so that the first one can be MASTER_ADDR. Their CPUs, memory and GPUs are pretended: eight
links to /dev/null are what Slurm hands out as GPUs.
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.waiting import HANG_S

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = HANG_S if "PYTEST_VERSION" in os.environ else 1500.0
"""Of a wait; benchmarks have time."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
GPUS_PER_NODE = 8
# Debian keeps the daemons where the PATH of an ordinary user does not lead.
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_LAUNCHER = re.compile(
    r"(SLURM|SBATCH|SRUN|SALLOC|GAPO)_.*|(LOCAL_)?RANK|WORLD_SIZE|MASTER_(ADDR|PORT)"
)
FINAL_STATES = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}

# Answers the one question submitit asks, from slurmctld's memory: there is no accounting here, and
# without an answer submitit waits for ever for a job that died without a result.
_SACCT = """#!/bin/bash
set -euo pipefail
[ "$1 $2 $3" = "-o JobID,State,NodeList --parsable2" ]
shift 3
echo "JobID|State|NodeList"
while [ $# -gt 0 ]; do
  [ "$1" = -j ]
  scontrol --oneliner show job "$2" | sed -nE \\
    -e 's/^JobId=[0-9]+ ArrayJobId=([0-9]+) ArrayTaskId=(\\S+) /JobId=\\1_\\2 /' \\
    -e 's/^JobId=(\\S+) .*\\bJobState=(\\S+).* NodeList=(\\S*).*/\\1|\\2|\\3/p'
  shift 2
done
"""


class ClusterError(RuntimeError):
    """The cluster, or a job on it, is not in the state that was waited for."""


class Cluster:
    """Two to five nodes; use `running_cluster`."""

    def __init__(
        self, folder: Path, *, num_nodes: int, first_job: int = 1, patience: int = 3
    ) -> None:
        self.folder = folder.resolve()
        self.nodes = [f"127.0.0.{index + 2}" for index in range(num_nodes)]
        self.env = {k: v for k, v in os.environ.items() if not _LAUNCHER.fullmatch(k)} | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{self.folder}/bin{os.pathsep}{_PATH}",
        }
        self._first_job = first_job
        self._patience = patience
        self._machines: dict[str, subprocess.Popen[bytes]] = {}

    # -- jobs ------------------------------------------------------------------------------------

    def run(
        self, *command: str | Path, check: bool = True, cwd: Path = REPOSITORY
    ) -> subprocess.CompletedProcess[str]:
        """Run a client command of Slurm (or any other) against this cluster."""
        done = subprocess.run(
            [str(word) for word in command],
            env=self.env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if check and done.returncode:
            raise ClusterError(f"{' '.join(done.args)} -> {done.returncode}: {done.stderr}")
        return done

    def submit(self, *arguments: str | Path, cwd: Path = REPOSITORY) -> str:
        """`sbatch` with these arguments; returns the job's id."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd).stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """Fields of `scontrol show job`: JobState, Restarts, NodeList, ExitCode, ..."""
        query = ("scontrol", "--oneliner", "--details", "show", "job", job)
        done = self.run(*query, check=False)
        if done.returncode:  # a busy controller closes connections (SIGPIPE): asked once more
            done = self.run(*query)
        return dict(re.findall(r"(\w+)=(\S*)", done.stdout))

    def wait(self, job: str, state: str, *, timeout_s: float = LIMIT_S) -> dict[str, str]:
        """Wait until the job is in `state`; returns its fields then.

        Raises:
            ClusterError: it ended in another state, or time is up; with the end of its log.
        """
        fields: dict[str, str] = {}

        def arrived() -> bool:
            fields.update(self.job(job))
            if fields["JobState"] in FINAL_STATES - {state}:
                raise ClusterError(f"job {job} has not {state}: {describe()}")
            return fields["JobState"] == state

        def describe() -> str:
            log = Path(fields["StdOut"])
            return f"{fields['JobState']}\n{tail(log) if log.is_file() else 'no log'}"

        until(arrived, f"job {job} {state}", timeout_s=timeout_s, seen=describe)
        return fields

    def clear(self) -> None:
        """Cancel every job and revive killed nodes; returns when the cluster is as at its start."""
        jobs = self.run("squeue", "--noheader", "--format=%A").stdout.split()
        if jobs:
            self.run("scancel", *jobs)
        for node in self.nodes:
            if node not in self._machines:
                self._start_node(node)
        until(
            lambda: set(self.node_states().values()) == {"idle"},
            "idle nodes",
            seen=self.logs,
        )

    def processes(self, command: str = "", **env: str) -> list[int]:
        """Ids of this cluster's processes, daemons included.

        Args:
            command: regular expression that their command line must begin with.
            env: what their environment must contain; keys are variables.
        """
        wanted = {**env, "SLURM_CONF": self.env["SLURM_CONF"]}.items()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                line = (path / "cmdline").read_text(errors="replace").replace("\0", " ")
                settings = (path / "environ").read_text(errors="replace").split("\0")
            except OSError:  # ended meanwhile, or somebody else's
                continue
            if re.match(command, line) and {f"{k}={v}" for k, v in wanted}.issubset(settings):
                found.append(int(path.name))
        return found

    # -- nodes -----------------------------------------------------------------------------------

    def node_states(self) -> dict[str, str]:
        """State of each node, as `sinfo` names it: idle, alloc, mix, down, ..."""
        shown = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T")
        return dict(line.split() for line in shown.stdout.splitlines())

    def kill_node(self, node: str) -> None:
        """Power loss: SIGKILL for the node's slurmd, its job steps and all their processes."""
        machine = self._machines.pop(node)
        machine.terminate()
        machine.wait()

    def revive_node(self, node: str) -> None:
        """Start a killed node's slurmd again; returns when Slurm would place jobs there."""
        self._start_node(node)
        until(
            lambda: self.node_states()[node] == "idle",
            f"{node} idle",
            seen=lambda: str(self.node_states()),
        )

    # -- daemons ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Write the configuration and start every daemon; returns when all nodes are idle."""
        # Sockets have 108 characters; the longest is spool/NODE/NODE_JOB.STEP.
        if len(str(self.folder)) > 60:
            raise ClusterError(f"{self.folder}: longer than 60 characters")
        self._write_files()
        munge = self.folder / "munge"
        self._start(
            "munged",
            "--foreground",
            "--force",  # a parent folder of mode 0700, as pytest makes them, is fine for one user
            f"--socket={munge}/socket",
            f"--key-file={munge}/key",
            f"--pid-file={munge}/pid",
            f"--log-file={self.folder}/log/munged",
            f"--seed-file={munge}/seed",
        )
        self._until("munged's socket", (munge / "socket").exists)
        self._start("slurmctld", "-D", "-c")
        self._until("slurmctld", lambda: self.run("scontrol", "ping", check=False).returncode == 0)
        for node in self.nodes:
            self._start_node(node)
        self._until("idle nodes", lambda: set(self.node_states().values()) == {"idle"})

    def stop(self) -> None:
        """End everything at once, jobs included."""
        for machine in self._machines.values():
            machine.terminate()
        for machine in self._machines.values():
            machine.wait()
        self._machines.clear()

    def _start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, name=node)

    def _start(self, program: str, *arguments: str, name: str = "") -> None:
        found = shutil.which(program, path=_PATH)
        assert found, program
        machine = [sys.executable, "-IS", str(Path(__file__).with_name("machine.py"))]
        with (self.folder / "log" / f"{name or program}.stderr").open("ab") as log:
            self._machines[name or program] = subprocess.Popen(
                [*machine, found, *arguments],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for pytest, which stops the cluster
            )

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for a part of the start, for as long as every daemon lives."""

        def ready() -> bool:
            for name, machine in self._machines.items():
                if machine.poll() is not None:
                    raise ClusterError(f"{name} ended at its start:\n{self.logs()}")
            return condition()

        until(ready, what, seen=self.logs)

    def logs(self) -> str:
        """Last lines of every daemon's log."""
        files = sorted((self.folder / "log").iterdir())
        return "\n".join(
            line for file in files for line in [f"== {file.name}", *tail(file).splitlines()]
        )

    def _write_files(self) -> None:
        folder = self.folder
        for name in ("munge", "state", "log", "run", "gpus", "bin"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for node in self.nodes:
            (folder / "spool" / node).mkdir(parents=True, exist_ok=True)
        key = folder / "munge" / "key"
        key.unlink(missing_ok=True)
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        for index in range(GPUS_PER_NODE):  # slurmd insists on character devices
            gpu = folder / "gpus" / f"gpu{index}"
            gpu.unlink(missing_ok=True)
            gpu.symlink_to("/dev/null")
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpus/gpu[0-7]\n")
        # slurmd loads a cgroup plugin even where nothing uses it, and before 23.02 has none that
        # always loads but v1, which touches nothing until it is used.
        plugin = "cgroup/v1" if slurm_version() < (23, 2) else "disabled"
        (folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
        sacct = folder / "bin" / "sacct"
        sacct.write_text(_SACCT)
        sacct.chmod(0o755)
        (folder / "slurm.conf").write_text("\n".join(self._slurm_conf()) + "\n")

    def _slurm_conf(self) -> Iterator[str]:
        folder, user = self.folder, getpass.getuser()
        host, address = socket.gethostname().partition(".")[0], _host_address()
        port, *node_ports = _free_ports(1 + len(self.nodes))
        yield from (
            "ClusterName=private",
            f"SlurmctldHost={host}({address})",
            f"SlurmctldPort={port}",
            f"FirstJobId={self._first_job}",
            f"SlurmUser={user}",
            f"SlurmdUser={user}",
            # A requeued job starts when its old credential has expired: 5 s is the least.
            f"AuthInfo=socket={folder}/munge/socket,cred_expire=5",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool/%n",
            f"SlurmctldPidFile={folder}/run/slurmctld.pid",
            f"SlurmdPidFile={folder}/run/slurmd-%n.pid",
            f"SlurmctldLogFile={folder}/log/slurmctld",
            f"SlurmdLogFile={folder}/log/slurmd-%n",
            "MailProg=/bin/true",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            # A queued job starts within 0.1 s instead of 3.
            "SchedulerParameters="
            "sched_min_interval=50000,sched_interval=1,bf_interval=1,batch_sched_delay=0",
            "SlurmdParameters=config_overrides",  # CPUs and memory are believed, not counted
            "ReturnToService=2",  # a node that was lost serves again when it is back
            f"SlurmdTimeout={10 * self._patience}",
            f"KillWait={3 * self._patience}",
            "MessageTimeout=60",
            "MinJobAge=86400",  # a finished job can be asked about
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "SlurmctldParameters=preempt_send_user_signal",
            "GresTypes=gpu",
        )
        if address.startswith("127."):  # nobody outside can reach the daemons
            yield "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny"
        for node, node_port in zip(self.nodes, node_ports, strict=True):
            yield (
                f"NodeName={node} NodeAddr={address} Port={node_port} CPUs=192 "
                f"RealMemory=1000000 Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN"
            )
        yield "PartitionName=main Nodes=ALL Default=YES PriorityTier=5 PreemptMode=OFF"
        yield "PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=30"
        yield "PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF"


@contextmanager
def running_cluster(
    folder: Path, *, num_nodes: int = 3, first_job: int = 1, patience: int = 3
) -> Iterator[Cluster]:
    """A started cluster, ended with the block.

    Args:
        folder: for its files; 60 characters at most, for sockets lie in it.
        num_nodes: machines of 8 pretended GPUs each.
        first_job: id of the first job. A job takes its ports from its id, so clusters that run side
            by side must not count the same.
        patience: times 10 s without an answer until a node is taken for lost, and times 3 s between
            SIGTERM and SIGKILL. On a busy machine one is too little.

    Raises:
        ClusterError: a daemon does not start; the message has the logs.
    """
    cluster = Cluster(folder, num_nodes=num_nodes, first_job=first_job, patience=patience)
    with ExitStack() as stack:
        stack.callback(cluster.stop)
        try:
            cluster.start()
        except ClusterError as error:
            if "Address already in use" not in str(error):
                raise
            # Another program took a port between our asking for a free one and its use.
            cluster.stop()
            cluster.start()
        yield cluster


def missing_programs() -> list[str]:
    """Those of `PROGRAMS` that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


def slurm_version() -> tuple[int, int]:
    """Year and month of the installed Slurm."""
    program = shutil.which("slurmctld", path=_PATH)
    assert program
    shown = subprocess.run([program, "-V"], capture_output=True, text=True, check=True).stdout
    major, minor = re.findall(r"\d+", shown)[:2]
    return int(major), int(minor)


def until(
    condition: Callable[[], bool],
    what: str,
    *,
    timeout_s: float = LIMIT_S,
    every_s: float = 0.25,
    seen: Callable[[], str] = str,
) -> None:
    """Wait for `condition`, looking every `every_s` seconds.

    Raises:
        ClusterError: it did not come true in time; the message ends with what `seen` returns.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise ClusterError(f"waited {timeout_s:.0f} s in vain for {what}; instead: {seen()}")
        time.sleep(every_s)


def tail(path: Path, num_lines: int = 20) -> str:
    """Last lines of a text file."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])


def _host_address() -> str:
    """Where the daemons listen: the address of this host's name, as they resolve it themselves."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
    return address if address.startswith("127.") else "127.0.0.1"


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]
