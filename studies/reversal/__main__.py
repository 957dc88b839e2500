"""GAPO against its own widths in reversed order: run what is missing, archive it, write the tables.

    python -m studies.reversal [--model DIR]

Again: goes on. REGISTRATION.md has the questions and the rules, README.md what was found.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np

from gapo_megatron.config import load_config
from gapo_megatron.errors import ConfigError, GapoError
from gapo_megatron.formats.manifest import step_dir
from gapo_megatron.io.files import write_atomically
from gapo_megatron.io.run_folder import checkpoints_dir, is_finished
from gapo_tools.reporting.runs import read_run
from studies.reversal import plan, tables
from studies.reversal.task import write_task

HERE = Path(__file__).parent
REGISTRATION, BASE = HERE / "REGISTRATION.md", HERE / "base.toml"
MODEL = Path("runs/smollm2/SmolLM2-135M-Instruct")
ENGINE = "rollout.engine=studies/reversal/merged.py:merged_engine"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m studies.reversal", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="Hugging Face folder")
    parser.add_argument("--processes", type=int, default=2, help="of one thread each")
    arguments = parser.parse_args()
    study = Study(arguments.model, arguments.processes, registered(REGISTRATION))
    study.make_start()
    study.make_widths()
    study.run_pairs(plan.LEAST_PAIRS, plan.JUDGED)
    deviation = tables.blind_deviation(tables.read(study.archived))
    pairs = plan.pairs_needed(deviation)
    say(f"deviation of a difference, arms unknown: {deviation:.2f} points; {pairs} pairs in all")
    study.run_pairs(pairs, plan.JUDGED)
    study.run_pairs(pairs, plan.ARMS)
    tables.write(study.archived)


def registered(path: Path) -> str:
    """SHA-256 of the registration, and the package that it is run with.

    Raises:
        ConfigError: page, study or package differ from what is committed.
    """

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=path.parent, capture_output=True, text=True)

    tracked = git("ls-files", "--error-unmatch", path.name)
    changed = git("diff", "--quiet", "HEAD", "--", path.name, "*.py", "*.toml", ":/gapo_megatron")
    package = git("rev-parse", "HEAD:gapo_megatron")
    if tracked.returncode or changed.returncode or package.returncode:
        raise ConfigError(f"{path}, the study's code and gapo_megatron must be as in HEAD: commit")
    return f"{hashlib.sha256(path.read_bytes()).hexdigest()}, gapo_megatron {package.stdout[:12]}"


def say(text: str) -> None:
    """Print a line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Study:
    """The runs of one model, in runs/reversal/MODEL."""

    def __init__(self, model: Path, num_processes: int, registration: str) -> None:
        """Refuse results of another registration."""
        self.model, self.num_processes, self.registration = model, num_processes, registration
        self.folder = Path("runs/reversal") / model.name
        self.archived = HERE / "data" / model.name
        self.problems = self.folder / "problems.json"
        self.widths: plan.Widths = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        mark = self.folder / "registration"
        if not mark.exists():
            write_atomically(mark, registration)
        if (found := mark.read_text().strip()) != registration:
            raise ConfigError(f"{self.folder} has runs of the registration {found}: move it away")

    # -- parts -------------------------------------------------------------------------------------

    def make_start(self) -> None:
        """Task, and the shortest supervised start whose groups are mixed often enough."""
        examples = self.folder / "supervised.jsonl"
        paths = [f"supervised.initial_hf_dir={self.model}", f"supervised.train_path={examples}"]
        if not self.problems.exists():
            config = load_config(BASE, [*paths, f"supervised.num_steps={max(plan.START_STEPS)}"])
            write_task(config, problems=self.problems)
        for steps in plan.START_STEPS:
            start = self.folder / f"start_{steps}"
            if not start.exists():
                settings = [*paths, f"supervised.num_steps={steps}", f"model.hf_dir={start}"]
                settings.append(f"run.output_dir={self.folder / 'supervised'}")
                self._python(start, "gapo_megatron.sft", str(BASE), *settings, threads=2)
            share = plan.mixed_share(self._evaluate(start.name, start)["0"])
            say(f"start of {steps} steps: {100 * share:.1f} % of groups expected to be mixed")
            if share >= plan.START_MIXED:
                self.start, self.settings = start, [*paths, f"model.hf_dir={start}", ENGINE]
                return
        raise RuntimeError(f"no start reaches {100 * plan.START_MIXED:.0f} % of mixed groups")

    def make_widths(self) -> None:
        """Read the arms' widths, or find them by calibration runs and write them down."""
        path = self.folder / "widths.json"
        if not path.exists():
            found = plan.calibrate(self._measure, num_processes=self.num_processes)
            write_atomically(path, json.dumps(found, indent=1))
        self.widths = {
            arm: (low, high) for arm, (low, high) in json.loads(path.read_text()).items()
        }
        say(f"widths: {self.widths}")

    def run_pairs(self, pairs: int, arms: Iterable[str]) -> None:
        """Train and evaluate `arms` with the first `pairs` seeds, and archive them."""
        order = itertools.product(plan.SEEDS[:pairs], arms)
        jobs = {(arm, seed): self._run_dir(arm, seed) for seed, arm in order}
        missing = [job for job in jobs if not self._result(*job).exists()]
        begin = time.monotonic()
        with ThreadPoolExecutor(self.num_processes) as pool:
            waiting = [pool.submit(self._run, *job) for job in missing]
            for done, future in enumerate(as_completed(waiting), start=1):
                if error := future.exception():
                    pool.shutdown(cancel_futures=True)
                    raise error
                left = (time.monotonic() - begin) / done * (len(missing) - done) / 3600
                say(f"{done} of {len(missing)} runs, {left:.1f} h left")
        found = {("start", 0): self._read(self.folder / f"{self.start.name}.json")}
        found |= {job: self._read(self._result(*job)) for job in jobs}
        ids = [one["id"] for one in json.loads(self.problems.read_text())]
        tables.pack(self.archived, self.registration, self.widths, ids, found, [*jobs.values()])

    # -- processes ---------------------------------------------------------------------------------

    def _run_dir(self, arm: str, seed: int) -> Path:
        return self.folder / f"{arm}-seed_{seed}"

    def _result(self, arm: str, seed: int) -> Path:
        return self.folder / f"{arm}-seed_{seed}.json"

    def _run(self, arm: str, seed: int) -> None:
        """Train a run unless it has finished, evaluate it, and drop its weights."""
        folder = self._run_dir(arm, seed)
        self._train(folder, arm, *self.widths[arm], seed=seed, num_steps=plan.NUM_STEPS)
        late = [step_dir(checkpoints_dir(folder), step) for step in plan.LATE]
        self._evaluate(folder.name, self.start, late)
        _drop_weights(folder)

    def _measure(self, arm: str, low: float, high: float) -> Mapping[str, float]:
        """Means over the steps of a calibration run."""
        folder = self.folder / "calibration" / f"{arm}-{low:g}-{high:g}"
        steps = plan.CALIBRATION_STEPS
        self._train(folder, arm, low, high, seed=plan.CALIBRATION_SEED, num_steps=steps)
        _drop_weights(folder)
        metrics = read_run(folder).metrics
        keys = (plan.CLIPPED, plan.LOST, plan.LOST_CORRECT, plan.DOSE)
        means = {key: float(np.mean(list(metrics[key].values()))) for key in keys if key in metrics}
        say(f"calibration: {arm} {low:g} {high:g}: {means}")
        return means

    def _train(
        self, folder: Path, arm: str, low: float, high: float, *, seed: int, num_steps: int
    ) -> None:
        if is_finished(folder, num_steps=num_steps):
            return
        run = [f"run.output_dir={folder}", f"run.seed={seed}", f"run.num_steps={num_steps}"]
        clip = [f"objective.eps_low={low}", f"objective.eps_high_max={high}"]
        method = f"objective.method={plan.ARMS[arm]}"
        self._python(folder, "gapo_megatron.train", str(BASE), *self.settings, *run, method, *clip)

    def _evaluate(
        self, name: str, start: Path, checkpoints: Sequence[Path] = ()
    ) -> dict[str, np.ndarray]:
        result = self.folder / f"{name}.json"
        if not result.exists():
            paths = [str(one) for one in (start, self.problems, result, *checkpoints)]
            self._python(result, "studies.reversal.exact", *paths)
        return self._read(result)

    @staticmethod
    def _read(result: Path) -> dict[str, np.ndarray]:
        return {step: np.array(one) for step, one in json.loads(result.read_text()).items()}

    def _python(self, of: Path, *command: str, threads: int = 1) -> None:
        """Run a module; what it prints is in a file beside `of`."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        log = of.with_name(f"{of.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            ended = subprocess.run(
                [sys.executable, "-m", *command], env=environment, stdout=file, stderr=file
            )
        if ended.returncode:
            raise RuntimeError(f"{command[0]} failed with {ended.returncode}: see {log}")


def _drop_weights(run_dir: Path) -> None:
    """Remove the weights of a finished run, half a gigabyte; its record stays."""
    for folder in (checkpoints_dir(run_dir), run_dir / "hf"):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    try:
        main()
    except GapoError as error:
        raise SystemExit(f"error: {error}") from None
