"""The demo's real training on a private cluster, and ways to disturb it at a chosen moment."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gapo_megatron.formats import manifest
from gapo_megatron.launch.freeze import freeze
from tests.slurm.cluster import FINAL_STATES, REPOSITORY, Cluster, ClusterError, tail, until

# Small, but every stage is there: four mini-batches a step, evaluations, checkpoints.
NUM_STEPS = 8
CHECKPOINT_EVERY_STEPS = 2
SETTINGS = (
    f"run.num_steps={NUM_STEPS}",
    "batch.rollout_prompts=16",
    "batch.minibatch_prompts=4",
    f"checkpoint.every_steps={CHECKPOINT_EVERY_STEPS}",
    "evaluation.every_steps=4",
    "evaluation.samples_per_prompt=1",
)
# Start-up is most of what an attempt costs. vLLM has torch compile two small functions, 4 s in
# every process; what else is left out: lean/sitecustomize.py.
LEAN = {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(Path(__file__).with_name("lean"))}
_WARM_START = ("supervised.num_steps=40", "supervised.batch_sequences=64")


def make_checkout(folder: Path) -> None:
    """A checkout with the demo's task and a short warm start in runs/demo, ready for sbatch."""
    freeze(REPOSITORY, folder, config="")
    (folder / "slurm" / "site.sh").unlink(missing_ok=True)  # of the site where the tests run
    command = [sys.executable, "tools/demo.py", "--prepare", *_WARM_START]
    env = os.environ | LEAN | {"PYTHONPATH": os.pathsep.join([str(folder), LEAN["PYTHONPATH"]])}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)} -> {done.returncode}: {done.stdout}{done.stderr}")


