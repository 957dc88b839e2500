"""One batch of judged rollouts: prompts, k episodes each, verdicts.

On top: dynamic sampling, and against the long tail of responses over-sampling and partial rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from gapo_megatron import rewards
from gapo_megatron.clock import Patient, Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.config.counts import num_begun
from gapo_megatron.data.source import PromptSource
from gapo_megatron.errors import DataError
from gapo_megatron.exchange import Channel, deal, gather
from gapo_megatron.facts import Facts, Spread, Tokens
from gapo_megatron.rollout.describe import describe, to_open_group
from gapo_megatron.rollout.engine import Engine
from gapo_megatron.rollout.environment import Environment
from gapo_megatron.rollout.environments.one_turn import OneTurn
from gapo_megatron.rollout.generate import Watch, begin, generate
from gapo_megatron.rollout.progress import Occupancy
from gapo_megatron.rollout.requests import SamplingSettings, num_sampled, request_seed
from gapo_megatron.rollout.selection import choose, informative, num_tokens, rollout_metrics
from gapo_megatron.types import Group, OpenGroup, Prompt

_TAG = 1
"""Of messages with the tokens of open groups."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Rollouts that a step learns from; the same on every rank but for `held`."""

    facts: Facts
    """Judged groups, `batch.rollout_prompts` of them."""
    held: Mapping[int, Tokens]
    """By number the sequences whose tokens are here: those that this rank has had judged."""
    metrics: dict[str, float]
    """Over all groups, those that dynamic sampling replaced included."""
    source_state: Mapping[str, Any]
    """Place in the data after these groups (`PromptSource.state_dict`)."""


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
        open_groups: groups that the next `collect` resumes, each rank with some of the tokens. A
            step that has collected leaves those there that it has broken off; before the weights
            move, `learn.carry` must make their new tokens `carried`, and set the attribute.
        environment: the episodes' environment.
        num_tokens_in_vain: tokens that this rank has sampled in the last `collect`, if that was
            broken off; of the ranks of a replica the first counts them.
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
        self.open_groups = Spread.join([])
        self.environment: Environment = environment or OneTurn(tokenizer)
        self.num_tokens_in_vain = 0
        self._engine = engine
        self._source = source
        self._pool = pool
        self._config = config
        self._group_size = config.batch.rollouts_per_prompt

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

        Collectives: per round those of `rollout.generate`, of `rewards.score`, and of
        `Replicas.gather_rows`; messages with the tokens of open groups between ranks.
        """
        batch = self._config.batch
        wanted = batch.rollout_prompts
        groups, opened = Spread.join([]), self.open_groups
        drawn = [self._source.problems[i] for i in self._problems(opened)]
        num_rounds = num_lost_tokens = 0
        now = _Step(step, attempt, stopwatch, Occupancy())
        self.num_tokens_in_vain = 0
        while num_rounds <= batch.dynamic_sampling_rounds:
            missing = wanted - int(informative(groups.facts, self._group_size).sum())
            if missing <= 0:
                break
            num_new = max(num_begun(batch, missing) - len(self._problems(opened)), 0)
            prompts = self._source.next_batch(num_new, drawn=drawn)
            drawn += prompts
            judged = self._draw(prompts, opened, missing, now)
            if judged is None:
                self.num_tokens_in_vain += _num_held(groups)
                return None
            groups = Spread.join([groups, judged.groups])
            opened = judged.open_groups
            num_lost_tokens += judged.num_lost_tokens
            num_rounds += 1
        if batch.oversampling > 1:
            groups = self._shuffled(groups, step)
        kept = {*self._problems(groups), *self._problems(opened)}
        self._source.give_back(
            [prompt for prompt in drawn if self._source.number_of(prompt.id) not in kept]
        )
        self.open_groups = opened
        stopwatch.notes["perf/rollout_idle_share"] = now.occupancy.idle_share
        facts = groups.facts
        metrics = rollout_metrics(
            facts, step, batch, num_rounds=num_rounds, num_lost_tokens=num_lost_tokens
        )
        chosen = groups.take(self._rows(choose(facts, self._group_size, wanted)))
        return Sampled(chosen.facts, chosen.held, metrics, self._source.state_dict())

    @property
    def channel(self) -> Channel:
        """Channel of the ranks that sample, over which tokens go where they are computed."""
        return self._engine.replicas.channel

    def resume(self, groups: Sequence[OpenGroup]) -> None:
        """Go on with the open groups of a checkpoint; all of them are here, on every rank."""
        replicas = self._engine.replicas
        problems = [self._source.number_of(group.prompt.id) for group in groups]
        facts, tokens = describe(groups, problems=problems)
        # Any rank could have any: each has its part.
        facts.holder[:] = np.arange(len(facts)) % replicas.world_size
        mine = np.flatnonzero(facts.holder == replicas.rank).tolist()
        self.open_groups = Spread(facts, {i: tokens[i] for i in mine})

    def gather_open_groups(self) -> list[OpenGroup]:
        """The open groups with their tokens, on rank 0; none elsewhere.

        Collectives: messages from all ranks to rank 0.
        """
        opened = self.open_groups
        if not len(opened):
            return []
        tokens = gather(opened.held, opened.facts, channel=self.channel, tag=_TAG)
        return self._to_groups(
            opened.facts, tokens, range(len(self._problems(opened)) if tokens else 0)
        )

    def _shuffled(self, groups: Spread, step: int) -> Spread:
        """The groups in an order drawn for the step, whatever the layout.

        They come engine by engine, those that were open first: mini-batches in that order would be
        of old groups alone or of new ones alone.
        """
        seed, problems = self._config.run.seed, self._source.problems
        ids = [problems[i].id for i in self._problems(groups)]
        order = sorted(range(len(ids)), key=lambda i: request_seed(seed, step, ids[i], 0))
        return groups.take(self._rows(order))

    def _draw(
        self, prompts: list[Prompt], opened: Spread, wanted: int, now: _Step
    ) -> _Judged | None:
        """One round: rollouts of `wanted` of prompts and open groups, and their verdicts."""
        engine, stopwatch = self._engine, now.stopwatch
        with stopwatch("rollout"):
            # Those that are open come last, so every engine has some; there they go first.
            everything = range(len(prompts) + len(self._problems(opened)))
            wanted_here = engine.replicas.share(everything[:wanted])
            spare = engine.replicas.share(everything[wanted:])
            resumed = self._resume(opened, everything, wanted)
            begun = {group.prompt.id: group.rollouts for group in resumed}
            fresh = [prompts[i] for i in wanted_here + spare if i < len(prompts)]
            mine = [group.prompt for group in resumed]
            mine += [begin(self.environment, one) for one in fresh]
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
                    on_broken_off=self._note_in_vain,
                    shows_progress=True,
                ),
            )
        if rollouts is None:
            return None
        with stopwatch("reward"):
            groups = [OpenGroup(*one) for one in zip(mine, rollouts, strict=True)]
            whole = [
                i for i, group in enumerate(groups) if all(one.finished for one in group.rollouts)
            ]
            # Of more than are wanted that end together the last are left, finished as they are.
            kept = whole[: len(wanted_here)]
            return self._judge(
                judging,
                [groups[i] for i in judged_here if i in kept],
                [groups[i] for i in judged_here if i not in kept],
                now,
            )

    def _resume(self, opened: Spread, everything: Sequence[int], wanted: int) -> list[OpenGroup]:
        """Open groups that this replica goes on with, their tokens brought here."""
        replicas, num_open = self._engine.replicas, len(self._problems(opened))
        first = len(everything) - num_open
        if not num_open:
            return []

        def groups_of(rank: int) -> list[int]:
            """Numbers of the open groups that the replica of a rank goes on with, in its order."""
            theirs = replicas.share(everything[:wanted], rank=rank)
            theirs += replicas.share(everything[wanted:], rank=rank)
            return [i - first for i in theirs if i >= first]

        tokens = deal(
            opened.held,
            opened.facts,
            [self._rows(sorted(groups_of(rank))) for rank in range(replicas.world_size)],
            channel=replicas.channel,
            tag=_TAG,
        )
        return self._to_groups(opened.facts, tokens, groups_of(replicas.rank))

    def _judge(
        self, judging: rewards.Judging, kept: list[OpenGroup], left: list[OpenGroup], now: _Step
    ) -> _Judged | None:
        """Wait for this rank's verdicts, and bring the facts of all ranks together."""
        prompts, rollouts = [one.prompt for one in kept], [one.rollouts for one in kept]
        verdicts = rewards.score(
            judging,
            prompts,
            rollouts,
            gather=self._engine.replicas.gather,
            should_abandon=now.attempt.patience(now.stopwatch.expect("reward")),
        )
        if verdicts is None:
            everything = [rollout for group in [*kept, *left] for rollout in group.rollouts]
            self.num_tokens_in_vain += sum(map(num_sampled, everything))
            return None
        groups = [Group(*one) for one in zip(prompts, rollouts, verdicts, strict=True)]
        kept_facts, kept_tokens = self._describe(groups)
        left_facts, left_tokens = self._describe(left)
        num_lost_tokens = 0
        if not self._config.batch.partial_rollouts:
            num_lost_tokens = num_tokens(left_facts)
            left_facts, left_tokens = self._describe([])
        # One table travels, with a row in front that says what is in it.
        head = np.zeros((1, Facts.NUM_COLUMNS), dtype=np.int32)
        head[0, :2] = len(kept_facts), num_lost_tokens
        tables = self._engine.replicas.gather_rows(
            np.concatenate([head, kept_facts.table, left_facts.table])
        )
        edges = [1 + int(table[0, 0]) for table in tables]
        pairs = [*zip(tables, edges, strict=True)]
        return _Judged(
            self._spread([table[1:edge] for table, edge in pairs], kept_tokens),
            self._spread([table[edge:] for table, edge in pairs], left_tokens),
            sum(int(table[0, 1]) for table in tables),
        )

    def _spread(self, tables: Sequence[np.ndarray], tokens: Sequence[Tokens]) -> Spread:
        """Sequences of all ranks, from their facts by rank; `tokens` are those of this rank's."""
        rank = self._engine.replicas.rank
        return Spread.join(
            Spread(Facts(table), dict(enumerate(tokens)) if source == rank else {})
            for source, table in enumerate(tables)
        )

    def _note_in_vain(self, num_tokens: int) -> None:
        if self._engine.replicas.is_first_of_replica:
            self.num_tokens_in_vain += num_tokens

    def _describe(self, groups: Sequence[Group | OpenGroup]) -> tuple[Facts, list[Tokens]]:
        return describe(
            groups,
            problems=[self._source.number_of(group.prompt.id) for group in groups],
            policy_version=self._engine.policy_version,
            holder=self._engine.replicas.rank,
            judges_truncated=self._config.reward.truncated == "judged",
        )

    def _to_groups(
        self, facts: Facts, tokens: Mapping[int, Tokens], numbers: Sequence[int]
    ) -> list[OpenGroup]:
        """Open groups number `numbers` of `facts`, all of whose tokens are here."""
        groups = []
        for number in numbers:
            rows = self._rows([number])
            problem = self._source.problems[facts.problem[rows[0]]]
            groups.append(to_open_group(problem, facts.take(rows), [tokens[i] for i in rows]))
        return groups

    def _rows(self, groups: Sequence[int]) -> list[int]:
        """Numbers of the sequences of groups."""
        size = self._group_size
        return [group * size + sample for group in groups for sample in range(size)]

    def _problems(self, groups: Spread) -> list[int]:
        """Number of each group's problem in the data."""
        return [int(number) for number in groups.facts.problem[:: self._group_size]]

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
    """Result of one round; the same on every rank but for the tokens."""

    groups: Spread
    open_groups: Spread
    num_lost_tokens: int
    """Sampled for groups that are broken off and do not stay open."""


def _num_held(groups: Spread) -> int:
    """Tokens that the model sampled, of the sequences that are here."""
    return int(groups.facts.num_sampled_tokens[[*groups.held]].sum(dtype=np.int64))
