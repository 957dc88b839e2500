"""One batch of judged rollouts: prompts, k responses each, verdicts.

On top: dynamic sampling; against the long tail of responses over-sampling, and partial rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from gapo_megatron import rewards
from gapo_megatron.config import BatchConfig, Config
from gapo_megatron.data.source import PromptSource
from gapo_megatron.launch.attempt import Attempt
from gapo_megatron.metrics import Stopwatch
from gapo_megatron.rollout import RolloutEngine
from gapo_megatron.types import Group, OpenGroup, Prompt


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step samples; the same on every rank."""

    groups: list[Group]
    """Of `batch.rollout_prompts` prompts: what is learned from."""
    open_groups: list[OpenGroup]
    """What the next step goes on with; what this one has sampled of them is not `carried` yet."""
    metrics: dict[str, float]
    """Over all groups, those that dynamic sampling replaced included."""


def sample(
    engine: RolloutEngine,
    source: PromptSource,
    pool: rewards.Pool,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    *,
    open_groups: Sequence[OpenGroup] = (),
    attempt: Attempt,
    stopwatch: Stopwatch,
    step: int,
) -> Sampled | None:
    """Draw prompts, generate k rollouts of each, and judge them.

    A group whose valid rollouts all have the same reward has A = 0 throughout: nothing is learned
    from it. With `batch.dynamic_sampling_rounds` (DAPO's dynamic sampling) such groups are replaced
    by those of the next prompts, as often as that; what then is missing is filled up with the first
    of those that were replaced.

    With `batch.oversampling` more prompts are begun than are wanted. Each engine ends with its
    share of groups, all k responses of them whole; the problems that it breaks off are given back.
    With `batch.partial_rollouts` they are kept open instead: the next draw goes on with them, and
    takes so many problems less from the source.

    Args:
        engine: awake, at the weights of `step`.
        source: drawn from; where it stands belongs to the step only if this one succeeds.
        pool: judges.
        tokenizer: of the policy.
        config: of the run.
        open_groups: of the step before; the same on every rank.
        attempt: may ask to break off.
        stopwatch: counts the stages `rollout` and `reward`.
        step: seeds the samples, with the run's seed and the prompt's id.

    Returns:
        The batch; None, on every rank, if generation or judging was broken off.

    Collectives: per round those of `RolloutEngine.generate`, of `rewards.score`, a gather of the
    groups and, with partial rollouts, one of the open ones.
    """
    wanted, most_rounds = config.batch.rollout_prompts, config.batch.dynamic_sampling_rounds
    groups: list[Group] = []
    opened = list(open_groups)
    drawn = [group.prompt for group in opened]
    num_rounds = 0
    taken_s = there_s = 0.0
    while num_rounds <= most_rounds:
        missing = wanted - sum(map(is_informative, groups))
        if missing <= 0:
            break
        num_new = max(num_begun(config.batch, missing) - len(opened), 0)
        prompts = source.next_batch(num_new, drawn=drawn)
        drawn += prompts
        judged = _judge(
            engine,
            prompts,
            opened,
            missing,
            pool,
            tokenizer,
            config,
            attempt=attempt,
            stopwatch=stopwatch,
            step=step,
        )
        if judged is None:
            return None
        whole, opened = judged
        groups += whole
        num_rounds += 1
        taken_s, there_s = taken_s + engine.places[0], there_s + engine.places[1]
    kept = {group.prompt.id for group in groups} | {group.prompt.id for group in opened}
    source.give_back([prompt for prompt in drawn if prompt.id not in kept])
    # No place was there if all that was wanted had been finished by the step before.
    stopwatch.notes["perf/rollout_idle_share"] = 1 - taken_s / there_s if there_s else 0.0
    metrics = _metrics(groups)
    if most_rounds:
        metrics["rollout/sampling_rounds"] = float(num_rounds)
        metrics["rollout/replaced_group_share"] = 1 - wanted / len(groups)
    if config.batch.oversampling > 1:
        metrics["rollout/broken_off_group_share"] = 1 - len(groups) / len(drawn)
    if config.batch.partial_rollouts:
        metrics |= _carried_metrics(groups, step)
    return Sampled(choose(groups, wanted), opened, metrics)


