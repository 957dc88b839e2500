"""A whole batch through `learn`, recorded, and what the float64 reference says about it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from gapo_megatron.batching import plan, sequence_lengths
from gapo_megatron.checkpoint import OpenStep
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.learn import loss as loss_module
from gapo_megatron.learn import step as learn_module
from gapo_megatron.learn.step import learn
from gapo_megatron.learn.update import UpdateResult
from gapo_megatron.objective import PolicyLoss
from gapo_megatron.policy import Policy, destroy, initialize
from gapo_megatron.types import Carried, Group, Outcome, Plan, Prompt, Rollout, Verdict
from tests.batches import make_batch
from tests.distributed import policy_setup
from tests.peers.reference import gapo_update, in_float64, response_log_probs

GROUP_SIZE = 4
# Verdicts of every rollout: correct, wrong, unknown. Two mini-batches of five groups; both hold
# groups without advantage, a group that an unknown verdict shrinks, and different c.
VERDICTS = (
    *("cwww", "wwww", "cwuc", "ccwc", "cccc"),
    *("wwww", "cwww", "wcuw", "wccc", "cwcw"),
)
NUM_MINIBATCHES = 2
_OUTCOMES = {"c": Outcome.CORRECT, "w": Outcome.WRONG, "u": Outcome.UNKNOWN}


def make_groups(verdicts: Sequence[str] = VERDICTS, *, seed: int = 0) -> list[Group]:
    """Random prompts of 1-8 and responses of 1-24 tokens."""
    random = np.random.default_rng(seed)

    def tokens(longest: int) -> np.ndarray:
        length = random.integers(1, longest + 1)
        return random.integers(0, policy_setup.VOCAB_SIZE, length).astype(np.int32)

    def rollout() -> Rollout:
        ids = tokens(24)
        return Rollout(ids, -4 * random.random(len(ids), dtype=np.float32), truncated=False)

    return [
        Group(
            prompt=Prompt(f"p{number}", tuple(tokens(8).tolist()), answer=""),
            rollouts=tuple(rollout() for _ in row),
            verdicts=tuple(Verdict(_OUTCOMES[letter]) for letter in row),
        )
        for number, row in enumerate(verdicts)
    ]


def carry_some(groups: Sequence[Group], config: Config) -> list[Group]:
    """Of every second rollout half of the tokens, of every fourth all are from earlier steps.

    Their log-probs then were other than now: ratios within the clip and beyond it.
    """
    random = np.random.default_rng(5)
    model = in_float64(load_model(Path(config.model.hf_dir)))

    def carry(prompt: Prompt, number: int, rollout: Rollout) -> Rollout:
        length = len(rollout.token_ids)
        if not (count := (0, length // 2, 0, length)[number % 4]):
            return rollout
        with torch.no_grad():
            (now,) = response_log_probs(
                model,
                [list(prompt.token_ids)],
                [rollout.token_ids.tolist()],
                config.rollout.temperature,
            )
        then = now.numpy()[:count] + random.normal(0, 0.02, count)
        return replace(rollout, carried=Carried(0, then.astype(np.float32)))

    return [
        replace(
            group,
            rollouts=tuple(carry(group.prompt, *one) for one in enumerate(group.rollouts)),
        )
        for group in groups
    ]


def mask_some(groups: Sequence[Group]) -> list[Group]:
    """Two rollouts of three have tokens that an environment gave: within, or first and last."""
    random = np.random.default_rng(6)

    def mask(number: int, rollout: Rollout) -> Rollout:
        length = len(rollout.token_ids)
        is_sampled = np.ones(length, dtype=bool)
        if number % 3 and length > 2:
            is_sampled = random.random(length) < 0.6
            is_sampled[0] = is_sampled[-1] = number % 3 == 1
            is_sampled[length // 2] = True
        return replace(put_in_masked(rollout, is_sampled, 0.0), response_mask=is_sampled)

    return [
        replace(group, rollouts=tuple(mask(*one) for one in enumerate(group.rollouts, number)))
        for number, group in enumerate(groups)
    ]


def put_in_masked(rollout: Rollout, is_sampled: np.ndarray, value: float) -> Rollout:
    """The rollout with `value` for every log-prob of a token that the model did not sample."""

    def put(log_probs: np.ndarray) -> np.ndarray:
        return np.where(is_sampled[: len(log_probs)], log_probs, np.float32(value))

    carried = rollout.carried
    if carried is not None:
        carried = replace(carried, old_log_probs=put(carried.old_log_probs))
    return replace(rollout, log_probs=put(rollout.log_probs), carried=carried)


def make_config(folder: Path, **sections: dict[str, Any]) -> Config:
    """GAPO at the paper's widths, in fp32; micro-batches that hold two or three sequences."""
    defaults: dict[str, dict[str, Any]] = {
        "data": {"max_prompt_tokens": 8},
        "rollout": {"max_response_tokens": 24, "temperature": 0.8},
        "batch": {"rollouts_per_prompt": GROUP_SIZE, "max_tokens_per_microbatch": 48},
        # Moves the ratios of the second mini-batch by as much as the clips are wide.
        "optimizer": {"learning_rate": 3e-4},
    }
    merged = {key: defaults.get(key, {}) | sections.get(key, {}) for key in defaults | sections}
    return policy_setup.make_config(folder, **merged)


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
    """By position in the batch; on the last pipeline stage, this data parallel rank's."""
    clipped: dict[int, bool] = field(default_factory=dict)


@dataclass
class Report:
    """What one rank saw of one step, or of several."""

    updates: list[Seen]
    metrics: dict[str, float]
    """Of the last step."""
    after: dict[str, Tensor]


