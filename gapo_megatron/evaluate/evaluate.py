"""Accuracy on held-out problems, with samples of the rollout engine."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gapo_megatron import rewards
from gapo_megatron.config import Config
from gapo_megatron.evaluate.counts import Counts, write_counts
from gapo_megatron.evaluate.pass_at_k import mean_pass_at_k
from gapo_megatron.rollout.calls import Calls
from gapo_megatron.rollout.engine import Engine
from gapo_megatron.rollout.environment import Environment
from gapo_megatron.rollout.generate import Hooks, begin_all, generate
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.types import Episode, Outcome, Prompt, Verdict

logger = logging.getLogger(__name__)


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    pool: rewards.Pool,
    environment: Environment,
    config: Config,
    calls: Calls | None = None,
    output: Path | None = None,
    should_abort: Callable[[float], bool] | None = None,
) -> dict[str, float] | None:
    """Sample every held-out problem and measure pass@1 and pass@k, overall and by level.

    The seeds of the samples depend only on the run's seed, differ from those of training and are
    the same at every evaluation: equal weights give equal figures, and differences less noise.

    Args:
        engine: holds the weights to evaluate.
        prompts: all held-out problems, the same on every rank.
        pool: workers with the verifier.
        environment: environment of the episodes, as in training.
        config: sections evaluation, rollout, run.
        calls: the environment's answers (`Acting.calls`); None: one turn.
        output: file for the counts by problem; None on ranks that write nothing.
        should_abort: see `rollout.generate.Hooks` and `rewards.score`.

    Returns:
        `eval/pass@1` and `eval/pass@{k}` for k = samples_per_prompt, also as `eval/{level}/pass@k`;
        `eval/unknown_verdicts` (share of samples), `eval/response_tokens` (mean) and
        `eval/truncated` (share). Equal on every rank; None if the evaluation was aborted.

    Collectives: those of `rollout.generate` and `Replicas.gather`, on every rank.
    """
    replicas = engine.replicas
    mine = begin_all(environment, replicas.share(prompts), calls)
    num_samples = config.evaluation.samples_per_prompt
    judging = rewards.Judging(
        pool,
        replicas.part(mine),
        judge=environment.judge,
        turns=calls.turns.messages if calls else None,
        group_size=num_samples,
    )
    settings = SamplingSettings(
        num_samples=num_samples,
        max_response_tokens=config.rollout.max_response_tokens,
        seed=evaluation_seed(config.run.seed),
        step=0,
        temperature=config.evaluation.temperature,
        top_p=config.rollout.top_p,
    )
    hooks = Hooks(on_ended=judging.add, should_abort=should_abort, shows_progress=True)
    groups = generate(engine, mine, settings, calls=calls, hooks=hooks)
    if groups is None:
        return None
    groups = replicas.part(groups)
    verdicts = rewards.score(judging, groups, gather=replicas.gather, should_abort=should_abort)
    if verdicts is None:
        return None
    _, unknown = rewards.share_unknown(verdicts, gather=replicas.gather)
    if unknown and replicas.is_first_rank:
        logger.warning("evaluation: %s", unknown)
    pairs = zip(groups, verdicts, strict=True)
    problems = replicas.gather([(_count(*pair), _lengths(pair[0])) for pair in pairs])
    counts = [count for count, _ in problems]
    if output is not None:
        write_counts(counts, output)
    return _metrics(counts, num_samples) | _response_metrics([one for _, one in problems])


def evaluation_seed(run_seed: int) -> int:
    """Seed of every evaluation of a run, of 63 bits; no training step uses it."""
    digest = hashlib.sha256(f"evaluation of run {run_seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _count(group: Sequence[Episode], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    outcomes = [verdict.outcome for verdict in verdicts]
    return {
        "id": group[0].prompt.id,
        "level": group[0].prompt.level,
        "num_samples": len(outcomes) - outcomes.count(Outcome.UNKNOWN),
        "num_correct": outcomes.count(Outcome.CORRECT),
    }


def _metrics(counts: Counts, num_samples: int) -> dict[str, float]:
    strata = {"eval": counts}
    for level in sorted({entry["level"] for entry in counts} - {""}):
        strata[f"eval/{level}"] = [entry for entry in counts if entry["level"] == level]
    metrics = {}
    for name, entries in strata.items():
        pairs = [(entry["num_samples"], entry["num_correct"]) for entry in entries]
        for k in sorted({1, num_samples}):
            value = mean_pass_at_k(pairs, k)
            if value == value:  # NaN: no problem has k known verdicts
                metrics[f"{name}/pass@{k}"] = value
    known = sum(entry["num_samples"] for entry in counts)
    metrics["eval/unknown_verdicts"] = 1 - known / max(num_samples * len(counts), 1)
    return metrics


def _lengths(group: Sequence[Episode]) -> tuple[int, int, int]:
    """Responses, their sampled tokens, truncated responses."""
    num_truncated = sum(one.truncated for one in group)
    return len(group), sum(one.num_sampled_tokens for one in group), num_truncated


def _response_metrics(lengths: Sequence[tuple[int, int, int]]) -> dict[str, float]:
    count, num_tokens, num_truncated = (
        sum(column) for column in zip((0, 0, 0), *lengths, strict=True)
    )
    return {
        "eval/response_tokens": num_tokens / max(count, 1),
        "eval/truncated": num_truncated / max(count, 1),
    }