def num_begun(batch: BatchConfig, wanted: int) -> int:
    """Prompts to begin for `wanted` groups."""
    return math.ceil(wanted * batch.oversampling)


def most_drawn(batch: BatchConfig) -> int:
    """Prompts that one step may draw; all different."""
    return num_begun(batch, batch.rollout_prompts) * (1 + batch.dynamic_sampling_rounds)


def is_informative(group: Group) -> bool:
    """Whether valid rollouts differ in their reward: otherwise A = 0 for all of them."""
    return len({reward for reward in group.rewards if reward == reward}) > 1


def choose(groups: Sequence[Group], wanted: int) -> list[Group]:
    """`wanted` groups in the order drawn: the first informative ones, then the first others."""
    by_worth = sorted(range(len(groups)), key=lambda i: not is_informative(groups[i]))
    return [groups[i] for i in sorted(by_worth[:wanted])]


def _judge(
    engine: RolloutEngine,
    prompts: list[Prompt],
    open_groups: list[OpenGroup],
    wanted: int,
    pool: rewards.Pool,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    *,
    attempt: Attempt,
    stopwatch: Stopwatch,
    step: int,
) -> tuple[list[Group], list[OpenGroup]] | None:
    """Rollouts of `wanted` of prompts and open groups, and their verdicts; what is open then.

    The same on every rank.
    """
    partial = config.batch.partial_rollouts
    with stopwatch("rollout"):
        prompts = [*prompts, *(group.prompt for group in open_groups)]
        mine, spare = engine.share(prompts[:wanted]), engine.share(prompts[wanted:])
        num_groups = len(mine)
        # Those that are open come last, so every engine has some of them; there they go first.
        mine = spare + mine
        rollouts = engine.generate(
            mine,
            num_groups=num_groups,
            begun={group.prompt.id: group.rollouts for group in open_groups},
            keep_open=partial,
            num_samples=config.batch.rollouts_per_prompt,
            seed=config.run.seed,
            step=step,
            max_response_tokens=config.rollout.max_response_tokens,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            progress=True,
            should_abandon=attempt.patience(stopwatch.expect("rollout")),
        )
    if rollouts is None:
        return None
    with stopwatch("reward"):
        pairs = [pair for pair in zip(mine, rollouts, strict=True) if pair[1]]
        is_whole = [all(rollout.finished for rollout in group) for _, group in pairs]
        # Of more than are wanted that end together the last ones stay open, finished as they are.
        chosen = [i for i, whole in enumerate(is_whole) if whole][:num_groups]
        left = [OpenGroup(*pair) for i, pair in enumerate(pairs) if i not in chosen]
        whole = engine.part([pairs[i] for i in chosen])
        mine, rollouts = [prompt for prompt, _ in whole], [group for _, group in whole]
        verdicts = rewards.score(
            pool,
            mine,
            rollouts,
            tokenizer=tokenizer,
            gather=engine.gather,
            should_abandon=attempt.patience(stopwatch.expect("reward")),
        )
        if verdicts is None:
            return None
        judged = engine.gather([Group(*one) for one in zip(mine, rollouts, verdicts, strict=True)])
        return judged, engine.gather(engine.part(left)) if partial else []


def _carried_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    versions = [rollout.carried.versions for rollout in rollouts if rollout.carried]
    oldest = min((int(one[0]) for one in versions), default=step)
    num_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    return {
        "rollout/carried_token_share": sum(map(len, versions)) / num_tokens,
        "rollout/oldest_version_gap": float(step - oldest),
    }


def _metrics(groups: Sequence[Group]) -> dict[str, float]:
    rewards_known = [r for group in groups for r in group.rewards if r == r]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "reward/mean": sum(rewards_known) / max(len(rewards_known), 1),
        "rollout/response_length/mean": sum(len(r.token_ids) for r in rollouts) / len(rollouts),
        "rollout/truncated": sum(r.truncated for r in rollouts) / len(rollouts),
    }
