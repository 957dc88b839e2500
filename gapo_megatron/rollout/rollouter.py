"""One batch of judged rollouts: prompts, k responses each, verdicts.

On top: dynamic sampling; against the long tail of responses over-sampling, and partial rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from gapo_megatron import rewards
from gapo_megatron.clock import Patient, Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.config.counts import num_begun
from gapo_megatron.data.source import PromptSource
from gapo_megatron.errors import DataError
from gapo_megatron.rollout.progress import Occupancy
from gapo_megatron.rollout.vllm import RolloutEngine, request_seed
from gapo_megatron.types import Group, OpenGroup, Prompt, Rollout


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step samples; the same on every rank."""

    groups: list[Group]
    """Of `batch.rollout_prompts` prompts: what is learned from."""
    open_groups: list[OpenGroup]
    """What the next step goes on with; what this one has sampled of them is not `carried` yet."""
    metrics: dict[str, float]
    """Over all groups, those that dynamic sampling replaced included."""


def check_problems(problems: Sequence[Prompt], config: Config) -> None:
    """Refuse a dataset that holds fewer problems than one step may draw: they are all different.

    Raises:
        DataError: says what the number is made of.
    """
    batch = config.batch
    rounds = batch.dynamic_sampling_rounds
    most = num_begun(batch, batch.rollout_prompts) * (1 + rounds)
    if len(problems) < most:
        factors = f"batch.rollout_prompts ({batch.rollout_prompts})"
        if batch.oversampling > 1:
            factors += f" x batch.oversampling ({batch.oversampling:g})"
        if rounds:
            factors += f", up to 1 + batch.dynamic_sampling_rounds ({rounds}) times"
        raise DataError(
            f"one step may draw {most} different problems: {factors}; {config.data.train_path} "
            f"holds {len(problems)} problems"
        )


def sample(
    engine: RolloutEngine,
    source: PromptSource,
    pool: rewards.Pool,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    *,
    open_groups: Sequence[OpenGroup] = (),
    attempt: Patient,
    stopwatch: Stopwatch,
    step: int,
) -> Sampled | None:
    """Draw prompts, generate k rollouts of each, and judge each as soon as it has ended.

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
        stopwatch: counts the stages `rollout` and `reward`: what judging takes beyond it.
        step: seeds the samples, with the run's seed and the prompt's id.

    Returns:
        The batch; None, on every rank, if generation or judging was broken off.

    Collectives: per round those of `RolloutEngine.generate`, of `rewards.score`, and a gather of
    the groups.
    """
    wanted, most_rounds = config.batch.rollout_prompts, config.batch.dynamic_sampling_rounds
    groups: list[Group] = []
    opened = list(open_groups)
    drawn = [group.prompt for group in opened]
    num_rounds = num_lost_tokens = 0
    occupancy = Occupancy()
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
            occupancy=occupancy,
            step=step,
        )
        if judged is None:
            return None
        groups += judged.groups
        opened = judged.open_groups
        num_lost_tokens += judged.num_lost_tokens
        num_rounds += 1
    if config.batch.oversampling > 1:
        # They come engine by engine, those that were open first: mini-batches in that order would
        # be of old groups alone or of new ones alone, as the layout has it.
        seed = config.run.seed
        groups.sort(key=lambda group: request_seed(seed, step, group.prompt.id, 0))
    kept = {group.prompt.id for group in groups} | {group.prompt.id for group in opened}
    source.give_back([prompt for prompt in drawn if prompt.id not in kept])
    stopwatch.notes["perf/rollout_idle_share"] = occupancy.idle_share
    metrics = _metrics(groups)
    if most_rounds:
        metrics["rollout/sampling_rounds"] = float(num_rounds)
        metrics["rollout/replaced_group_share"] = 1 - wanted / len(groups)
    if config.batch.partial_rollouts:
        metrics |= _carried_metrics(groups, step)
    elif config.batch.oversampling > 1:
        kept_tokens = sum(_num_tokens(group.rollouts) for group in groups)
        metrics["rollout/lost_token_share"] = num_lost_tokens / (num_lost_tokens + kept_tokens)
    return Sampled(choose(groups, wanted), opened, metrics)


def is_informative(group: Group) -> bool:
    """Whether valid rollouts differ in their reward: otherwise A = 0 for all of them."""
    return len({reward for reward in group.rewards if reward == reward}) > 1


