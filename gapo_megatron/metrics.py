"""What a run reports: files to compute with, a line per step to watch, curves when asked for.

- metrics.jsonl: a line per step, only values that a repeated or resumed run gives again.
- timings.jsonl: a line per step: time/<stage>_s, perf/*, and the clock.
- tensorboard/: both, as curves; Weights & Biases likewise when configured.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from gapo_megatron.config import Config, MetricsConfig
from gapo_megatron.console_table import ConsoleTable
from gapo_megatron.documents import open_file, parse_json, read_text
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.files import fsync, naming, real, write_atomically

logger = logging.getLogger(__name__)

METRICS_NAME = "metrics.jsonl"
TIMINGS_NAME = "timings.jsonl"
Value = float | int

# Blocks of a stage that tell what the next one takes: a single outlier is forgotten after so many.
_NUM_RECENT = 5


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


class Expectation(NamedTuple):
    """Seconds that something will take."""

    shortest_s: float
    longest_s: float


class Stopwatch:
    """Seconds per stage: `with stopwatch("rollout"): ...`; the same stage adds up.

    Stages follow one another. The clock is the host's: a stage that ends without waiting for the
    GPU leaves its rest to the next.

    Attributes:
        seconds: per stage, since the last lap.
        notes: name -> value; what else the clock tells of the step, for its timings.
        recent: per stage, the seconds of its last blocks, newest last.
    """

    def __init__(self, on_enter: Callable[[str], None] = lambda stage: None) -> None:
        """`on_enter` is told the name of every stage that begins; it may be replaced."""
        self.seconds: dict[str, float] = {}
        self.notes: dict[str, float] = {}
        self.recent: dict[str, list[float]] = {}
        self.on_enter = on_enter
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count the block's seconds towards `stage`, also when it raises."""
        self.on_enter(stage)
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
            self.recent[stage] = [*self.recent.get(stage, []), seconds][-_NUM_RECENT:]

    def expect(self, *stages: str) -> Expectation:
        """What one block of each stage takes, together, by the last ones; 0 for one never seen."""
        recent = [self.recent.get(stage, [0.0]) for stage in stages]
        return Expectation(sum(map(min, recent)), sum(map(max, recent)))

    def lap(self, *, num_tokens: int) -> dict[str, Value]:
        """End a step: its timings; the next step starts at zero.

        Args:
            num_tokens: learned from in the step, over all ranks; also what earlier steps sampled.

        Returns:
            `time/<stage>_s`, `time/step_s` (all since the last lap), `perf/tokens_per_s` and notes.
        """
        now = time.perf_counter()
        elapsed = now - self._start
        timings: dict[str, Value] = {f"time/{name}_s": s for name, s in self.seconds.items()}
        timings["time/step_s"] = elapsed
        timings["perf/tokens_per_s"] = num_tokens / elapsed
        timings |= self.notes
        self.seconds, self.notes, self._start = {}, {}, now
        return timings


class MetricsWriter:
    """All sinks of a run. Rank 0 writes; on other ranks (`enabled=False`) every call does nothing.

    Every line is on disk when `log` returns. After a resume the files hold exactly the lines of the
    steps before `resume_step`: a line of a later step, or one cut by the kill, is dropped and comes
    again.
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
            DataError: metrics of a step that does not come again are damaged.
            MachineError: the disk is full or fails; what was there before is as it was.
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
        with naming(run_dir / "tensorboard"):
            self._tensorboard = _open_tensorboard(run_dir, config.metrics, resume_step)
        self._wandb = _open_wandb(run_dir, config)
        self._console = ConsoleTable(num_steps=config.run.num_steps)
        self._not_finite: set[str] = set()

    def log(
        self, step: int, metrics: Mapping[str, Value], timings: Mapping[str, Value] | None = None
    ) -> None:
        """Write one line of metrics and one of timings for `step`.

        Args:
            step: index of the step, from 0. A second line of the same step (an evaluation) is fine.
            metrics: reproducible values only; tensors of one element are accepted. What is not
                finite is written as null, with a warning the first time.
            timings: from `Stopwatch.lap`; without them nothing is shown on the console.

        Raises:
            MachineError: the disk is full or fails; a line cut off by it is dropped by a resume.
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
                _add_scalars(self._tensorboard, present, step)
        if self._wandb is not None:
            with naming(self._run_dir / "wandb"):
                self._wandb.log(present, step=step)
        if clock:
            with naming("standard output"):
                self._console.show(step, present)

    def log_startup(self, step: int, seconds: Mapping[str, Value], *, world_size: int) -> None:
        """One line of timings, `startup/<part>_s`, before the first step of this process.

        With the ranks (`perf/world_size`) of the steps that follow: another start may have others.
        """
        if not self._enabled:
            return
        record = {f"startup/{part}_s": value for part, value in seconds.items()}
        record["perf/world_size"] = world_size
        self._append(TIMINGS_NAME, {"step": step, "time/unix_s": time.time(), **record})
        parts = ", ".join(f"{part} {value:.1f}" for part, value in seconds.items())
        logger.info("ready after %.1f s: %s", sum(seconds.values()), parts)

    def close(self) -> None:
        """Flush and close every sink."""
        if not self._enabled:
            return
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
        """Plain numbers; None where JSON has no number, which must not happen silently."""
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


