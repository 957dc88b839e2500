"""Submit runs through submitit: as a Slurm job, an array, or a chain of jobs.

submitit writes the batch script, numbers the runs of an array and returns results. Inside a job
slurm/launch.sh does everything (checks, restarts, requeues, failures), as with plain `sbatch`. A
job imports this module from its frozen code; it needs only the standard library, rich and submitit.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import submitit
from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import _make_sbatch_string

from gapo_megatron.errors import ConfigError, shown
from gapo_tools.jobs.status import JOBS_NAME, read_status

if TYPE_CHECKING:
    from gapo_tools.jobs.study import Resources

STOP_BEFORE_END_S = 300
"""Seconds before the time limit or preemption at which Slurm signals a job to stop."""
_PR_SET_PDEATHSIG = 1
# sbatch prefers these variables to the script; resources that were asked for override both.
_OUTRANKED = {
    "gpus_per_node": "SBATCH_GPUS_PER_NODE",
    "time": "SBATCH_TIMELIMIT",
    "exclusive": "SBATCH_EXCLUSIVE",
    "partition": "SBATCH_PARTITION",
    "account": "SBATCH_ACCOUNT",
}


@dataclass(frozen=True)
class Launch:
    """The work of a submitted job: run slurm/launch.sh of its frozen code until it ends.

    It does not define submitit's `checkpoint` method, which would requeue the job a second time, or
    give up after some time limits. All signals go to launch.sh, which saves and requeues.
    """

    code: str
    """Folder of the frozen code and config, in the run folder."""

    def __call__(self) -> dict[str, Any]:
        """Run the job and return the run's `Status` as a dict.

        Raises:
            RuntimeError: launch.sh failed or was cancelled.
            SystemExit: Slurm has requeued the job, whose next start will return the result.
        """
        code = Path(self.code)
        os.environ.pop("SLURM_CLUSTERS", None)  # a job's own cluster is the one that answers it
        child = subprocess.Popen(
            [code / "slurm" / "launch.sh", code / "config.toml"],
            env=os.environ | {"GAPO_CODE": self.code},
            preexec_fn=_end_with_parent,
        )
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, lambda number, _: child.send_signal(number))
        exit_code = child.wait()
        if _is_requeued():
            sys.exit(exit_code)
        status = read_status(code.parents[1])
        if exit_code:
            raise RuntimeError(f"{status.run_dir}: exit code {exit_code}. {status.why}")
        return asdict(status)


@dataclass(frozen=True)
class Submission:
    """Runs with equal resources, submitted as one array."""

    name: str
    folder: Path
    """Folder for submitit's files: scripts, pickles, a log per job."""
    codes: Sequence[Path]
    """Folders of the frozen code, one per run; in a dry run they do not exist."""
    resources: Resources
    parallel: int
    """Runs of the array at the same time."""
    chain: int
    """Jobs per run; each starts when the one before has stopped without an error."""

    def check(self) -> None:
        """Refuse names that Slurm would not read literally, even in quotes.

        Raises:
            ConfigError: names what it is and the character.
        """
        # sbatch and srun interpret a backslash even in quotes, and % in the name of a log.
        names = [
            ("the study's name", self.name, "\\"),
            ("the folder of its jobs", str(self.folder), "\\%"),
            *(("the folder of a run's code", str(code), "\\%") for code in self.codes),
            ("the interpreter", sys.executable, ""),
        ]
        for what, name, refused in names:
            for character in name:
                # An unprintable character may end the line.
                if character in refused or not character.isprintable():
                    raise ConfigError(f"{what} ({name!r}) must not contain {character!a}")

    def scripts(self) -> list[str]:
        """The batch script of every link of the chain.

        Raises:
            ConfigError: as `check`.
        """
        self.check()
        command = f"{_python()} -u -m submitit.core._submit {shlex.quote(str(self.folder))}"
        num_tasks = len(self.codes) if len(self.codes) > 1 else None
        return [
            _make_sbatch_string(
                command=command,
                folder=self.folder,
                map_count=num_tasks,
                **self._parameters(f"JOB_{link}" if link else None),
            )
            for link in range(self.chain)
        ]

    def submit(self) -> list[list[submitit.Job[dict[str, Any]]]]:
        """Submit every link of the chain, and record the job ids in the run folders.

        Returns:
            The jobs of each link.

        Raises:
            ConfigError: as `check`.
            FailedJobError: sbatch failed; has its message. If nothing was queued, the frozen code
                is removed again.
        """
        self.check()
        links: list[list[submitit.Job[dict[str, Any]]]] = []
        for _ in range(self.chain):
            executor = submitit.SlurmExecutor(self.folder, python=_python())
            before = links[-1][0].job_id.partition("_")[0] if links else None
            executor.update_parameters(**self._parameters(before))
            with outside_slurm({}):
                for field in self.resources.model_fields_set & set(_OUTRANKED):
                    os.environ.pop(_OUTRANKED[field], None)
                try:
                    links.append(executor.submit_array([Launch(str(code)) for code in self.codes]))
                except FailedJobError:
                    if not links:
                        _discard(self.codes)
                    raise
            for code, job in zip(self.codes, links[-1], strict=True):
                with (code.parents[1] / JOBS_NAME).open("a", encoding="utf-8") as jobs:
                    jobs.write(f"{job.job_id}\n")
        return links

    def _parameters(self, before: str | None) -> dict[str, Any]:
        """Parameters of submitit's executor; `before` is the job that this one waits for."""
        asked = self.resources
        # Plain sbatch options: submitit's `nodes` and `tasks_per_node` count processes that each
        # return a result, but here one process starts all others.
        options: dict[str, Any] = {
            "nodes": asked.nodes,
            "ntasks-per-node": asked.tasks_per_node,
            "cpus-per-task": asked.cpus_per_task,
            "time": asked.time,
            "requeue": True,
            "signal": f"B:USR2@{STOP_BEFORE_END_S}",
        }
        if asked.num_gpus_per_node:
            options["gpus-per-node"] = asked.num_gpus_per_node
        if asked.exclusive:
            options |= {"exclusive": True, "mem": 0}
        if asked.partition:
            options["partition"] = asked.partition
        if asked.account:
            options["account"] = asked.account
        if before:
            kind = "aftercorr" if len(self.codes) > 1 else "afterok"
            options |= {"dependency": f"{kind}:{before}", "kill-on-invalid-dep": "yes"}
        return {
            "job_name": self.name,
            "array_parallelism": self.parallel,
            "additional_parameters": options,
            "setup": self._setup(),
            "stderr_to_stdout": True,
            "use_srun": False,
            "wckey": None,
        }

    def _setup(self) -> list[str]:
        """Lines before the command; they put the frozen code, not the checkout, on the path."""
        return [
            "code=(",
            *(f"  {shlex.quote(str(code))}" for code in self.codes),
            ")",
            "export PYTHONPATH=${code[${SLURM_ARRAY_TASK_ID:-0}]} PYTHONSAFEPATH=1",
            f"export PYTHON=${{PYTHON:-{shlex.quote(sys.executable)}}}",
            *(["export ON_STOP=exit  # the next link continues"] if self.chain > 1 else []),
        ]


