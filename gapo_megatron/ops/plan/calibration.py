"""From measured steps to efficiencies: what a trial run or a finished run says of this machine.

The fit has no model of its own: it turns the efficiencies of `step_time` until its stages are those
measured, by least squares on the logarithms. What the measurements do not tell (a link, where there
was one rank) stays at its default.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from gapo_megatron.config import CONFIG_NAME, Config, load_config
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.io.metric_files import METRICS_NAME, TIMINGS_NAME, read_rows
from gapo_megatron.models.config_json import read_facts
from gapo_megatron.ops.plan.efficiency import SHARES, Efficiency
from gapo_megatron.ops.plan.flops import Shape
from gapo_megatron.ops.plan.hardware import Gpu
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.times import SidesTime, StepTime, step_time
from gapo_megatron.ops.plan.workload import DEFAULT_SPREAD, Workload, refuse_oversampling, spread_of

STAGES = ("generation", "reward", "old_log_probs", "update", "sync")
_TIMING_OF = {stage: f"time/{stage}_s" for stage in STAGES} | {"generation": "time/rollout_s"}
_SIDE = "generation/rollout_s"
"""A step has it whose batch came from ranks that only generate: these have timed it."""
_TIMING_OF_SIDE = _TIMING_OF | {
    "generation": _SIDE,
    "reward": "generation/reward_s",
    "sync": "generation/sync_s",
}
_TIMED = ("time/step_s", "perf/tokens_per_s")
"""Metrics that every timed step has, beside those of generation."""
_WORLD_SIZE, _GENERATION_RANKS = "perf/world_size", "perf/generation_ranks"
_NOT_A_STEP = ("evaluate", "checkpoint", "rounding")
_WARM_UP_STEPS = 2
"""Left out where a run has more: compilation, first allocations."""
_PRIOR_WEIGHT = 0.02
"""Weight of one factor e between a parameter and its default, against one factor e between a
stage's prediction and its measurement."""
_LEAST_S = 1e-9
_MOVED = 0.01
_REPLACED = "rollout/replaced_group_share"
_MOST = 1e30
"""Largest value of a metric or a time; more is damage, and would lead to infinities."""
_Row = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Observation:
    """Seconds by stage of some steps, medians, and what these had to do, means."""

    name: str
    shape: Shape
    config: Config
    layout: Layout
    workload: Workload
    measured: StepTime
    step_s: float
    """Seconds of whole steps, less evaluation, checkpoints and measured rounding; a median."""
    other_s: float
    """Seconds of `step_s` in none of the stages: vLLM's going to sleep, the batching plan, and what
    nothing counts. A median, so that it is not exactly the difference of the others'."""
    num_prompts: float
    """Prompts generated for in a step, including those that dynamic sampling replaced; a mean."""
    num_tokens: float
    """Response tokens of a step, as `perf/tokens_per_s` counts them; a mean."""
    tokens_per_s: float
    """Response tokens per second of the same step; a median."""

    def seconds(self, stage: str) -> float:
        """Measured, of one of `STAGES`, or `total`: of the whole step."""
        return self.step_s if stage == "total" else seconds(self.measured, stage)

    @property
    def can_be_predicted(self) -> bool:
        """Whether the model has equations for it: see `refuse_oversampling`."""
        return self.config.batch.oversampling == 1

    def predict(self, gpu: Gpu, efficiency: Efficiency) -> StepTime:
        """Predict the times of the observed steps.

        Raises:
            ConfigError: see `refuse_oversampling`; names the run.
        """
        try:
            refuse_oversampling(self.config)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from None
        return step_time(self.shape, self.config, self.layout, self.workload, gpu, efficiency)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted efficiencies, their device, and how well they fit."""

    gpu: Gpu
    efficiency: Efficiency
    worst: dict[str, float]
    """Largest |predicted / measured - 1| by stage, among the observations of the fit."""
    spread: float = DEFAULT_SPREAD
    clipped_share: float = 0.0
    """Mean over the observations' workloads, which a plan would otherwise have to assume."""

    @property
    def measured(self) -> list[str]:
        """Efficiencies that the fit has moved, by more than a hundredth; the rest is assumed."""
        default = Efficiency()
        return [
            field.name
            for field in dataclasses.fields(Efficiency)
            if abs(math.log(getattr(self.efficiency, field.name) / getattr(default, field.name)))
            > _MOVED
        ]


def seconds(times: StepTime, stage: str) -> float:
    """Seconds of one of `STAGES`, or `total`."""
    return float(getattr(times, f"{stage}_s"))


