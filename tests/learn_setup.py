"""A whole batch through `learn`, recorded, and what the float64 reference says about it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from gapo_megatron.checkpoint import OpenStep, files
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.exchange import GroupChannel
from gapo_megatron.learn import loss as loss_module
from gapo_megatron.learn import step as learn_module
from gapo_megatron.learn.plan import DataParallelRanks, bring_tokens, plan_step
from gapo_megatron.learn.records import Record, gather
from gapo_megatron.learn.step import learn
from gapo_megatron.learn.update import UpdateResult
from gapo_megatron.objective import PolicyLoss, make_batch
from gapo_megatron.policy import Policy, destroy
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.types import Episode, Prompt
from tests.batches import make_rollouts
from tests.configs import merged
from tests.distributed import policy_setup
from tests.distributed.policy_setup import copies, gradients, load_policy
from tests.peers.reference import gapo_update, in_float64, response_log_probs

GROUP_SIZE = 4
# Verdicts of every rollout: correct, wrong, unknown. Two mini-batches of five groups; both hold
# groups without advantage, a group that an unknown verdict shrinks, and different c.
VERDICTS = (
    *("cwww", "wwww", "cwuc", "ccwc", "cccc"),
    *("wwww", "cwww", "wcuw", "wccc", "cwcw"),
)
NUM_MINIBATCHES = 2
AnyRollouts = TypeVar("AnyRollouts", bound=Rollouts)
_JUDGED = ("problem", "sample", "is_finished", "outcome")


def make_groups(verdicts: Sequence[str] = VERDICTS, *, seed: int = 0) -> list[tuple[Episode, ...]]:
    """As many responses of 1-24 tokens as verdicts, to prompts of 1-8; all of random tokens."""
    random = np.random.default_rng(seed)

    def tokens(longest: int) -> np.ndarray:
        length = random.integers(1, longest + 1)
        return random.integers(0, policy_setup.VOCAB_SIZE, length).astype(np.int32)

    def episode(prompt: Prompt, sample: int) -> Episode:
        ids = tokens(24)
        return Episode(prompt, sample, ids, -4 * random.random(len(ids), dtype=np.float32))

    def group(number: int, size: int) -> tuple[Episode, ...]:
        prompt = Prompt(f"p{number}", tuple(tokens(8).tolist()), answer="")
        return tuple(episode(prompt, sample) for sample in range(size))

    return [group(number, len(letters)) for number, letters in enumerate(verdicts)]


def make_judged(verdicts: Sequence[str] = VERDICTS, *, seed: int = 0) -> Rollouts:
    """The groups of `make_groups` with these verdicts."""
    return make_rollouts(make_groups(verdicts, seed=seed), verdicts)


def minibatches(rollouts: Rollouts) -> list[Rollouts]:
    """The mini-batches of a step."""
    numbers = np.arange(rollouts.num_groups)
    return [
        rollouts.take_groups(part.tolist()) for part in np.array_split(numbers, NUM_MINIBATCHES)
    ]


def with_columns(rollouts: Rollouts, **columns: Sequence[Any]) -> Rollouts:
    """The same responses with other arrays in some columns, one for each row; counted anew."""
    rows = range(len(rollouts))
    held = {name: [arrays.get(row) for row in rows] for name, arrays in rollouts.tokens.items()}
    held["routes"] = [rollouts.routes_of(row) for row in rows]
    if "carried_log_probs" in columns:  # of these tokens, sampled by version 0
        held["carried_versions"] = []
    counted: Rollouts = Rollouts.of(**(held | columns))
    return counted.changed(**{name: rollouts.table[name] for name in _JUDGED})


def spread(rollouts: AnyRollouts, holder: np.ndarray) -> AnyRollouts:
    """The rollouts as this rank has them where each row's tokens are on one rank, `holder`."""
    rank = dist.get_rank()
    here = {
        name: {row: array for row, array in arrays.items() if holder[row] == rank}
        for name, arrays in rollouts.tokens.items()
    }
    return rollouts.changed(holder=holder).with_tokens(here)


