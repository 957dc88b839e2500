"""A batch of judged rollouts: prompts, k episodes each, verdicts.

Also dynamic sampling, and for the long tail of responses over-sampling and partial rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gapo_megatron import rewards
from gapo_megatron.clock import Patient, Stopwatch
from gapo_megatron.config import BatchConfig, RewardConfig
from gapo_megatron.config.counts import num_begun
from gapo_megatron.data.source import PromptSource
from gapo_megatron.exchange import Channel, deal_tokens, gather_tokens
from gapo_megatron.rollout.call_metrics import (
    Sums,
    call_metrics,
    count_drafts,
    draft_metrics,
    join_sums,
    sum_calls,
)
from gapo_megatron.rollout.calls import Acting, Calls
from gapo_megatron.rollout.engine import Engine
from gapo_megatron.rollout.generate import Hooks, begin_all, generate
from gapo_megatron.rollout.journal import evaluation_name, step_name
from gapo_megatron.rollout.progress import Occupancy
from gapo_megatron.rollout.replicas import assign
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.samples import Samples
from gapo_megatron.rollout.selection import (
    choose,
    informative,
    observe,
    rollout_metrics,
    shuffled,
    source_metrics,
)
from gapo_megatron.rollout.table import to_episodes, to_rollouts
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Episode, Outcome, Prompt, Verdict

_TAG = 1
"""Tag of messages with the tokens of open groups."""


class Rollouter:
    """Draws prompts, runs their episodes, and sends each to a verifier as soon as it has ended.

    A group whose valid rollouts all have the same reward has A = 0 throughout and teaches nothing
    (with `Method.virtual_correct` if all are correct).
    With `batch.dynamic_sampling_rounds` (DAPO's dynamic sampling) such groups are replaced
    by those of the next prompts, in at most that many rounds; if groups are still missing, the
    first of the replaced groups fill the batch.

    With `batch.oversampling` more prompts are begun than are needed. Each engine stops once its
    share of groups is complete; the problems of aborted groups are returned to the source. With
    `batch.partial_rollouts` all engines stop together (`progress.Tally`) once they have enough
    groups between them, of which the oldest are taken. The others stay open: the next `collect`
    continues them, and draws that many fewer problems.

    Attributes:
        open_groups: groups that the next `collect` continues; each rank has some of the tokens.
            `collect` puts its aborted groups here. Before the next `collect` their tokens must
            become carried ones, and the attribute be set: by `checks.carry`, before the next
            update, with old log-probs; or, on ranks that only generate, by `Rollouts.carried`.
        environment: the episodes' environment.
        samples: takes some responses of each step as text; None (the default): none.
        counts_drafts: whether the metrics have the acceptance of draft tokens; False by default.
        virtual_correct: `Method.virtual_correct`; 0 by default.
        num_discarded_tokens: tokens sampled in the last `collect`, if it was aborted; counted on
            the first rank of a replica.
    """

    def __init__(
        self,
        engine: Engine,
        source: PromptSource,
        pool: rewards.Pool,
        acting: Acting,
        *,
        batch: BatchConfig,
        sampling: SamplingSettings,
        reward: RewardConfig,
    ) -> None:
        """Set up sampling, without drawing prompts yet.

        Args:
            engine: generates; awake, at the weights of the step, whenever `collect` is called.
            source: source of prompts.
            pool: verifier workers.
            acting: the episodes' environment, and how it is called.
            batch: section `batch`.
            sampling: sampling settings; `collect` sets the step.
            reward: section `reward`; reads `truncated`, `graded` and limits on unknown verdicts.
        """
        self.open_groups = Rollouts.join([])
        self.environment = acting.environment
        self.samples: Samples | None = None
        self.counts_drafts = False
        self.virtual_correct = 0
        self.num_discarded_tokens = 0
        self._engine = engine
        self._source = source
        self._pool = pool
        self._batch = batch
        self._sampling = sampling
        self._reward = reward
        self._acting = acting
        self._unknown = rewards.UnknownWatch(reward)

    def collect(self, step: int, *, attempt: Patient, stopwatch: Stopwatch) -> Rollouts | None:
        """Sample and judge `batch.rollout_prompts` groups.

        Args:
            step: part of the seed of samples, with the run's seed and the prompt's id.
            attempt: may ask to abort.
            stopwatch: times the stages `rollout` and `reward` (judging after the last response has
                ended), and records how idle the engines were.

        Returns:
            The batch, with this rank's tokens and the step's metrics; None on every rank if
            generation or judging was aborted: then `open_groups` are unchanged, and the data
            position is undefined.

        Collectives: per round those of `rollout.generate`, of `rewards.score`, and two
        `Replicas.gather_tables`; messages with the tokens of open groups between ranks; at the end
        that of `Samples.take`, and gathers of counts of verdicts, calls and draft tokens.

        Raises:
            ConfigError: most verdicts were unknown in several steps (`rewards.UnknownWatch`).
        """
        wanted, rounds = self._batch.rollout_prompts, self._batch.dynamic_sampling_rounds
        groups, opened = Rollouts.join([]), self.open_groups
        drawn = [self._source.problems[i] for i in opened.problems]
        num_rounds = num_lost_tokens = 0
        now = _Step(step, attempt, stopwatch, Occupancy())
        self.num_discarded_tokens = 0

        # Rounds of dynamic sampling; without it a single round.
        while num_rounds <= rounds:
            missing = wanted - int(informative(groups, virtual_correct=self.virtual_correct).sum())
            if missing <= 0:
                break
            num_new = max(num_begun(self._batch, missing) - opened.num_groups, 0)
            prompts = self._source.next_batch(num_new, step=step, drawn=drawn)
            drawn += prompts
            sampled = self._sample(prompts, opened, missing, now)
            if sampled is None:
                self.num_discarded_tokens += groups.take(groups.rows_here).num_sampled
                return None
            complete, opened = sampled
            groups = Rollouts.join([groups, complete])
            if not self._batch.partial_rollouts:
                num_lost_tokens += opened.num_sampled
                opened = Rollouts.join([])
            num_rounds += 1

        if self._batch.oversampling > 1:
            ids = [self._source.problems[i].id for i in groups.problems]
            groups = groups.take_groups(shuffled(ids, step, seed=self._sampling.seed))
        kept = {*groups.problems, *opened.problems}
        self._source.give_back(
            [prompt for prompt in drawn if self._source.number_of(prompt.id) not in kept],
            step=step,
        )
        self.open_groups = opened
        stopwatch.notes["perf/rollout_idle_share"] = now.occupancy.idle_share
        metrics = rollout_metrics(
            groups, step, self._batch, num_rounds=num_rounds, num_lost_tokens=num_lost_tokens
        )
        metrics |= observe(groups, self._source, step)
        replicas = self._engine.replicas
        carrier = rewards.Carrier(now.metric_sums, replicas.gather)
        metrics["reward/unknown_share"] = self._unknown.check(
            step, now.verdicts, gather=carrier.gather, is_first=replicas.is_first_rank
        )
        metrics |= rewards.verifier_metrics(carrier.sums, is_first=replicas.is_first_rank)
        if self._acting.config.is_called:
            sums = join_sums(replicas.gather(now.call_sums))
            by_c, timings = call_metrics(sums)
            metrics |= by_c
            stopwatch.notes |= timings
        if self.counts_drafts:
            metrics |= draft_metrics(replicas.gather(now.draft_counts))
        batch = groups.take_groups(choose(groups, wanted, virtual_correct=self.virtual_correct))
        has_gradient = informative(groups, virtual_correct=self.virtual_correct)
        of_sources = source_metrics(groups, batch, has_gradient, source=self._source)
        batch = replace(batch, metrics=metrics | of_sources)
        if self.samples is None:
            return batch
        texts, timelines = self.samples.take(
            batch, step, problems=self._source.problems, gather=self._engine.replicas.gather
        )
        return replace(batch, samples=texts, timelines=timelines)

    @property
    def channel(self) -> Channel:
        """Channel of the ranks that sample, for sending tokens to the ranks that compute them."""
        return self._engine.replicas.channel

    def evaluation_calls(self, step: int) -> Calls:
        """The environment's calls for the evaluation before a step."""
        return self._acting.calls(evaluation_name(step), self._engine.replicas)

    def resume(self, groups: Sequence[Sequence[Episode]]) -> None:
        """Continue the open groups of a checkpoint; every rank must pass all of them."""
        replicas = self._engine.replicas
        rollouts = self._to_rollouts(groups)
        self.open_groups = rollouts.spread(rank=replicas.rank, size=replicas.world_size)

    def gather_open_groups(self) -> list[tuple[Episode, ...]]:
        """The open groups with their tokens, on rank 0; empty on other ranks.

        Collectives: messages from all ranks to rank 0.
        """
        opened = self.open_groups
        if not len(opened):
            return []
        gathered = gather_tokens(opened, channel=self.channel, tag=_TAG)
        return self._to_episodes(gathered) if self.channel.rank == 0 else []

    def _sample(
        self, prompts: list[Prompt], opened: Rollouts, wanted: int, now: _Step
    ) -> tuple[Rollouts, Rollouts] | None:
        """A round: generate until `wanted` of prompts and open groups are complete, and judge.

        Returns:
            Complete groups with their verdicts, and aborted groups; None if the round was aborted.
        """
        engine, replicas, stopwatch = self._engine, self._engine.replicas, now.stopwatch
        with stopwatch("rollout"):
            new, old, num_wanted = assign(len(prompts), opened.num_groups, wanted, replicas)
            together = self._batch.partial_rollouts and replicas.count > 1
            resumed = self._resume(opened, len(prompts), wanted)
            calls = self._acting.calls(step_name(now.step), replicas)
            mine = [group[0].prompt for group in resumed]
            mine += begin_all(self.environment, [prompts[i] for i in new], calls)
            # Each rank's problems to judge are fixed before any response ends; contiguous slices
            # preserve global order.
            judged_here = replicas.part(range(len(mine)))
            judging = rewards.Judging(
                self._pool,
                [mine[i] for i in judged_here],
                judge=self.environment.judge,
                turns=self._acting.turns.messages,
                group_size=self._sampling.num_samples,
                compares_truncated=self._reward.truncated == "judged",
            )
            groups = generate(
                engine,
                mine,
                replace(self._sampling, step=now.step),
                calls=calls,
                begun={group[0].prompt.id: group for group in resumed},
                num_groups=replicas.tally(wanted) if together else num_wanted,
                hooks=Hooks(
                    on_ended=judging.add,
                    should_abort=now.attempt.patience(stopwatch.expect("rollout")),
                    occupancy=now.occupancy,
                    on_aborted=self._count_discarded,
                    shows_progress=True,
                    keeps_unfinished=self._batch.partial_rollouts,
                ),
            )
        if groups is None:
            return None
        with stopwatch("reward"):
            complete = [i for i, group in enumerate(groups) if all(one.finished for one in group)]
            # Surplus groups that finish in the same step stay open.
            if together:
                numbers = [*old, *(opened.num_groups + i for i in new)]
                ages = {i: self._age(groups[i], numbers[i]) for i in complete}
                kept = self._oldest(ages, wanted)
            else:
                kept = {*complete[:num_wanted]}
            here = [groups[i] for i in judged_here if i in kept]
            left = [groups[i] for i in judged_here if i not in kept]
            return self._judge(judging, here, left, now, calls)

    def _age(self, group: tuple[Episode, ...], number: int) -> tuple[int, int]:
        """Oldest version of a group's tokens, and its number in the round: no two have the same."""
        carried = [one.carried_versions for one in group if one.carried_versions is not None]
        newest = self._engine.policy_version
        return min([newest, *(int(versions[0]) for versions in carried)]), number

    def _oldest(self, ages: Mapping[int, tuple[int, int]], wanted: int) -> set[int]:
        """Those of this replica's complete groups that are among the `wanted` oldest of all.

        Collectives: a gather of two numbers for each complete group.
        """
        replicas = self._engine.replicas
        ours = [*ages.values()] if replicas.is_first_of_replica else []
        oldest = {*sorted(replicas.gather(ours))[:wanted]}
        return {i for i, age in ages.items() if age in oldest}

    def _resume(self, opened: Rollouts, num_new: int, wanted: int) -> list[tuple[Episode, ...]]:
        """Open groups that this replica continues, with their tokens fetched from other ranks."""
        if not len(opened):
            return []
        replicas = self._engine.replicas
        by_rank = [
            assign(num_new, opened.num_groups, wanted, replicas, rank=rank)[1]
            for rank in range(replicas.world_size)
        ]
        brought = deal_tokens(
            opened,
            [opened.rows_of(sorted(groups)) for groups in by_rank],
            channel=replicas.channel,
            tag=_TAG,
        )
        return self._to_episodes(brought.take_groups(by_rank[replicas.rank]))

    def _judge(
        self,
        judging: rewards.Judging,
        kept: list[tuple[Episode, ...]],
        left: list[tuple[Episode, ...]],
        now: _Step,
        calls: Calls,
    ) -> tuple[Rollouts, Rollouts] | None:
        """Wait for this rank's verdicts, and join the tables of all ranks."""
        verdicts = rewards.score(
            judging,
            kept,
            gather=self._engine.replicas.gather,
            should_abort=now.attempt.patience(now.stopwatch.expect("reward")),
        )
        if verdicts is None:
            self.num_discarded_tokens += sum(
                one.num_sampled_tokens for group in [*kept, *left] for one in group
            )
            return None
        if self.samples is not None:
            self.samples.note(kept, verdicts, calls.timing)
        judges_truncated = self._reward.truncated == "judged"
        counted = [
            tuple(v for one, v in zip(*pair, strict=True) if judges_truncated or not one.truncated)
            for pair in zip(kept, verdicts, strict=True)
        ]
        now.verdicts.extend(counted)
        judged_here = self._to_rollouts(kept, verdicts)
        is_correct = judged_here.table["outcome"] == Outcome.CORRECT.code
        num_correct = is_correct.reshape(-1, max(judged_here.rollouts_per_prompt, 1)).sum(axis=1)
        now.metric_sums.append(rewards.sum_metrics(zip(num_correct.tolist(), counted, strict=True)))
        now.call_sums.append(sum_calls(kept, num_correct.tolist(), calls.counts))
        now.draft_counts.append(count_drafts(kept))
        complete = self._join_ranks(judged_here)
        return complete, self._join_ranks(self._to_rollouts(left))

    def _join_ranks(self, rollouts: Rollouts) -> Rollouts:
        """Rollouts of all ranks, in the order of ranks, with this rank's tokens. Collective."""
        replicas = self._engine.replicas
        tables = replicas.gather_tables(rollouts.table)
        before, after = (
            Rollouts(np.concatenate([rollouts.table[:0], *others]))
            for others in (tables[: replicas.rank], tables[replicas.rank + 1 :])
        )
        return Rollouts.join([before, rollouts, after])

    def _count_discarded(self, num_tokens: int) -> None:
        if self._engine.replicas.is_first_of_replica:
            self.num_discarded_tokens += num_tokens

    def _to_rollouts(
        self,
        groups: Sequence[Sequence[Episode]],
        verdicts: Sequence[Sequence[Verdict]] | None = None,
    ) -> Rollouts:
        return to_rollouts(
            groups,
            verdicts,
            problems=[self._source.number_of(group[0].prompt.id) for group in groups],
            policy_version=self._engine.policy_version,
            holder=self._engine.replicas.rank,
            judges_truncated=self._reward.truncated == "judged",
            graded=self._reward.graded,
        )

    def _to_episodes(self, groups: Rollouts) -> list[tuple[Episode, ...]]:
        return to_episodes(groups, [self._source.problems[i] for i in groups.problems])


@dataclass(frozen=True, slots=True)
class _Step:
    """Values shared by the rounds of one step."""

    step: int
    attempt: Patient
    stopwatch: Stopwatch
    occupancy: Occupancy
    verdicts: list[tuple[Verdict, ...]] = field(default_factory=list)
    """Verdicts of this rank, by group, without those that `reward.truncated` leaves out."""
    metric_sums: list[rewards.Sums] = field(default_factory=list)
    """Sums of the verifiers' metrics over the same verdicts, by round."""
    call_sums: list[Sums] = field(default_factory=list)
    """Costs of the environment's calls for the groups that this rank has judged, by round."""
    draft_counts: list[np.ndarray] = field(default_factory=list)
    """Numbers of draft tokens of the same groups, by round."""