def read_rows(path: Path) -> list[dict[str, float]]:
    """Whole lines of metrics or timings; the last one may be in the making. Nulls are left out.

    Raises:
        DataError: names file and line: not a JSON object of numbers with a step.
    """
    if not path.exists():
        return []
    rows = []
    with naming(path), open_file(path) as file:
        whole = file.read().split(b"\n")[:-1]
    for number, line in enumerate(whole, start=1):
        row = {k: v for k, v in _parse(path, number, line).items() if v is not None}
        for key, value in row.items():
            if type(value) not in (int, float):
                raise DataError(f"{path}:{number}: {key} = {value!r} is not a number")
        rows.append(row)
    return rows


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    row = parse_json(line, where=f"{path}:{number}", error=DataError)
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise DataError(f"{path}:{number}: not a JSON object with a step")
    return row


def last_step(path: Path) -> int | None:
    """Step of the last whole line of metrics; None where there is none."""
    with naming(path):
        try:
            with open_file(path) as file:
                whole = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return None
    for number, line in reversed([*enumerate(whole, start=1)]):
        with contextlib.suppress(DataError):  # damaged: dropped, or refused, when it is resumed
            return int(_parse(path, number, line)["step"])
    return None


def check_metrics(run_dir: str | Path, *, resume_step: int) -> None:
    """Refuse metrics that `MetricsWriter` would refuse; changes nothing. For use before heavy work.

    Raises:
        DataError: metrics of a step that does not come again are damaged.
    """
    path = Path(run_dir) / METRICS_NAME
    with naming(path):
        _lines_before(path, resume_step=resume_step)


def _lines_before(path: Path, *, resume_step: int) -> tuple[list[bytes], list[DataError]]:
    """Whole lines of steps before `resume_step`, and what is wrong with the damaged ones.

    Raises:
        DataError: a line of metrics is damaged, and kept ones follow: the run would not write it
            again. Timings are no results: such a line is dropped.
    """
    kept: list[bytes] = []
    damage: list[DataError] = []
    try:
        with open_file(path) as file:
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        lines = []
    for number, line in enumerate(lines, start=1):
        try:
            if not line.endswith(b"\n"):
                raise DataError(f"{path}:{number}: cut off")
            step = _parse(path, number, line)["step"]
        except DataError as error:
            damage.append(error)
            continue
        if step < resume_step or b'"startup/' in line:  # those of every attempt stay
            if damage and path.name == METRICS_NAME:
                raise DataError(f"{damage[0]}; mend or remove it: that step does not come again")
            kept.append(line)
    return kept, damage


def _open_truncated(path: Path, *, resume_step: int) -> Any:
    """Open a JSONL file for appending after dropping lines of step `resume_step` and later.

    Raises:
        DataError: as of `_lines_before`.
    """
    kept, damage = _lines_before(path, resume_step=resume_step)
    for error in damage:
        logger.warning("%s; dropped", error)
    path = real(path)  # of a link, what it leads to
    # By a rename, so that a kill in between loses no line.
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    fsync(path.parent)
    return open(path, "a", encoding="utf-8")


def _open_tensorboard(run_dir: Path, config: MetricsConfig, resume_step: int) -> Any:
    if not config.tensorboard:
        return None
    from torch.utils.tensorboard import SummaryWriter  # 3 s of import, only where it is used

    # Also at step 0: a run killed before its first checkpoint begins anew.
    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step)


def _add_scalars(writer: Any, values: Mapping[str, Value], step: int) -> None:
    """All of a step as one event: with an event for each, two hundred take 35 ms."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    scalars = [Summary.Value(tag=key, simple_value=value) for key, value in values.items()]
    writer.file_writer.add_summary(Summary(value=scalars), step)
    writer.flush()


def _open_wandb(run_dir: Path, config: Config) -> Any:
    """One W&B run per output folder: a resumed run continues its curves.

    W&B ignores the steps it has seen already: it keeps what the attempt before wrote, which equals
    metrics.jsonl only where a repeated step is exact to the bit.
    """
    if not config.metrics.wandb_project:
        return None
    import wandb

    id_path = run_dir / "wandb_run_id.txt"
    if not id_path.exists():
        write_atomically(id_path, wandb.util.generate_id())
    run_id = read_text(id_path).strip()
    if not re.fullmatch(r"[\w-]+", run_id):
        raise ConfigError(f"{id_path} ({run_id!r}) is no id of W&B; remove it to begin a new run")
    return wandb.init(
        project=config.metrics.wandb_project,
        name=run_dir.name,
        id=run_id,
        resume="allow",
        dir=str(run_dir),
        config=config.model_dump(mode="json"),
    )