def fit(observations: Sequence[Observation], gpu: Gpu) -> Calibration:
    """Efficiencies under which the model's stages are those measured.

    Minimises, over the logarithms x of all parameters,

        sum (log predicted_stage(x) - log measured_stage)^2 + 0.02^2 sum (x - x_default)^2

    so that every parameter is positive, a second of one stage counts by its share of that stage,
    and the prior decides only what the stages leave open.

    Args:
        observations: at least one; stages of 0 s are left out.
        gpu: the device they are from.

    Raises:
        ConfigError: a run cannot be predicted, or a stage of it not on that device.
    """
    start = Efficiency()
    for one in observations:
        predicted = one.predict(gpu, start)
        for stage in STAGES:
            if not math.isfinite(seconds(predicted, stage)):
                raise ConfigError(
                    f"{one.name}: no {stage.replace('_', ' ')} is possible on {gpu.name} by this "
                    "model (the KV cache holds no sequence?): is it the device of this run?"
                )
    names = [field.name for field in dataclasses.fields(Efficiency)]
    default = np.log([getattr(start, name) for name in names])
    upper = np.array([0.0 if name in SHARES else math.log(1e3) for name in names])
    lower = np.minimum(default, upper) - math.log(1e4)

    def efficiency_at(point: np.ndarray) -> Efficiency:
        return Efficiency(**{name: math.exp(x) for name, x in zip(names, point, strict=True)})

    def residuals(point: np.ndarray) -> np.ndarray:
        efficiency = efficiency_at(np.minimum(point, upper))
        misses = []
        for one in observations:
            predicted = one.predict(gpu, efficiency)
            for stage in STAGES:
                if (measured := one.seconds(stage)) > 0:
                    misses.append(math.log(max(seconds(predicted, stage), _LEAST_S) / measured))
        return np.concatenate([misses, _PRIOR_WEIGHT * (point - default)])

    inside = np.clip(default, lower + 1e-6, upper - 1e-6)
    found = least_squares(residuals, inside, bounds=(lower, upper), x_scale="jac")
    fitted = efficiency_at(np.minimum(found.x, upper))
    workloads = [one.workload for one in observations]
    return Calibration(
        gpu,
        fitted,
        worst_misses(observations, gpu, fitted),
        spread=statistics.fmean(workload.spread for workload in workloads),
        clipped_share=statistics.fmean(workload.clipped_share for workload in workloads),
    )


def worst_misses(
    observations: Sequence[Observation], gpu: Gpu, efficiency: Efficiency
) -> dict[str, float]:
    """Largest |predicted / measured - 1| by stage, and for `total`."""
    worst: dict[str, float] = {}
    for one in observations:
        predicted = one.predict(gpu, efficiency)
        for stage in (*STAGES, "total"):
            if (measured := one.seconds(stage)) > 0:
                miss = abs(seconds(predicted, stage) / measured - 1)
                worst[stage] = max(worst.get(stage, 0.0), miss)
    return worst


def read_observation(
    run_dir: str | Path,
    *,
    mean_prompt_tokens: float | Callable[[Config], float],
    world_size: int | None = None,
    name: str = "",
) -> Observation:
    """The steps of a run since its newest start that has any, as its folder tells them.

    Where that start has no more than those that are left out (`_WARM_UP_STEPS`) it is the newest
    one of as many ranks that has.

    Args:
        run_dir: folder with config.toml, metrics.jsonl and timings.jsonl.
        mean_prompt_tokens: no metric has it; or what counts it in the run's data.
        world_size: ranks; None: as many as that start had.
        name: in tables; empty: the folder's.

    Raises:
        ConfigError: files or the model's config.json are missing; no step has been timed; the ranks
            are unknown, or the config's layout does not divide them.
        DataError: a line of metrics or timings is damaged.
    """
    folder = Path(run_dir)
    for needed in (CONFIG_NAME, METRICS_NAME, TIMINGS_NAME):
        if not (folder / needed).is_file():
            raise ConfigError(f"{folder}: no {needed}: not the folder of a run that has trained")
    config = load_config(folder / CONFIG_NAME)
    metrics = {
        int(row["step"]): row
        for row in read_rows(folder / METRICS_NAME)
        if "rollout/response_length/mean" in row
    }
    started, timings = _newest_start(read_rows(folder / TIMINGS_NAME), metrics.keys())
    if not timings:
        raise ConfigError(f"{folder}: no step has been timed yet")
    timings = timings[_WARM_UP_STEPS:] or timings[-1:]
    ranks = world_size or int(started.get(_WORLD_SIZE, 0)) or _ranks_by_logs(folder)
    apart = int(max(row.get(_GENERATION_RANKS, 0) for row in (started, *timings)))
    prompt = mean_prompt_tokens(config) if callable(mean_prompt_tokens) else mean_prompt_tokens
    rows = [metrics[int(row["step"])] for row in timings]
    _check_numbers(folder / METRICS_NAME, rows)
    _check_numbers(folder / TIMINGS_NAME, timings)
    tokens = [row["perf/tokens_per_s"] * row["time/step_s"] for row in timings]
    steps_s = [_whole_step_s(row) for row in timings]
    shape = Shape.of(_model_of(folder, config))
    try:
        layout = Layout.of(config, world_size=ranks - apart, num_generation=apart)
        workload = _workload(config, rows, prompt)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    return Observation(
        name=name or folder.name,
        shape=shape,
        config=config,
        layout=layout,
        workload=workload,
        measured=_measured(timings, config),
        step_s=statistics.median(steps_s),
        other_s=statistics.median(
            whole - _measured([row], config).total_s
            for whole, row in zip(steps_s, timings, strict=True)
        ),
        num_prompts=statistics.fmean(
            config.batch.rollout_prompts / (1 - row.get(_REPLACED, 0.0)) for row in rows
        ),
        num_tokens=statistics.fmean(tokens),
        tokens_per_s=statistics.median(
            num / whole for num, whole in zip(tokens, steps_s, strict=True)
        ),
    )