@contextmanager
def outside_slurm(changes: Mapping[str, str]) -> Iterator[None]:
    """Change the environment, and hide the variables of a Slurm job that this runs in.

    Those that say which cluster is meant stay: a status is asked of the same one.
    """
    before = dict(os.environ)
    for name in before:
        kept = ("SLURM_CONF", "SLURM_CLUSTERS")
        if name.startswith(("SLURM_", "SLURMD_")) and name not in kept:
            del os.environ[name]
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def world_sizes(asked: Sequence[Resources]) -> list[int]:
    """Ranks of each run. NUM_NODES of the environment limits its nodes; the others are spare.

    Raises:
        ConfigError: NUM_NODES is no number, or is set although the runs ask for different nodes.
    """
    used = os.environ.get("NUM_NODES")
    if used and not re.fullmatch("[1-9][0-9]{0,4}", used):
        raise ConfigError(
            f"NUM_NODES ({shown(used)}) of the environment must be a whole number from 1 to 99999"
        )
    nodes = sorted({resources.nodes for resources in asked})
    if used and len(nodes) > 1:
        raise ConfigError(
            f"NUM_NODES ({used}) of the environment applies to every run, so it must not be set "
            f"when runs ask for different numbers of nodes ({', '.join(map(str, nodes))})"
        )
    return [int(used or resources.nodes) * resources.tasks_per_node for resources in asked]


def generation_nodes() -> list[str]:
    """GENERATION_NODES of the environment as an override, as in slurm/launch.sh."""
    given = os.environ.get("GENERATION_NODES")
    return [f"rollout.generation_nodes={given}"] if given else []


def _discard(codes: Sequence[Path]) -> None:
    """Remove frozen code, and its parent folders if they are empty."""
    for code in codes:
        shutil.rmtree(code)
        with suppress(OSError):  # not empty
            code.parent.rmdir()
            code.parents[1].rmdir()


def _python() -> str:
    # Replaces the shell, because Slurm signals the batch step's first process.
    return f"exec {shlex.quote(sys.executable)}"


def _end_with_parent() -> None:
    """Make the kernel send SIGTERM to this child when its parent dies: no rank outlives the job."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_requeued() -> bool:
    """Whether this job was requeued, by anyone; True if Slurm does not answer."""
    job = submitit.JobEnvironment()
    if job.cluster != "slurm":
        return False
    # The id of the array task. SLURM_JOB_ID of the last task would mean the whole array.
    command = ["scontrol", "--oneliner", "show", "job", job.job_id]
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    restarts = re.search(r" UserId=.*? Restarts=(\d+)", shown)  # not of the job's name
    # Slurm increments the count when it requeues, before it signals the processes.
    return restarts is None or int(restarts[1]) > int(os.environ.get("SLURM_RESTART_COUNT", 0))