def carry_some(rollouts: Rollouts, config: Config) -> Rollouts:
    """Of every second rollout half of the tokens, of every fourth all are from earlier steps.

    Their log-probs then were other than now: ratios within the clip and beyond it.
    """
    random = np.random.default_rng(5)
    model = in_float64(load_model(Path(config.model.hf_dir)))

    def then(row: int) -> np.ndarray:
        length = len(rollouts.response_ids[row])
        count = (0, length // 2, 0, length)[row % GROUP_SIZE]
        if not count:
            return np.empty(0, dtype=np.float32)
        with torch.no_grad():
            (now,) = response_log_probs(
                model,
                [rollouts.prompt_ids[row].tolist()],
                [rollouts.response_ids[row].tolist()],
                config.rollout.temperature,
                [rollouts.conversations_of(row).tolist()],
            )
        noise = random.normal(0, 0.02, count)
        return (now.numpy()[:count] + noise).astype(np.float32)

    carried = [then(row) for row in rollouts.rows_here]
    return put_in_masked(with_columns(rollouts, carried_log_probs=carried), 0.0)


def mask_some(rollouts: Rollouts) -> Rollouts:
    """Two rollouts of three have tokens that an environment gave: within, or first and last.

    And of those, one of two has three conversations that take turns.
    """
    random = np.random.default_rng(6)

    def mask(row: int) -> np.ndarray:
        length, number = len(rollouts.response_ids[row]), row // GROUP_SIZE + row % GROUP_SIZE
        is_sampled = np.ones(length, dtype=bool)
        if number % 3 and length > 2:
            is_sampled = random.random(length) < 0.6
            is_sampled[0] = is_sampled[-1] = number % 3 == 1
            is_sampled[length // 2] = True
        return is_sampled

    masks = [mask(row) for row in rollouts.rows_here]
    numbers: list[np.ndarray | None] = [None] * len(rollouts)
    for row, is_sampled in enumerate(masks):
        length = len(is_sampled)
        if length > 7 and (row // GROUP_SIZE + row % GROUP_SIZE) % 3 == 2:
            numbers[row] = np.array([0, 1, 0, 2, 1], np.int32)[np.arange(length) * 5 // length]
            is_sampled[np.unique(numbers[row], return_index=True)[1][1:]] = False
            is_sampled[1] = True
    columns = {"response_masks": masks, "conversations": numbers}
    return put_in_masked(with_columns(rollouts, **columns), 0.0)


def put_in_masked(rollouts: Rollouts, value: float) -> Rollouts:
    """The rollouts with `value` for every log-prob of a token that the model did not sample."""

    def put(arrays: Mapping[int, np.ndarray]) -> list[np.ndarray]:
        return [
            np.where(rollouts.is_sampled(row)[: len(arrays[row])], arrays[row], np.float32(value))
            for row in rollouts.rows_here
        ]

    return with_columns(
        rollouts,
        rollout_log_probs=put(rollouts.rollout_log_probs),
        carried_log_probs=put(rollouts.carried_log_probs),
    )


def make_config(folder: Path, **sections: dict[str, Any]) -> Config:
    """GAPO at the paper's widths, in fp32; micro-batches that hold two or three sequences."""
    defaults: dict[str, dict[str, Any]] = {
        "data": {"max_prompt_tokens": 8},
        "rollout": {"max_response_tokens": 24, "temperature": 0.8},
        "batch": {
            "rollout_prompts": len(VERDICTS),
            "minibatch_prompts": len(VERDICTS) // NUM_MINIBATCHES,
            "rollouts_per_prompt": GROUP_SIZE,
            "max_tokens_per_microbatch": 48,
        },
        # Moves the ratios of the second mini-batch by as much as the clips are wide.
        "optimizer": {"learning_rate": 3e-4},
    }
    return policy_setup.make_config(folder, **merged(defaults, sections))


@dataclass
class Seen:
    """One update, as this rank saw it."""

    weights: dict[str, Tensor]
    """Before the update, by Hugging Face name."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """`main_grad` before clipping, whole, by Hugging Face name."""
    grad_norm: float = 0.0
    loss: float = 0.0
    """This rank's part; zero unless its tensor parallel rank is 0."""
    num_microbatches: int = 0
    """With something to compute, on this rank."""
    ratios: dict[int, float] = field(default_factory=dict)
    """By position in the batch; on the last pipeline stage, this data parallel rank's. Empty where
    ratios are of tokens."""
    clipped: dict[int, bool] = field(default_factory=dict)


@dataclass
class Report:
    """What one rank saw of one step, or of several."""

    updates: list[Seen]
    metrics: dict[str, float]
    """Of the last step."""
    after: dict[str, Tensor]
    records: list[Record]
    """Of the last step, on rank 0."""


def planned(batch: Batch, config: Config, *, data_parallel_size: int = 1) -> Batch:
    """The batch with the plan of its step."""
    plan = plan_step(
        batch,
        config.batch,
        needs_every_sequence=config.objective.needs_every_sequence,
        data_parallel_size=data_parallel_size,
    )
    return replace(batch, plan=plan)


def run_learn(
    config: Config,
    rollouts: Rollouts,
    *,
    num_steps: int = 1,
    stop_in: Path | None = None,
    measures_rounding: bool = False,
    recorded: Sequence[int] = (),
    place: tuple[int, int] = (0, 0),
) -> Report:
    """Steps on this rank, from verdicts to weights. The default process group must be up.

    With `stop_in`, a folder, the step is stopped after its first update, and goes on from there.
    """
    policy = load_policy(config)
    groups = policy.groups
    batch, method = make_batch(rollouts, config.objective.resolve()), config.objective.resolve()

    def go_on(opened: OpenStep, **options: Any) -> dict[str, float] | None:
        batch = planned(opened.batch, config, data_parallel_size=groups.dp_size)
        sections = (config.objective, config.rollout)
        options |= {"progress": opened.progress, "measures_rounding": measures_rounding}
        options = {"recorded": recorded, "place": place} | options
        return learn(policy, batch, *sections, Stopwatch(), **options)

    with record(policy) as updates:
        for _ in range(num_steps):
            opened = OpenStep(batch, metrics={}, evaluated={})
            if stop_in is not None:
                answers = iter([False, True])
                stopped = go_on(opened, must_stop=partial(next, answers))
                assert stopped is None and opened.progress.num_updates == 1
                for name, content in opened.serialised().items():
                    files.write(stop_in / name, content)
                dist.barrier()
                opened = OpenStep.load(stop_in, policy.device, num_updates=1)
            # After a stop another choice of records, as by another setting, comes too late.
            metrics = go_on(opened, **({"recorded": [0]} if stop_in else {}))
            assert metrics is not None
    records = []
    if recorded:
        ranks, channel = DataParallelRanks.gather(groups, None), GroupChannel(dist.group.WORLD)
        apart = planned(batch, config, data_parallel_size=groups.dp_size)
        apart = apart.spread(rank=channel.rank, size=channel.size)
        records = gather(
            bring_tokens(apart, ranks=ranks, channel=channel),
            opened.progress.recorded or [],
            opened.progress.records,
            is_per_token=method.ratio == "token",
            ranks=ranks,
            channel=channel,
        )
    report = Report(updates, metrics, copies(policy), records)
    destroy()
    return report


@contextmanager
def record(policy: Policy) -> Iterator[list[Seen]]:
    """Watch every update of `learn` from outside: nothing it computes changes."""
    updates: list[Seen] = []
    losses: list[PolicyLoss] = []
    update, policy_loss = learn_module.update, loss_module.policy_loss
    prepare_grads = policy.optimizer.prepare_grads

    def watched_loss(*args: Any, **kwargs: Any) -> PolicyLoss:
        losses.append(policy_loss(*args, **kwargs))
        return losses[-1]

    def watched_grads() -> bool:
        updates[-1].gradients = gradients(policy)
        return prepare_grads()

    def watched_update(
        policy: Policy, microbatches: Any, loss: Any, **options: Any
    ) -> UpdateResult:
        losses.clear()
        seen = Seen(copies(policy), num_microbatches=sum(len(m.indices) > 0 for m in microbatches))
        updates.append(seen)
        result = update(policy, microbatches, loss, **options)
        seen.grad_norm = result.grad_norm
        assert len(losses) == (len(microbatches) if policy.groups.is_last_stage else 0)
        for microbatch, part in zip(microbatches, losses, strict=False):
            if part.per_token:
                continue
            seen.ratios |= zip(microbatch.indices, part.ratio.tolist(), strict=True)
            seen.clipped |= zip(microbatch.indices, part.clipped.tolist(), strict=True)
        if policy.groups.is_first_copy:
            seen.loss = sum(float(part.loss.detach()) for part in losses)
        return result

    with ExitStack() as stack:
        stack.enter_context(patch.object(learn_module, "update", watched_update))
        stack.enter_context(patch.object(loss_module, "policy_loss", watched_loss))
        stack.enter_context(patch.object(policy.optimizer, "prepare_grads", watched_grads))
        yield updates


@dataclass
class Expected:
    """What the reference says about one mini-batch; sequences by row of the mini-batch."""

    loss: float
    gradients: dict[str, Tensor]
    ratios: dict[int, float]
    """Of the sequences with A != 0."""
    clipped: dict[int, bool]
    log_probs: dict[int, Tensor]
    """Of every valid sequence."""
    importance_weights: dict[int, float] = field(default_factory=dict)
    """Of the sequences with A != 0, where the method has them."""

    @property
    def grad_norm(self) -> float:
        return sum(float(g.square().sum()) for g in self.gradients.values()) ** 0.5


def load_model(folder: Path, weights: dict[str, Tensor] | None = None) -> nn.Module:
    """The model of transformers in `folder`, at other weights if given."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if weights is not None:
        missing, extra = model.load_state_dict(weights, strict=False)
        assert not extra and set(missing) <= {"lm_head.weight"}  # tied
        model.tie_weights()
    return model


def expected_update(
    model: nn.Module, rollouts: Rollouts, *, old: nn.Module, config: Config
) -> Expected:
    """The reference's update of a mini-batch at `model`'s weights, sampled at those of `old`.

    Carried tokens have the old log-probs that they came with.

    A rollout without a verdict is left out, and its group is smaller. So the reference is asked
    group by group; a mean over tokens is the mean over groups, weighted by their tokens.
    """
    method = config.objective.resolve()
    temperature = config.rollout.temperature
    old = in_float64(old)
    is_valid = ~np.isnan(rollouts.rewards)
    num_tokens = int(rollouts.table["num_sampled_tokens"][is_valid].sum())
    result = Expected(0.0, {}, {}, {}, {})
    for number in range(rollouts.num_groups):
        rows = [row for row in rollouts.rows_of([number]) if is_valid[row]]
        prompts = [rollouts.prompt_ids[row].tolist() for row in rows]
        responses = [rollouts.response_ids[row].tolist() for row in rows]
        numbers = [rollouts.conversations_of(row).tolist() for row in rows]
        with torch.no_grad():
            old_log_probs = response_log_probs(old, prompts, responses, temperature, numbers)
        for values, row in zip(old_log_probs, rows, strict=True):
            carried = torch.from_numpy(rollouts.carried_log_probs[row])
            values[: len(carried)] = carried
        masks = [torch.from_numpy(rollouts.is_sampled(row)) for row in rows]
        old_log_probs = [one[mask] for one, mask in zip(old_log_probs, masks, strict=True)]
        weights = None
        if (largest := config.objective.importance_weight_max) is not None:
            engines = [rollouts.rollout_log_probs[row][rollouts.is_sampled(row)] for row in rows]
            weights = [
                min(math.exp(float((ours - torch.from_numpy(theirs)).mean())), largest)
                for ours, theirs in zip(old_log_probs, engines, strict=True)
            ]
        update = gapo_update(
            model,
            prompts=prompts,
            responses=responses,
            rewards=rollouts.rewards[rows].tolist(),
            group_size=len(rows),
            old_log_probs=old_log_probs,
            eps_low=method.eps_low,
            eps_high_max=method.eps_high_max,
            temperature=temperature,
            importance_weights=weights,
            masks=masks,
            conversations=numbers,
        )
        share = sum(map(len, update.log_probs)) / num_tokens
        result.loss += share * update.loss
        for name, gradient in update.gradients.items():
            result.gradients[name] = result.gradients.get(name, 0) + share * gradient
        for i, row in enumerate(rows):
            result.log_probs[row] = update.log_probs[i]
            if update.advantages[i] != 0:
                if weights is not None:
                    result.importance_weights[row] = weights[i]
                result.ratios[row] = update.ratios[i]
                result.clipped[row] = update.clipped[i]
    return result


def assert_update(update: Seen, expected: Expected, *, start: int, bound: float = 1e-5) -> None:
    """The update of a mini-batch whose first row is `start` of the batch is the reference's.

    Gradients within `bound`, the loss within a fiftieth of it.
    """
    assert update.loss == pytest.approx(expected.loss, abs=bound / 50)
    assert {i - start for i in update.ratios} == expected.ratios.keys()
    for position, ratio in expected.ratios.items():
        assert update.ratios[start + position] == pytest.approx(ratio, rel=1e-5)
        assert update.clipped[start + position] == expected.clipped[position]
    for name, whole in expected.gradients.items():
        # As in test_policy_reference: float32, 2e-6 measured there.
        error = (update.gradients[name].double() - whole).norm()
        assert error <= bound * whole.norm(), (start, name, float(error / whole.norm()))
