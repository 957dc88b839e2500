"""One batch of judged rollouts: prompts, k episodes each, verdicts.

On top: dynamic sampling, and against the long tail of responses over-sampling and partial rollouts.
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
from gapo_megatron.rollout.engine import Engine
from gapo_megatron.rollout.environment import Environment
from gapo_megatron.rollout.environments.one_turn import OneTurn
from gapo_megatron.rollout.generate import Watch, begin, generate
from gapo_megatron.rollout.progress import Occupancy
from gapo_megatron.rollout.requests import SamplingSettings, num_sampled, request_seed
from gapo_megatron.types import Group, OpenGroup, Prompt


@dataclass(frozen=True, slots=True)
class Sampled:
    """Rollouts that a step learns from; the same on every rank."""

    groups: list[Group]
    """Judged groups, `batch.rollout_prompts` of them."""
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


def is_informative(group: Group) -> bool:
    """Whether valid rollouts differ in their reward: otherwise A = 0 for all of them."""
    return len({reward for reward in group.rewards if reward == reward}) > 1


def choose(groups: Sequence[Group], wanted: int) -> list[Group]:
    """`wanted` groups in their order: the first informative ones, then the first others."""
    by_worth = sorted(range(len(groups)), key=lambda i: not is_informative(groups[i]))
    return [groups[i] for i in sorted(by_worth[:wanted])]


class Rollouter:
    """Draws prompts, drives their episodes, and has each judged as soon as it has ended.

    A group whose valid rollouts all have the same reward has A = 0 throughout: nothing is learned
    from it. With `batch.dynamic_sampling_rounds` (DAPO's dynamic sampling) such groups are replaced
    by those of the next prompts, as often as that; what then is missing is filled up with the first
    of those that were replaced.

    With `batch.oversampling` more prompts are begun than are wanted. Each engine ends with its
    share of groups, all k responses of them whole; the problems that it breaks off are given back.
    With `batch.partial_rollouts` they are kept open instead: the next `collect` goes on with them,
    and takes so many problems less from the source.

    Attributes:
        open_groups: groups that the next `collect` resumes, the same on every rank. A step that
            has collected leaves those there that it has broken off; before the weights move,
            `learn.carry` must make their new tokens `carried`, and set the attribute.
        environment: the episodes' environment.
    """

    def __init__(
        self,
        engine: Engine,
        source: PromptSource,
        pool: rewards.Pool,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        *,
        environment: Environment | None = None,
    ) -> None:
        """Set up sampling; nothing is drawn yet.

        Args:
            engine: generates; awake, at the weights of the step, whenever `collect` is called.
            source: source that prompts are drawn from.
            pool: workers with the verifier.
            tokenizer: the policy's tokenizer, for the default environment.
            config: sections batch, rollout, run.
            environment: the episodes' environment; default: one turn (`OneTurn`).
        """
        self.open_groups: list[OpenGroup] = []
        self.environment: Environment = environment or OneTurn(tokenizer)
        self._engine = engine
        self._source = source
        self._pool = pool
        self._config = config

    def collect(self, step: int, *, attempt: Patient, stopwatch: Stopwatch) -> Sampled | None:
        """Sample and judge `batch.rollout_prompts` groups.

        Args:
            step: seeds the samples, with the run's seed and the prompt's id.
            attempt: may ask to break off.
            stopwatch: counts the stages `rollout` and `reward`: what judging takes beyond it. Notes
                how idle the engines were.

        Returns:
            The batch; None, on every rank, if generation or judging was broken off: then
            `open_groups` are as before, but where the source stands no longer belongs to the step.

        Collectives: per round those of `rollout.generate`, of `rewards.score`, and a gather of the
        groups.
        """
        batch = self._config.batch
        wanted, most_rounds = batch.rollout_prompts, batch.dynamic_sampling_rounds
        groups: list[Group] = []
        opened = self.open_groups
        drawn = [group.prompt for group in opened]
        num_rounds = num_lost_tokens = 0
        now = _Step(step, attempt, stopwatch, Occupancy())
        while num_rounds <= most_rounds:
            missing = wanted - sum(map(is_informative, groups))
            if missing <= 0:
                break
            num_new = max(num_begun(batch, missing) - len(opened), 0)
            prompts = self._source.next_batch(num_new, drawn=drawn)
            drawn += prompts
            judged = self._draw(prompts, opened, missing, now)
            if judged is None:
                return None
            groups += judged.groups
            opened = judged.open_groups
            num_lost_tokens += judged.num_lost_tokens
            num_rounds += 1
        if batch.oversampling > 1:
            # They come engine by engine, those that were open first: mini-batches in that order
            # would be of old groups alone or of new ones alone, as the layout has it.
            seed = self._config.run.seed
            groups.sort(key=lambda group: request_seed(seed, step, group.prompt.id, 0))
        kept = {group.prompt.id for group in groups} | {group.prompt.id for group in opened}
        self._source.give_back([prompt for prompt in drawn if prompt.id not in kept])
        self.open_groups = opened
        stopwatch.notes["perf/rollout_idle_share"] = now.occupancy.idle_share
        metrics = _metrics(groups)
        if most_rounds:
            metrics["rollout/sampling_rounds"] = float(num_rounds)
            metrics["rollout/replaced_group_share"] = 1 - wanted / len(groups)
        if batch.partial_rollouts:
            metrics |= _carried_metrics(groups, step)
        elif batch.oversampling > 1:
            kept_tokens = _num_tokens(groups)
            metrics["rollout/lost_token_share"] = num_lost_tokens / (num_lost_tokens + kept_tokens)
        return Sampled(choose(groups, wanted), metrics)

    def _draw(
        self, prompts: list[Prompt], open_groups: Sequence[OpenGroup], wanted: int, now: _Step
    ) -> _Judged | None:
        """One round: rollouts of `wanted` of prompts and open groups, and their verdicts."""
        engine, stopwatch = self._engine, now.stopwatch
        with stopwatch("rollout"):
            # Those that are open come last, so every engine has some; there they go first.
            everything = [*prompts, *(group.prompt for group in open_groups)]
            wanted_here = engine.replicas.share(everything[:wanted])
            spare = engine.replicas.share(everything[wanted:])
            begun = {group.prompt.id: group.rollouts for group in open_groups}
            mine = sorted(wanted_here + spare, key=lambda prompt: prompt.id not in begun)
            mine = [one if one.id in begun else begin(self.environment, one) for one in mine]
            # Settled before any response ends, by problem: the slices still make up all in order.
            judged_here = engine.replicas.part(range(len(mine)))
            judging = rewards.Judging(
                self._pool, [mine[i] for i in judged_here], judge=self.environment.judge
            )
            rollouts = generate(
                engine,
                mine,
                self._settings(now.step),
                respond=self.environment.respond,
                begun=begun,
                num_groups=len(wanted_here),
                watch=Watch(
                    on_ended=judging.add,
                    should_abandon=now.attempt.patience(stopwatch.expect("rollout")),
                    occupancy=now.occupancy,
                    shows_progress=True,
                ),
            )
        if rollouts is None:
            return None
        with stopwatch("reward"):
            groups = [OpenGroup(*one) for one in zip(mine, rollouts, strict=True)]
            whole = [i for i, group in enumerate(groups) if is_whole(group)]
            # Of more than are wanted that end together the last are left, finished as they are.
            kept = whole[: len(wanted_here)]
            return self._judge(
                judging,
                [groups[i] for i in judged_here if i in kept],
                [groups[i] for i in judged_here if i not in kept],
                now,
            )

    def _judge(
        self, judging: rewards.Judging, kept: list[OpenGroup], left: list[OpenGroup], now: _Step
    ) -> _Judged | None:
        """Wait for this rank's verdicts, and bring the groups of all ranks together."""
        prompts, rollouts = [one.prompt for one in kept], [one.rollouts for one in kept]
        verdicts = rewards.score(
            judging,
            prompts,
            rollouts,
            gather=self._engine.replicas.gather,
            should_abandon=now.attempt.patience(now.stopwatch.expect("reward")),
        )
        if verdicts is None:
            return None
        groups = [Group(*one) for one in zip(prompts, rollouts, verdicts, strict=True)]
        stay_open = self._config.batch.partial_rollouts
        num_lost_tokens = 0 if stay_open else _num_tokens(left)
        parts = self._engine.replicas.gather(
            [_Judged(groups, left if stay_open else [], num_lost_tokens)]
        )
        return _Judged(
            [group for part in parts for group in part.groups],
            [group for part in parts for group in part.open_groups],
            sum(part.num_lost_tokens for part in parts),
        )

    def _settings(self, step: int) -> SamplingSettings:
        rollout = self._config.rollout
        return SamplingSettings(
            num_samples=self._config.batch.rollouts_per_prompt,
            max_response_tokens=rollout.max_response_tokens,
            seed=self._config.run.seed,
            step=step,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """Values shared by the rounds of one step."""

    step: int
    attempt: Patient
    stopwatch: Stopwatch
    occupancy: Occupancy


@dataclass(frozen=True, slots=True)
class _Judged:
    """Result of one round; the same on every rank once gathered."""

    groups: list[Group]
    open_groups: list[OpenGroup]
    num_lost_tokens: int
    """Sampled for groups that are broken off and do not stay open."""


def is_whole(group: OpenGroup) -> bool:
    """Whether all responses are finished."""
    return all(rollout.finished for rollout in group.rollouts)


def _num_tokens(groups: Sequence[Group | OpenGroup]) -> int:
    """Number of tokens that the model sampled."""
    return sum(num_sampled(rollout) for group in groups for rollout in group.rollouts)


def _carried_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    num_carried = sum(
        num_sampled(one, len(one.carried.old_log_probs)) for one in rollouts if one.carried
    )
    oldest = min((one.carried.oldest_version for one in rollouts if one.carried), default=step)
    return {
        "rollout/carried_token_share": num_carried / _num_tokens(groups),
        "rollout/oldest_version_gap": float(step - oldest),
    }


def _metrics(groups: Sequence[Group]) -> dict[str, float]:
    rewards_known = [r for group in groups for r in group.rewards if r == r]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "reward/mean": sum(rewards_known) / max(len(rewards_known), 1),
        "rollout/response_length/mean": _num_tokens(groups) / len(rollouts),
        "rollout/truncated": sum(r.truncated for r in rollouts) / len(rollouts),
    }