def run_learn(
    config: Config,
    groups: Sequence[Group],
    *,
    num_minibatches: int,
    num_steps: int = 1,
    stop_in: Path | None = None,
) -> Report:
    """Steps on this rank, from verdicts to weights. The default process group must be up.

    With `stop_in`, a folder, the step is stopped after its first update, and goes on from there.
    """
    parallel = initialize(config.parallel)
    policy = Policy.build(config, parallel, "cpu")
    policy.load_hf_weights(policy_setup.read_weights(Path(config.model.hf_dir)))
    batch = make_batch(groups, config.objective.resolve())
    packing: Plan = plan(
        sequence_lengths(batch),
        batch.advantages,
        num_response_tokens=batch.num_response_tokens,
        valid=batch.valid,
        num_minibatches=num_minibatches,
        max_tokens_per_microbatch=config.batch.max_tokens_per_microbatch,
        data_parallel_size=parallel.dp_size,
        keep_zero_advantage=config.objective.needs_every_sequence,
    )
    with record(policy) as updates:
        for _ in range(num_steps):
            opened = OpenStep(batch, metrics={}, evaluated={})
            if stop_in is not None:
                answers = iter([False, True])
                arguments = (policy, batch, packing, config, Stopwatch())
                stopped = learn(
                    *arguments, progress=opened.progress, must_stop=partial(next, answers)
                )
                assert stopped is None and opened.progress.num_updates == 1
                opened.save(stop_in)
                dist.barrier()
                opened = OpenStep.load(stop_in, policy.device, num_updates=1)
            metrics = learn(
                policy, opened.batch, packing, config, Stopwatch(), progress=opened.progress
            )
    report = Report(updates, metrics, after=copies(policy))
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


def copies(policy: Policy) -> dict[str, Tensor]:
    """Every whole weight by Hugging Face name. Collective."""
    return {name: weight.clone() for name, weight in policy.iterate_hf_weights()}


@torch.no_grad()
def gradients(policy: Policy) -> dict[str, Tensor]:
    """Every whole gradient by Hugging Face name, exported in the weights' place. Collective."""
    buffers = [(*model.buffers, *model.expert_parallel_buffers) for model in policy.model]
    for buffer in itertools.chain(*buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            # A data parallel rank has the sum of its own shard only.
            shards = list(bucket.grad_data.chunk(group.size()))
            dist.all_gather(shards, shards[group.rank()].clone(), group=group)
    parameters = [parameter for stage in policy.stages for parameter in stage.parameters()]
    weights = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.copy_(parameter.main_grad)
    result = copies(policy)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight)
    return result


@dataclass
class Expected:
    """What the reference says about one mini-batch; sequences by position in the mini-batch."""

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
    model: nn.Module, groups: Sequence[Group], *, old: nn.Module, config: Config
) -> Expected:
    """The reference's update of a mini-batch at `model`'s weights, sampled at those of `old`.

    Carried tokens have the old log-probs that they came with.

    A rollout without a verdict is left out, and its group is smaller. So the reference is asked
    group by group; a mean over tokens is the mean over groups, weighted by their tokens.
    """
    method = config.objective.resolve()
    temperature = config.rollout.temperature
    old = in_float64(old)
    valid = [[i for i, r in enumerate(group.rewards) if r == r] for group in groups]
    num_tokens = sum(
        int(group.rollouts[i].is_sampled.sum())
        for group, rows in zip(groups, valid, strict=True)
        for i in rows
    )
    result = Expected(0.0, {}, {}, {}, {})
    for number, (group, rows) in enumerate(zip(groups, valid, strict=True)):
        prompts = [list(group.prompt.token_ids)] * len(rows)
        responses = [group.rollouts[i].token_ids.tolist() for i in rows]
        with torch.no_grad():
            old_log_probs = response_log_probs(old, prompts, responses, temperature)
        for values, i in zip(old_log_probs, rows, strict=True):
            if carried := group.rollouts[i].carried:
                values[: len(carried.old_log_probs)] = torch.from_numpy(carried.old_log_probs)
        masks = [torch.from_numpy(group.rollouts[i].is_sampled) for i in rows]
        old_log_probs = [one[mask] for one, mask in zip(old_log_probs, masks, strict=True)]
        weights = None
        if (largest := config.objective.importance_weight_max) is not None:
            engines = [group.rollouts[i].log_probs[group.rollouts[i].is_sampled] for i in rows]
            weights = [
                min(math.exp(float((ours - torch.from_numpy(theirs)).mean())), largest)
                for ours, theirs in zip(old_log_probs, engines, strict=True)
            ]
        update = gapo_update(
            model,
            prompts=prompts,
            responses=responses,
            rewards=[group.rewards[i] for i in rows],
            group_size=len(rows),
            old_log_probs=old_log_probs,
            eps_low=method.eps_low,
            eps_high_max=method.eps_high_max,
            temperature=temperature,
            importance_weights=weights,
            masks=masks,
        )
        share = sum(map(len, update.log_probs)) / num_tokens
        result.loss += share * update.loss
        for name, gradient in update.gradients.items():
            result.gradients[name] = result.gradients.get(name, 0) + share * gradient
        for row, i in enumerate(rows):
            position = number * GROUP_SIZE + i
            result.log_probs[position] = update.log_probs[row]
            if update.advantages[row] != 0:
                if weights is not None:
                    result.importance_weights[position] = weights[row]
                result.ratios[position] = update.ratios[row]
                result.clipped[position] = update.clipped[row]
    return result
