"""Draws training problems in a seeded, endless and resumable order, from one source or several."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from gapo_megatron.config import BatchConfig, DataConfig, DataSource
from gapo_megatron.config.counts import num_begun
from gapo_megatron.config.data_section import shares
from gapo_megatron.data.curriculum import Curriculum
from gapo_megatron.data.template_date import DATE
from gapo_megatron.errors import CheckpointError, ConfigError, DataError
from gapo_megatron.types import Prompt


class PromptSource:
    """Draws every problem once per epoch, in a new order each, and returned problems again.

    A batch may span two epochs. No problem is in a batch twice, because its rollouts would be the
    same. Every rank draws the same batches, without communication.

    With several data sources each has its own epochs. A drawn problem earns every source its share
    as credit, and the source with the most credit gives the problem. So every batch has each
    source's share, to within a few problems.

    With a curriculum the same holds of strata, the levels of the sources: each has its own epochs,
    and its share follows the verdicts of earlier steps (`data.curriculum`).
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        sources: Sequence[DataSource] = (),
        made_of: Mapping[str, str] = {},
        curriculum: float | None = None,
    ) -> None:
        """Start before the first problem of epoch 0.

        Args:
            prompts: the dataset, the same on every rank.
            seed: seed of the orders; that of epoch e depends only on (seed, e) and the name of the
                source.
            sources: `data.source`; `Prompt.source` names that of a prompt. Empty: all prompts are
                a single source.
            made_of: `messages.prompts_made_of`.
            curriculum: `data.curriculum`; None: shares stay those of the sources.
        """
        self._prompts = list(prompts)
        self._numbers = {prompt.id: i for i, prompt in enumerate(self._prompts)}
        self._sources = tuple(sources)
        self._made_of = dict(made_of)
        self._curriculum = None if curriculum is None else Curriculum(prompts, strength=curriculum)
        if self._curriculum is not None:
            self._place_of = self._curriculum.strata
        else:
            self._place_of = [one.source if sources else "" for one in self._prompts]
        numbers: dict[str, list[int]] = {} if self._curriculum else {one: [] for one in self.names}
        for i, place in enumerate(self._place_of):
            numbers.setdefault(place, []).append(i)
        self._orders = {name: _Order(here, seed=seed, name=name) for name, here in numbers.items()}
        """The order of each source by name, '' for a single source; or of each stratum."""
        self._credit = dict.fromkeys(self._orders, 0.0)
        """Number of problems that each of them owes; negative if it is ahead. The sum is 0."""

    @property
    def problems(self) -> Sequence[Prompt]:
        """All problems of the dataset."""
        return self._prompts

    @property
    def date(self) -> str:
        """The date in the prompts, as YYYY-MM-DD; empty: their chat template has none."""
        return self._made_of.get(DATE, "")

    @property
    def names(self) -> Sequence[str]:
        """Names of the data sources; a single '' without `data.source`."""
        return [one.name for one in self._sources] or [""]

    def number_of(self, prompt_id: str) -> int:
        """Index of a problem in `problems`."""
        return self._numbers[prompt_id]

    def next_batch(
        self, num_prompts: int, *, step: int = 0, drawn: Sequence[Prompt] = ()
    ) -> list[Prompt]:
        """Draw the next `num_prompts` different problems.

        Args:
            num_prompts: number of problems.
            step: step that they are for; decides which sources they come from.
            drawn: problems that earlier calls drew for the same batch; they are not drawn again.

        Raises:
            ConfigError: the dataset has fewer problems.
        """
        avoided = {self.number_of(prompt.id) for prompt in drawn}
        given = self._shares(step)
        room = {name: self._orders[name].num_without(avoided) for name in given}
        if num_prompts > sum(room.values()):
            raise ConfigError(
                f"a batch of {num_prompts + len(drawn)} different problems is larger than the "
                f"dataset ({sum(len(self._orders[name]) for name in given)} problems)"
            )
        names, earning = [], given
        for _ in range(num_prompts):
            if self._curriculum is not None and any(not room[one] for one in earning):
                # A stratum may have fewer problems than its share: the others get the rest.
                left = math.fsum(given[one] for one in given if room[one])
                earning = {one: given[one] / left for one in given if room[one]}
            self._earn(earning, 1.0)
            name = max((one for one in given if room[one]), key=self._credit.__getitem__)
            self._credit[name] -= 1
            room[name] -= 1
            names.append(name)
        numbers = {
            name: iter(self._orders[name].take(names.count(name), avoided)) for name in given
        }
        return [self._prompts[next(numbers[name])] for name in names]

    def give_back(self, prompts: Sequence[Prompt], *, step: int = 0) -> None:
        """Return problems, to be drawn after those that remain of their source's epoch.

        A problem that is returned after the next epoch has started may be drawn twice in it. The
        source of a returned problem owes another one, so the shares are those of kept problems.

        Args:
            prompts: drawn problems.
            step: step that they were drawn for.
        """
        given = self._shares(step)
        for prompt in prompts:
            number = self.number_of(prompt.id)
            name = self._place_of[number]
            self._orders[name].remaining.append(number)
            self._earn(given, -1.0)
            self._credit[name] += 1

    def observe(
        self, problems: Sequence[int], rewards: np.ndarray, is_correct: np.ndarray, *, step: int
    ) -> dict[str, float]:
        """Let the curriculum learn from all judged groups of a step; without one, do nothing.

        Call it once for a step, after the last draw and `give_back`: the draws of the next step
        follow. The order of the groups does not matter.

        Args:
            problems: number of the problem of each of G groups.
            rewards: [G, k] float64, NaN where the verdict is unknown.
            is_correct: [G, k] bool.
            step: the step that they were drawn for.

        Returns:
            Metrics of the strata.
        """
        if self._curriculum is None:
            return {}
        used = self._shares(step)
        self._curriculum.observe(problems, rewards, is_correct)
        return self._curriculum.metrics(used)

    def _shares(self, step: int) -> dict[str, float]:
        """Share of each source, or stratum, that a step draws from."""
        given = shares(self._sources, step) if self._sources else {"": 1.0}
        return given if self._curriculum is None else self._curriculum.shares(given)

    def _earn(self, given: dict[str, float], num_problems: float) -> None:
        for name, share in given.items():
            self._credit[name] += num_problems * share

    def state_dict(self) -> dict[str, Any]:
        """Position as numbers and text, for `load_state_dict`."""
        dataset: dict[str, Any] = {"dataset": dict(self._fingerprint)}
        if not self._sources and self._curriculum is None:
            return self._orders[""].state_dict() | dataset
        states = {
            name: order.state_dict() | {"credit": self._credit[name]}
            for name, order in self._orders.items()
        }
        if self._curriculum is not None:
            dataset |= {"curriculum": self._curriculum.state_dict()}
        return {"sources": states} | dataset

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            CheckpointError: see `require_same`; or the state is damaged.
        """
        self.require_same(state)
        states = state.get("sources", {"": state})
        for name, order in self._orders.items():
            order.load_state_dict(states[name])
            self._credit[name] = float(states[name].get("credit", 0.0))
        if self._curriculum is not None:
            self._curriculum.load_state_dict(state["curriculum"])

    def require_same(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of other problems.

        Raises:
            CheckpointError: names what has changed.
        """
        before, now = "curriculum" in state, self._curriculum is not None
        if before != now:
            words = {True: "set", False: "unset"}
            raise CheckpointError(
                f"data.curriculum is {words[now]}, and was {words[before]} when the checkpoint was "
                "made: a run draws its problems with or without one from its first step on. "
                "Resume with the same, or start a new run in another run.output_dir"
            )
        states = state.get("sources", {"": state})
        changed = [*self._changed_since(state["dataset"])]
        if changed or states.keys() != self._orders.keys():
            setting = "data.source" if self._sources else "data.train_path"
            raise CheckpointError(
                f"the checkpoint was made with other training problems than {setting} has now "
                f"({len(self._prompts)} problems). Changed: {'; '.join(changed) or setting}. "
                "Resume with the same, or start a new run in another run.output_dir"
            )

    @cached_property
    def _fingerprint(self) -> Mapping[str, str]:
        """Digests of the problems, and what their prompts are made of."""
        rows, tokens = hashlib.sha256(), hashlib.sha256()
        for prompt in self._prompts:
            # No columns: those that the verifiers of this run take, which may change.
            rows.update(repr((prompt.id, prompt.answer, prompt.verifier)).encode())
            if self._curriculum is not None:
                rows.update(repr(prompt.level).encode())
            tokens.update(repr(prompt.token_ids).encode())
        return {"rows": rows.hexdigest(), "tokens": tokens.hexdigest(), **self._made_of}

    def _changed_since(self, before: Mapping[str, str]) -> Iterator[str]:
        """What is not as in a checkpoint's fingerprint; nothing if the problems are the same."""
        now = self._fingerprint
        changed = {name for name in now if before.get(name) != now[name]}
        if not changed & {"rows", "tokens"}:
            return
        made_of = [name for name in self._made_of if name in changed]
        if "rows" in changed or not made_of:
            yield "the rows"
        for name in made_of:
            values = f" ({before.get(name)}, now {now[name]})" if name == DATE else ""
            yield f"the {name}{values}"
        if DATE in made_of:
            yield f'data.template_date = "{before.get(DATE)}" restores the recorded date'