def _check_numbers(path: Path, rows: Sequence[_Row]) -> None:
    """Refuse numbers that no step has: most would end in a division by zero, or as infinity."""
    for row in rows:
        for key, value in row.items():
            fits = (
                0 <= value < 1 if key == _REPLACED else value > 0 if key == "time/step_s" else True
            )
            if not (fits and abs(value) < _MOST):
                raise DataError(f"{path}: step {row['step']}: {key} = {value!r}")


def _newest_start(rows: Sequence[_Row], trained: Container[int]) -> tuple[_Row, list[_Row]]:
    """The row of a start (empty: before the first one) and those of its timed steps."""
    starts: list[tuple[_Row, list[_Row]]] = [({}, [])]
    for row in rows:
        if any(key.startswith("startup/") for key in row):
            starts.append((row, []))
        elif int(row["step"]) in trained and _is_timed(row):
            starts[-1][1].append(row)
    timed = [one for one in starts if one[1]] or starts
    ranks = timed[-1][0].get(_WORLD_SIZE)
    long = [
        one for one in timed if len(one[1]) > _WARM_UP_STEPS and one[0].get(_WORLD_SIZE) == ranks
    ]
    return (long or timed)[-1]


def _is_timed(row: _Row) -> bool:
    has_generation = _TIMING_OF["generation"] in row or _SIDE in row
    return has_generation and all(key in row for key in _TIMED)


def _ranks_by_logs(folder: Path) -> int:
    """Ranks of a run without usable timings; the first log of an attempt is empty."""
    logs = [sorted(attempt.glob("rank_*.log")) for attempt in folder.glob("attempts/*/")]
    written = [one for one in logs if any(log.stat().st_size for log in one)]
    if not written:
        raise ConfigError(
            f"{folder}: ranks unknown: no start in {TIMINGS_NAME} has {_WORLD_SIZE}, no attempt "
            "has written to rank_*.log (tools/plan.py calibrate takes --processes)"
        )
    return len(max(written, key=lambda one: one[0].stat().st_mtime))


def _measured(rows: Sequence[_Row], config: Config) -> StepTime:
    """Medians: a step that something else on the machine held up does not count.

    Of a sync that not every step has, the mean. The generation side's sync is the shorter clock of
    the two: the trainer's includes the wait for a batch that is not ready.
    """
    times = {
        f"{stage}_s": statistics.median(_stage_s(row, stage) for row in rows) for stage in STAGES
    }
    if not any(_SIDE in row for row in rows):
        return StepTime(**times)
    most = config.rollout.max_staleness
    if most > 1:
        times["sync_s"] = statistics.fmean(_stage_s(row, "sync") for row in rows)
    return SidesTime(**times, max_staleness=most)


def _stage_s(row: _Row, stage: str) -> float:
    names = _TIMING_OF_SIDE if _SIDE in row else _TIMING_OF
    return row.get(names[stage], 0.0)


def _whole_step_s(row: _Row) -> float:
    """Without what is no part of every step."""
    return row["time/step_s"] - sum(row.get(f"time/{stage}_s", 0.0) for stage in _NOT_A_STEP)


def _workload(config: Config, rows: Sequence[_Row], mean_prompt_tokens: float) -> Workload:
    def mean(key: str) -> float:
        return statistics.fmean(row.get(key, 0.0) for row in rows)

    skipped = "skip/forward_token_share"
    if config.objective.needs_every_sequence:  # rows with A = 0 are not skipped
        skipped = "groups/zero_advantage_share"
    trained = max(1e-3, 1 - mean(skipped))
    head_skipped = mean("skip/head_backward_token_share")
    # Rounds of dynamic sampling draw (1 - (1 - a)^rounds) / a times as many groups as are trained
    # on, of which 1 - (1 - a)^rounds have A != 0.
    active = trained * (1 - mean(_REPLACED))
    response = mean("rollout/response_length/mean")
    longest = config.rollout.max_response_tokens
    return Workload(
        mean_prompt_tokens=mean_prompt_tokens,
        mean_response_tokens=response,
        longest_response_tokens=longest,
        active_share=active,
        clipped_share=min(1.0, max(0.0, 1 - (1 - head_skipped) / trained)),
        spread=spread_of(mean=response, longest=longest, truncated_share=mean("rollout/truncated")),
    )


def _model_of(folder: Path, config: Config) -> Any:
    """Facts of the model in `model.hf_dir`, or in the run's export: both are the same model."""
    for candidate in (Path(config.model.hf_dir), folder / "hf"):
        if (candidate / "config.json").is_file():
            return read_facts(candidate)
    raise ConfigError(
        f"{folder}: no config.json in model.hf_dir ({config.model.hf_dir}) nor in {folder / 'hf'}"
    )