class Training:
    """One run folder, and the job that works on it now."""

    def __init__(self, cluster: Cluster, checkout: Path, folder: Path, *settings: str) -> None:
        """`folder` is for the run and the logs of its jobs; `settings` as on a command line."""
        self.cluster = cluster
        self.run_dir = folder / "run"
        self.log = folder / "job.out"
        self.job = ""
        self.checkout = checkout
        self._settings = (*SETTINGS, *settings, f"run.output_dir={self.run_dir}")
        folder.mkdir(parents=True, exist_ok=True)

    def submit(self, *options: str, **env: str) -> None:
        """`sbatch slurm/gapo_demo.sbatch` with these options: two nodes, one rank each."""
        env = {"PYTHON": sys.executable} | LEAN | env
        self.job = self.cluster.submit(
            "--export=ALL," + ",".join(f"{key}={value}" for key, value in env.items()),
            f"--output={self.log}",
            *options,
            "slurm/gapo_demo.sbatch",
            *self._settings,
            cwd=self.checkout,
        )

    # -- watching --------------------------------------------------------------------------------

    @property
    def attempt(self) -> str:
        """Name of the newest attempt; empty before the first."""
        with suppress(FileNotFoundError):
            return (self.run_dir / "attempts" / "latest").readlink().name
        return ""

    def attempt_dir(self, attempt: str = "") -> Path:
        """Folder of an attempt, by default the newest."""
        return self.run_dir / "attempts" / (attempt or "latest")

    def stage(self) -> str:
        """What rank 0 of the newest attempt does: `step 3: rollout`, or nothing yet."""
        with suppress(FileNotFoundError):
            return (self.attempt_dir() / "stage").read_text().strip()
        return ""

    def step(self) -> int:
        """The step, from 0, that rank 0 of the newest attempt is in; -1 before the first."""
        match = re.match(r"step (\d+): ", self.stage())
        return int(match[1]) if match else -1

    def rank_log(self, rank: int, attempt: str = "") -> str:
        """What a rank has printed."""
        with suppress(FileNotFoundError):
            return (self.attempt_dir(attempt) / f"rank_{rank}.log").read_text()
        return ""

    def pid(self, rank: int) -> int:
        """Process of a rank of the newest attempt."""
        env = {"GAPO_ATTEMPT": self.attempt, "SLURM_PROCID": str(rank)}
        return min(self.cluster.processes(r"\S*python\S* -m gapo_megatron.train", **env))

    def steps(self, attempt: str) -> list[int]:
        """Steps, from 0, that an attempt finished."""
        shown = re.findall(r"^step=(\d+)/\d+ reward=", self.rank_log(0, attempt), re.MULTILINE)
        return [int(step) - 1 for step in shown]

    def describe(self) -> str:
        """Where it is, with the end of the job's log, for an error."""
        log = tail(self.log) if self.log.exists() else "no log"
        return f"attempt {self.attempt or '(none)'}, {self.stage() or 'no stage'}\n{log}"

    def until_stage(self, stage: str = "", *, not_in: str = "", step: int = 0) -> str:
        """Wait until an attempt other than `not_in` is in `stage` of a step; returns its name.

        Args:
            stage: by default any.
            step: the first that will do.

        Raises:
            ClusterError: the job ended before, or time is up.
        """
        next_look = time.monotonic()

        def arrived() -> bool:
            nonlocal next_look
            now = self.stage()
            if self.attempt != not_in and self.step() >= step and now.endswith(stage):
                return True
            if time.monotonic() > next_look:
                next_look = time.monotonic() + 1
                if self.cluster.job(self.job)["JobState"] in FINAL_STATES:
                    raise ClusterError(f"job {self.job} has ended: {self.describe()}")
            return False

        until(
            arrived,
            f"{stage or 'a stage'} of step {step}, not in attempt {not_in or 'none'}",
            every_s=0.003,
            seen=self.describe,
        )
        return self.attempt

    def until_stop_asked(self) -> None:
        """Wait until the launcher has passed a request to stop on to the ranks."""
        stop = self.attempt_dir() / "stop"
        until(stop.exists, "a request to stop", seen=self.describe)

    def until_ended(self, attempt: str) -> None:
        """Wait until the job has left its nodes after `attempt`: requeued, or for good."""
        job, _, count = attempt.rpartition(".")

        def ended() -> bool:
            fields = self.cluster.job(job)
            return int(fields["Restarts"]) > int(count) or fields["JobState"] in FINAL_STATES

        until(ended, f"the end of {attempt}", seen=self.describe)

    # -- disturbing ------------------------------------------------------------------------------

    @contextmanager
    def paused_in(self, stage: str, *, not_in: str = "", step: int = 0) -> Iterator[str]:
        """Hold rank 0 still in a stage of an attempt other than `not_in`, while the block acts.

        Without it a stage of the demo, some tenths of a second, is over before Slurm has passed a
        signal on. Yields the attempt's name.
        """
        attempt = self.until_stage(not_in=not_in)
        pid = self.pid(0)
        while True:
            self.until_stage(stage, not_in=not_in, step=step)
            os.kill(pid, signal.SIGSTOP)
            if self.stage().endswith(stage):  # and not over in between
                break
            os.kill(pid, signal.SIGCONT)
        try:
            yield attempt
        finally:
            with suppress(ProcessLookupError):  # the block may have ended it
                os.kill(pid, signal.SIGCONT)

    def kill(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank, past Slurm."""
        os.kill(self.pid(rank), number)


def differing_files(run_dir: Path, reference: Path) -> list[str]:
    """What a run has computed otherwise than another one: metrics, evaluations, weights."""
    names = ["metrics.jsonl", "hf/model.safetensors"]
    names += [f"evaluations/{path.name}" for path in (reference / "evaluations").iterdir()]
    return [n for n in names if (run_dir / n).read_bytes() != (reference / n).read_bytes()]


def damaged_checkpoints(run_dir: Path) -> list[str]:
    """What is wrong with each folder that has the name of a checkpoint but is none."""
    damages = (
        manifest.find_damage(folder, manifest.read_manifest(folder).files)
        for folder in manifest.list_steps(run_dir / "checkpoints")
    )
    return [damage for damage in damages if damage]


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A disk of 64 MB at `folder`, where mounting is allowed; gone with the block or this process.

    Yields whether it is there.
    """
    folder.mkdir(parents=True)
    mount = (
        'mount -t tmpfs -o size=64m gapo "$1" && trap \'umount --lazy "$1"\' EXIT && echo && read'
    )
    keeper = subprocess.Popen(
        ["bash", "-c", mount, "bash", str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with keeper:
        assert keeper.stdout is not None
        yield keeper.stdout.readline() == b"\n"


def fill(path: Path, *, leave: int) -> None:
    """Write into a file until its disk has only `leave` bytes left."""
    with path.open("wb") as file:
        file.truncate(shutil.disk_usage(path.parent).free - leave)
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