def choose(groups: Sequence[Group], wanted: int) -> list[Group]:
    """`wanted` groups in their order: the first informative ones, then the first others."""
    by_worth = sorted(range(len(groups)), key=lambda i: not is_informative(groups[i]))
    return [groups[i] for i in sorted(by_worth[:wanted])]


@dataclass(frozen=True, slots=True)
class _Judged:
    """What one draw brings; the same on every rank."""

    groups: list[Group]
    open_groups: list[OpenGroup]
    num_lost_tokens: int
    """Of groups that are broken off and do not stay open."""


def _judge(
    engine: RolloutEngine,
    prompts: list[Prompt],
    open_groups: list[OpenGroup],
    wanted: int,
    pool: rewards.Pool,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    *,
    attempt: Patient,
    stopwatch: Stopwatch,
    occupancy: Occupancy,
    step: int,
) -> _Judged | None:
    """Rollouts of `wanted` of prompts and open groups, and their verdicts."""
    with stopwatch("rollout"):
        # Those that are open come last, so every engine has some of them; there they go first.
        prompts = [*prompts, *(group.prompt for group in open_groups)]
        wanted_here, spare = engine.share(prompts[:wanted]), engine.share(prompts[wanted:])
        begun = {group.prompt.id: group.rollouts for group in open_groups}
        mine = sorted(wanted_here + spare, key=lambda prompt: prompt.id not in begun)
        # Settled before any response ends, by problem: the slices still make up all in order.
        judged_here = engine.part(range(len(mine)))
        judging = rewards.Judging(pool, [mine[i] for i in judged_here], tokenizer=tokenizer)
        rollouts = engine.generate(
            mine,
            num_groups=len(wanted_here),
            begun=begun,
            num_samples=config.batch.rollouts_per_prompt,
            seed=config.run.seed,
            step=step,
            max_response_tokens=config.rollout.max_response_tokens,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            progress=True,
            occupancy=occupancy,
            on_ended=judging.add,
            should_abandon=attempt.patience(stopwatch.expect("rollout")),
        )
    if rollouts is None:
        return None
    with stopwatch("reward"):
        whole = [i for i, group in enumerate(rollouts) if all(one.finished for one in group)]
        # Of more than are wanted that end together the last ones are left, finished as they are.
        kept = whole[: len(wanted_here)]
        my_kept = [i for i in judged_here if i in kept]
        my_left = [i for i in judged_here if i not in kept]
        prompts, responses = [mine[i] for i in my_kept], [rollouts[i] for i in my_kept]
        verdicts = rewards.score(
            judging,
            prompts,
            responses,
            gather=engine.gather,
            should_abandon=attempt.patience(stopwatch.expect("reward")),
        )
        if verdicts is None:
            return None
        groups = [Group(*one) for one in zip(prompts, responses, verdicts, strict=True)]
        opened, num_lost_tokens = [], 0
        if config.batch.partial_rollouts:
            opened = [OpenGroup(mine[i], rollouts[i]) for i in my_left]
        else:
            num_lost_tokens = sum(_num_tokens(rollouts[i]) for i in my_left)
        parts = engine.gather([_Judged(groups, opened, num_lost_tokens)])
    return _Judged(
        [group for part in parts for group in part.groups],
        [group for part in parts for group in part.open_groups],
        sum(part.num_lost_tokens for part in parts),
    )


def _num_tokens(rollouts: Sequence[Rollout]) -> int:
    return sum(len(rollout.token_ids) for rollout in rollouts)


def _carried_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    carried = [rollout.carried for rollout in rollouts if rollout.carried]
    num_carried = sum(len(one.old_log_probs) for one in carried)
    oldest = min((one.oldest_version for one in carried), default=step)
    return {
        "rollout/carried_token_share": num_carried / _num_tokens(rollouts),
        "rollout/oldest_version_gap": float(step - oldest),
    }


def _metrics(groups: Sequence[Group]) -> dict[str, float]:
    rewards_known = [r for group in groups for r in group.rewards if r == r]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "reward/mean": sum(rewards_known) / max(len(rewards_known), 1),
        "rollout/response_length/mean": _num_tokens(rollouts) / len(rollouts),
        "rollout/truncated": sum(r.truncated for r in rollouts) / len(rollouts),
    }
