"""Reports of a run: files to analyse, a console line per step, optional curves.

- metrics.jsonl: a line per step, only values that a repeated or resumed run reproduces.
- timings.jsonl: a line per step: time/<stage>_s, perf/*, and the clock.
- samples.jsonl: some responses of each step as text (`io.sample_files`).
- tokens/step_N.parquet: the same responses token by token (`io.token_files`).
- timelines.jsonl: when their turns and an environment's calls took place.
- tensorboard/: numbers as curves; Weights & Biases, when configured, also shows samples.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from gapo_megatron.config import Config, MetricsConfig
from gapo_megatron.errors import ConfigError, MachineError
from gapo_megatron.io.console_table import ConsoleTable
from gapo_megatron.io.documents import read_text
from gapo_megatron.io.files import naming, real, write_atomically
from gapo_megatron.io.metric_files import METRICS_NAME, TIMINGS_NAME, Value, lines_before
from gapo_megatron.io.sample_files import TIMELINES_NAME, SampleLog, read_samples
from gapo_megatron.io.token_files import TokenLog
from gapo_megatron.run.signal_watch import SignalWatch
from gapo_megatron.run.tensorboard import add_scalars, open_tensorboard
from gapo_megatron.types import Sample, SampleTokens, Timeline

logger = logging.getLogger(__name__)

_MOST_CURVE_TEXT = 2000
"""Characters of a text in W&B, which keeps those of every step."""


def check_sinks(config: MetricsConfig) -> None:
    """Refuse a sink whose library is not installed. Call it on every rank, before heavy work.

    Raises:
        ConfigError: names the key and what to install.
    """
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "metrics.tensorboard (true) needs the package tensorboard: "
            "pip install tensorboard, or set it to false"
        )
    if config.wandb_project and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"metrics.wandb_project ({config.wandb_project!r}) needs the package wandb: "
            "pip install wandb, or set it to the empty string"
        )


class MetricsWriter:
    """All sinks of a run. Rank 0 writes; on other ranks (`enabled=False`) every call does nothing.

    Every line is on disk when `log` returns. After a resume the files hold exactly the lines of the
    steps before `resume_step`: later or incomplete lines are dropped and written again. (Those of
    samples once a step is sampled: an interrupted step may have its batch, and its samples.)
    """

    def __init__(
        self, run_dir: str | Path, *, config: Config, resume_step: int = 0, enabled: bool = True
    ) -> None:
        """Open the sinks.

        Args:
            run_dir: the run's output folder; must exist.
            config: which sinks, and the number of steps for progress.
            resume_step: first step this process will log; 0 for a new run.
            enabled: True on rank 0 only.

        Raises:
            ConfigError: a configured sink's library is not installed.
            DataError: metrics of a step that is not repeated are damaged.
            MachineError: the disk is full or fails; existing files are unchanged.
        """
        check_sinks(config.metrics)
        self._enabled = enabled
        if not enabled:
            return
        run_dir = self._run_dir = Path(run_dir)
        self._files = {}
        for name in (METRICS_NAME, TIMINGS_NAME):
            with naming(run_dir / name):
                self._files[name] = _open_truncated(run_dir / name, resume_step=resume_step)
        self._sample_log = SampleLog(run_dir)
        self._timeline_log = SampleLog(run_dir, name=TIMELINES_NAME)
        self._token_log = TokenLog(run_dir, resume_step=resume_step)
        self._keeps_samples = config.metrics.samples_per_step != 0
        self._samples: Sequence[Sample] = ()
        self._watch = SignalWatch(run_dir)
        with naming(run_dir / "tensorboard"):
            self._tensorboard = (
                open_tensorboard(run_dir, resume_step=resume_step)
                if config.metrics.tensorboard
                else None
            )
        self._wandb = _open_wandb(run_dir, config)
        self._console = ConsoleTable(num_steps=config.run.num_steps)
        self._not_finite: set[str] = set()

    def log(
        self, step: int, metrics: Mapping[str, Value], timings: Mapping[str, Value] | None = None
    ) -> None:
        """Write one line of metrics and one of timings for `step`.

        Args:
            step: index of the step, from 0. A second line of the same step (an evaluation) is fine.
            metrics: reproducible values only; tensors of one element are accepted. A value that is
                not finite is written as null, with a warning the first time.
            timings: from `Stopwatch.lap`; without them the console shows only an evaluation's
                pass@k.

        Warns if the step had nothing to learn from.

        Raises:
            MachineError: the disk is full or fails; a resume drops the incomplete line.
        """
        if not self._enabled:
            return
        values = self._finite(metrics)
        self._append(METRICS_NAME, {"step": step, **values})
        clock = self._finite(timings or {})
        if clock:
            self._append(TIMINGS_NAME, {"step": step, "time/unix_s": time.time(), **clock})
        present = {key: value for key, value in {**values, **clock}.items() if value is not None}
        if self._tensorboard is not None:
            with naming(self._tensorboard.log_dir):
                add_scalars(self._tensorboard, present, step)
        if self._wandb is not None:
            with naming(self._run_dir / "wandb"):
                self._wandb.log(present, step=step)
        with naming("standard output"):
            if clock:
                self._console.show(step, present)
            else:
                self._console.show_evaluation(step, present)
        self._watch.check(step, present, self._samples)

    def log_samples(
        self, step: int, samples: Sequence[Sample], timelines: Sequence[Timeline] = ()
    ) -> None:
        """Write some responses of `step`; `log` shows them if they have nothing to teach.

        Args:
            step: index of the step.
            samples: the responses.
            timelines: their timelines, if an environment answered.

        Raises:
            MachineError: the disk is full or fails; a resume drops the incomplete line.
        """
        if not self._enabled:
            return
        self._samples = samples
        for log in (self._sample_log, self._timeline_log):
            log.begin(step)
        if not (samples and self._keeps_samples):
            return
        self._sample_log.append(samples)
        if timelines:
            self._timeline_log.append(timelines)
        if self._wandb is not None:
            import wandb

            rows = [{name: _cut(value) for name, value in asdict(one).items()} for one in samples]
            table = wandb.Table(columns=[*rows[0]], data=[[*row.values()] for row in rows])
            with naming(self._run_dir / "wandb"):
                self._wandb.log({"samples": table}, step=step)

    def samples_of(self, step: int) -> list[Sample]:
        """On rank 0: the samples that `log_samples` wrote of `step`, here or before a resume.

        Raises:
            DataError: samples.jsonl is damaged.
        """
        if self._samples and self._samples[0].step == step:
            return [*self._samples]
        return [one for one in read_samples(self._run_dir) if one.step == step]

    def log_tokens(self, step: int, rows: Sequence[SampleTokens]) -> None:
        """Write the samples of `step` token by token, before its line of metrics; none: no file.

        Raises:
            MachineError: the disk is full or fails; there is no file then.
        """
        if self._enabled and rows:
            self._token_log.write(step, rows)

    def log_startup(
        self, step: int, seconds: Mapping[str, Value], *, sizes: Mapping[str, int]
    ) -> None:
        """Log `startup/<part>_s` as a line of timings, before the first step of this process.

        It also has the numbers of ranks (`perf/...`), which may differ between starts.
        """
        if not self._enabled:
            return
        record = {f"startup/{part}_s": value for part, value in seconds.items()}
        record |= sizes
        self._append(TIMINGS_NAME, {"step": step, "time/unix_s": time.time(), **record})
        parts = ", ".join(f"{part} {value:.1f}" for part, value in seconds.items())
        logger.info("ready after %.1f s: %s", sum(seconds.values()), parts)

    def close(self, *, is_finished: bool = False) -> None:
        """Flush and close every sink; at the end of a run, warn if no step had a signal."""
        if not self._enabled:
            return
        if is_finished:
            self._watch.check_run()
        for file in self._files.values():
            with naming(file.name):
                file.close()
        if self._tensorboard is not None:
            with naming(self._tensorboard.log_dir):
                self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finite(self, values: Mapping[str, Value]) -> dict[str, Value | None]:
        """Plain numbers; None, with a warning, for values that JSON cannot hold."""
        finite: dict[str, Value | None] = {}
        for key, value in values.items():
            number = value if isinstance(value, int) else float(value)
            finite[key] = number if math.isfinite(number) else None
            if finite[key] is None and key not in self._not_finite:
                self._not_finite.add(key)
                logger.warning("metric %s is %s; written as null", key, number)
        return finite

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        file = self._files[name]
        with naming(file.name):
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _open_truncated(path: Path, *, resume_step: int) -> Any:
    """Open a JSONL file for appending after dropping lines of step `resume_step` and later.

    Raises:
        DataError: see `lines_before`.
        MachineError: `path` links into a missing folder.
    """
    kept, damage = lines_before(path, resume_step=resume_step)
    for error in damage:
        logger.warning("%s; dropped", error)
    target = real(path)  # the target of a link
    if not target.parent.is_dir():
        raise MachineError(f"{path} is a link to {target}, whose folder does not exist")
    write_atomically(target, b"".join(kept))  # a kill here loses no line
    return open(target, "a", encoding="utf-8")


def _cut(value: Any) -> Any:
    """A long text without its middle; a mapping as text, as W&B wants one type in a column."""
    if isinstance(value, Mapping):
        value = json.dumps(value)
    if not isinstance(value, str) or len(value) <= _MOST_CURVE_TEXT:
        return value
    half = _MOST_CURVE_TEXT // 2
    return f"{value[:half]}\n[... {len(value) - 2 * half} characters ...]\n{value[-half:]}"


def _open_wandb(run_dir: Path, config: Config) -> Any:
    """One W&B run per output folder: a resumed run continues its curves.

    W&B ignores steps it has already received: it keeps the values of the earlier attempt, which
    equal metrics.jsonl only if repeated steps are bitwise identical.
    """
    if not config.metrics.wandb_project:
        return None
    import wandb

    id_path = run_dir / "wandb_run_id.txt"
    if not id_path.exists():
        write_atomically(id_path, secrets.token_hex(8))
    run_id = read_text(id_path).strip()
    if not re.fullmatch(r"[\w-]+", run_id):
        raise ConfigError(f"{id_path} ({run_id!r}) is not a W&B run id; remove it to start anew")
    return wandb.init(
        project=config.metrics.wandb_project,
        name=run_dir.name,
        id=run_id,
        resume="allow",
        dir=str(run_dir),
        config=config.model_dump(mode="json"),
    )
