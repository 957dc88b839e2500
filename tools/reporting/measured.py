"""Measured steps of a run, read from its folder: seconds by stage, tokens and lengths."""

from __future__ import annotations

import statistics
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gapo_megatron.config import CONFIG_NAME, Config, load_recorded
from gapo_megatron.config.counts import check_world_size
from gapo_megatron.errors import ConfigError
from gapo_megatron.io.metric_files import METRICS_NAME, TIMINGS_NAME, read_rows
from gapo_megatron.models.config_json import read_facts
from gapo_tools.planner.flops import Shape
from gapo_tools.planner.workload import Workload, spread_of

STAGES = ("generation", "reward", "old_log_probs", "update", "sync")
"""Stages of a step that a scaling study tells apart."""
_TIMING_OF = {stage: f"time/{stage}_s" for stage in STAGES} | {"generation": "time/rollout_s"}
_SIDE = "generation/rollout_s"
"""Metric of a step whose batch came from generation ranks, which timed it."""
_TIMING_OF_SIDE = _TIMING_OF | {
    "generation": _SIDE,
    "reward": "generation/reward_s",
    "sync": "generation/sync_s",
}
_TIMED = ("time/step_s", "perf/tokens_per_s")
"""Metrics that every timed step has, besides one of generation."""
_WORLD_SIZE, _GENERATION_RANKS = "perf/world_size", "perf/generation_ranks"
_NOT_A_STEP = ("evaluate", "checkpoint", "rounding")
_WARM_UP_STEPS = 2
"""First steps that are left out if a run has more: compilation, first allocations."""
_REPLACED = "rollout/replaced_group_share"
_Row = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured steps of a run: seconds by stage (medians) and their workload (means)."""

    name: str
    shape: Shape
    config: Config
    num_training: int
    """Ranks that train."""
    num_generation: int
    """Ranks that only generate; 0: colocated."""
    workload: Workload | None
    """None: the mean prompt length is unknown."""
    stages: dict[str, float]
    """Seconds of each of `STAGES`: medians; of a sync that not every step has, the mean."""
    step_s: float
    """Seconds of a step without evaluation, checkpoints and noise-floor measurements; a median."""
    other_s: float
    """Seconds of a step that belong to no stage: putting vLLM to sleep, the batching plan, the
    rest. A median of its own, so not exactly the difference of the other medians. 0 where training
    and generation overlap (`rollout.max_staleness` > 0)."""
    num_prompts: float
    """Prompts of a step, including those that dynamic sampling replaced; a mean."""
    tokens_per_s: float
    """Response tokens per second of a step, as `perf/tokens_per_s` counts them; a median."""

    @property
    def num_ranks(self) -> int:
        return self.num_training + self.num_generation


def read_measured(folder: Path, *, mean_prompt_tokens: float | None, name: str) -> Measured:
    """Read the measured steps of a run's newest start that has any.

    Args:
        folder: has config.toml, metrics.jsonl and timings.jsonl.
        mean_prompt_tokens: mean prompt length, which no metric holds; None: no workload.
        name: name for tables.

    Raises:
        ConfigError: files or the model's config.json are missing; no step was timed; the number of
            ranks is unknown, or a parallel size does not divide it.
        DataError: a line of metrics or timings is damaged.
    """
    # The newest start with timed steps, without its warm-up.
    for needed in (CONFIG_NAME, METRICS_NAME, TIMINGS_NAME):
        if not (folder / needed).is_file():
            raise ConfigError(f"{folder} has no {needed}: it is not the folder of a trained run")
    config = load_recorded(folder / CONFIG_NAME)
    metrics = {
        int(row["step"]): row
        for row in read_rows(folder / METRICS_NAME)
        if "rollout/response_length/mean" in row
    }
    started, timings = _newest_start(read_rows(folder / TIMINGS_NAME), metrics.keys())
    if not timings:
        raise ConfigError(f"{folder}: no step has been timed yet")
    timings = timings[_WARM_UP_STEPS:] or timings[-1:]

    # Ranks and lengths of these steps.
    ranks = int(started.get(_WORLD_SIZE, 0))
    if not ranks:
        raise ConfigError(f"{folder}: number of ranks unknown: {TIMINGS_NAME} has no {_WORLD_SIZE}")
    apart = int(max(row.get(_GENERATION_RANKS, 0) for row in (started, *timings)))
    rows = [metrics[int(row["step"])] for row in timings]
    try:
        check_world_size(config.parallel, ranks - apart)
        workload = None
        if mean_prompt_tokens is not None:
            workload = _workload(config, rows, mean_prompt_tokens)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None

    # Their times.
    tokens = [row["perf/tokens_per_s"] * row["time/step_s"] for row in timings]
    steps_s = [_whole_step_s(row) for row in timings]
    by_step = [_stages(row) for row in timings]
    overlaps = apart > 0 and config.rollout.max_staleness > 0
    stages = {stage: statistics.median(one[stage] for one in by_step) for stage in STAGES}
    if apart and config.rollout.max_staleness > 1:  # not every step has a sync
        stages["sync"] = statistics.fmean(one["sync"] for one in by_step)
    others_s = [w - sum(one.values()) for w, one in zip(steps_s, by_step, strict=True)]
    return Measured(
        name=name,
        shape=Shape.of(read_facts(config.model.hf_dir)),
        config=config,
        num_training=ranks - apart,
        num_generation=apart,
        workload=workload,
        stages=stages,
        step_s=statistics.median(steps_s),
        other_s=0.0 if overlaps else statistics.median(others_s),
        num_prompts=statistics.fmean(
            config.batch.rollout_prompts / (1 - row.get(_REPLACED, 0.0)) for row in rows
        ),
        tokens_per_s=statistics.median(n / s for n, s in zip(tokens, steps_s, strict=True)),
    )


def _newest_start(rows: Sequence[_Row], trained: Container[int]) -> tuple[_Row, list[_Row]]:
    """The row of the newest start with timed steps (empty if none was logged), and these steps."""
    starts: list[tuple[_Row, list[_Row]]] = [({}, [])]
    for row in rows:
        if any(key.startswith("startup/") for key in row):
            starts.append((row, []))
        elif int(row["step"]) in trained and _is_timed(row):
            starts[-1][1].append(row)
    return ([one for one in starts if one[1]] or starts)[-1]


def _is_timed(row: _Row) -> bool:
    has_generation = _TIMING_OF["generation"] in row or _SIDE in row
    return has_generation and all(key in row for key in _TIMED)


def _stages(row: _Row) -> dict[str, float]:
    """Seconds of a step by stage.

    With generation ranks, generation, verdicts and sync are by their clock: the trainer's also
    counts the wait for an unfinished batch.
    """
    names = _TIMING_OF_SIDE if _SIDE in row else _TIMING_OF
    return {stage: row.get(names[stage], 0.0) for stage in STAGES}


def _whole_step_s(row: _Row) -> float:
    """Seconds of a step without stages that only some steps have."""
    return row["time/step_s"] - sum(row.get(f"time/{stage}_s", 0.0) for stage in _NOT_A_STEP)


def _workload(config: Config, rows: Sequence[_Row], mean_prompt_tokens: float) -> Workload:
    def mean(key: str) -> float:
        return statistics.fmean(row.get(key, 0.0) for row in rows)

    skipped = "skip/forward_token_share"
    if config.objective.needs_every_sequence:  # rows with A = 0 are not skipped
        skipped = "groups/zero_advantage_share"
    trained = max(1e-3, 1 - mean(skipped))
    head_skipped = mean("skip/head_backward_token_share")
    # Dynamic sampling draws (1 - (1 - a)^rounds) / a times as many groups as it trains on, and a
    # share 1 - (1 - a)^rounds of the trained ones has A != 0.
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