class _Order:
    """The order of one source's problems, by their numbers in the dataset."""

    def __init__(self, numbers: Sequence[int], *, seed: int, name: str) -> None:
        self._numbers, self._all = list(numbers), set(numbers)
        self._seed = seed
        self._key = [int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])] if name else []
        self.epoch = 0
        self.remaining = self._order(0)

    def __len__(self) -> int:
        return len(self._numbers)

    def num_without(self, avoided: set[int]) -> int:
        """Number of different problems that are not `avoided`."""
        return len(self) - len(self._all & avoided)

    def take(self, count: int, avoided: set[int]) -> list[int]:
        """Remove and return the next `count` different problems that are not `avoided`."""
        chosen = self._take(count, avoided)
        if len(chosen) < count:
            self.epoch += 1
            # Problems that this batch already has stay first in the new epoch.
            self.remaining += self._order(self.epoch)
            chosen += self._take(count - len(chosen), avoided | {*chosen})
        return chosen

    def _take(self, count: int, avoided: set[int]) -> list[int]:
        """Remove and return the first `count` different remaining problems that are not `avoided`.

        A returned problem may remain twice once a new epoch has begun.
        """
        chosen: dict[int, None] = {}
        left = []
        for i in self.remaining:
            if len(chosen) < count and i not in avoided and i not in chosen:
                chosen[i] = None
            else:
                left.append(i)
        self.remaining = left
        return list(chosen)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "remaining": list(self.remaining)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            CheckpointError: the source has no problems of these numbers.
        """
        remaining = [int(i) for i in state["remaining"]]
        if not self._all.issuperset(remaining):
            raise CheckpointError(
                "the checkpoint's data position is damaged: remaining problems have the "
                f"numbers {min(remaining)} to {max(remaining)}, of {len(self)} problems"
            )
        self.epoch, self.remaining = int(state["epoch"]), remaining

    def _order(self, epoch: int) -> list[int]:
        random = np.random.default_rng([self._seed, epoch, *self._key])
        return [self._numbers[i] for i in random.permutation(len(self._numbers))]


def check_counts(
    counts: Mapping[str, int], batch: BatchConfig, *, data: DataConfig, num_steps: int
) -> None:
    """Refuse files with fewer problems than a step may draw without repetition.

    Args:
        counts: number of training problems by `Prompt.source`.
        batch: section `batch`.
        data: section `data`, of whose sources each must have its share.
        num_steps: steps of the run.

    Raises:
        DataError: names the numbers and the settings they come from; of a source also its steps.
    """
    rounds, total = batch.dynamic_sampling_rounds, sum(counts.values())
    most = num_begun(batch, batch.rollout_prompts) * (1 + rounds)
    if total < most:
        factors = f"batch.rollout_prompts ({batch.rollout_prompts})"
        if batch.oversampling > 1:
            factors += f" x batch.oversampling ({batch.oversampling:g})"
        if rounds:
            factors += f", up to 1 + batch.dynamic_sampling_rounds ({rounds}) times"
        raise DataError(
            f"one step may draw {most} different problems: {factors}; "
            f"{', '.join(data.train_files.values())} holds {total} problems"
        )
    for steps, given in data.stages(num_steps) if data.source else ():
        for name, share in given.items():
            needed = math.ceil(round(most * share, 6))
            if counts.get(name, 0) < needed:
                raise DataError(
                    f"data.source {name!r}: each of the steps {steps[0]} to {steps[-1]} may draw "
                    f"{most} different problems, of which its weight asks for {share:.1%}: "
                    f"{needed}; {data.train_files[name]} holds {counts.get(name, 0)}. Lower the "
                    "weight, or batch.rollout_prompts"
                )
