"""Exactly the work that cannot change the weights is skipped. On one rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gapo_megatron.compat import megatron_optimizer
from gapo_megatron.errors import DivergenceError
from gapo_megatron.learn import score as score_module
from gapo_megatron.learn import update as update_module
from gapo_megatron.learn.score import Scored, log_probs
from gapo_megatron.learn.update import UpdateResult, update
from gapo_megatron.logprob import Sequences, token_log_probs
from gapo_megatron.policy import ParallelGroups, Policy, destroy, initialize
from gapo_megatron.policy.loss_scale import LossScale
from tests.dist import single_rank
from tests.distributed.policy_setup import (
    ClippedLoss,
    always_back,
    count_backward,
    load_policy,
    make_batch,
    make_config,
    pack_all,
    save_model,
)
from tests.messages import mentions

BATCH = make_batch()
MICROBATCHES = pack_all(BATCH, [(0, 1, 2), (3, 4), (), (5, 6, 7)])
ALL = range(8)


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    with single_rank():
        yield initialize(make_config(Path("unused")).parallel)
        destroy()


@pytest.fixture(scope="module", params=["qwen2_tied", "qwen2_untied"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    save_model(path, request.param)
    return path


def build(folder: Path, groups: ParallelGroups, **sections: dict[str, object]) -> Policy:
    return load_policy(make_config(folder, **sections), groups)


def train(policy: Policy, clipped: Collection[int]) -> UpdateResult:
    loss = ClippedLoss(BATCH, MICROBATCHES, clipped)
    return update(policy, MICROBATCHES, loss, skip_inactive=True)


def gradients(policy: Policy) -> list[Tensor]:
    return [parameter.main_grad.clone() for parameter in policy.stages[0].parameters()]


def state(policy: Policy) -> list[Tensor]:
    """Weights, masters, moments and step counters."""
    optimizer = policy.optimizer
    parts = megatron_optimizer.parts(optimizer)
    tensors = [tensor for _, tensor in policy.iterate_hf_weights()]
    for part in parts:
        for parameter, moments in part.optimizer.state.items():
            tensors += [parameter.detach(), *moments.values()]
    assert len(tensors) > 50
    return [tensor.clone() for tensor in tensors]


def equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "model",
    [
        {"precision": "fp32"},
        {"recompute": "full"},
        {"precision": "bf16"},
        {"precision": "fp16"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("clipped", "num_backward"),
    [((), 3), ((0, 6), 3), ((3, 4), 2), ((0, 1, 2, 4, 5, 6, 7), 1), (ALL, 0)],
)
def test_a_micro_batch_of_clipped_sequences_has_no_backward_pass(
    folder: Path,
    groups: ParallelGroups,
    clipped: Collection[int],
    num_backward: int,
    model: dict[str, str],
) -> None:
    policy, whole = (build(folder, groups, model=model) for _ in range(2))
    if policy.loss_scale is not None:  # one at which nothing overflows, so that no pass is repeated
        policy.loss_scale, whole.loss_scale = LossScale(2.0**10), LossScale(2.0**10)
    passes = count_backward(policy)
    result = train(policy, clipped)
    # Of three with sequences; the empty one has nothing to go through.
    assert len(passes) == num_backward
    lengths = BATCH.num_sampled_tokens.tolist()
    assert [outputs["active_rows"].item() for outputs in result.outputs] == [
        sum(lengths[i] for i in microbatch.indices if i not in clipped)
        for microbatch in MICROBATCHES
    ]

    passes = count_backward(whole)
    with patch.object(update_module, "_has_backward", always_back):
        expected = train(whole, clipped)
    assert len(passes) == len(MICROBATCHES)
    # What was left out are exact zeros.
    assert equal(gradients(policy), gradients(whole))
    assert equal(state(policy), state(whole))
    assert result.grad_norm == expected.grad_norm
    assert (result.grad_norm == 0) == (clipped is ALL)


def test_an_update_without_gradient_never_was(folder: Path, groups: ParallelGroups) -> None:
    """With momenta and decay, which a step of zero gradient would apply."""
    settings = {"weight_decay": 0.1, "schedule": "cosine", "decay_steps": 5}
    policy, other = (build(folder, groups, optimizer=settings) for _ in range(2))
    for clipped in ((0, 1), (3, 4)):
        train(policy, clipped), train(other, clipped)
    before = state(policy)
    rates = [group["lr"] for group in policy.optimizer.param_groups]
    for _ in range(2):
        result = train(policy, ALL)
        assert result.grad_norm == 0
    assert equal(state(policy), before) and policy.num_updates == 2
    assert [group["lr"] for group in policy.optimizer.param_groups] == rates
    first, second = train(policy, (6,)), train(other, (6,))
    assert first.learning_rate == second.learning_rate
    assert equal(state(policy), state(other))
    assert policy.num_updates == other.num_updates == 3
    assert not equal(state(policy), before)


def test_a_loss_that_ignores_log_probs_moves_nothing(folder: Path, groups: ParallelGroups) -> None:
    policy = build(folder, groups)
    before = state(policy)
    passes = count_backward(policy)
    other = torch.ones((), requires_grad=True)
    for loss in (torch.tensor(1.0), 2 * other):
        result = update(policy, MICROBATCHES, lambda *_, value=loss: (value, {}))
        assert result.grad_norm == 0
        assert all(outputs["active_rows"] == 0 for outputs in result.outputs)
    assert equal(state(policy), before) and passes == []


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_not_skipped(
    folder: Path, groups: ParallelGroups, value: float, has_gradient: bool
) -> None:
    policy = build(folder, groups)
    train(policy, ())
    before = state(policy)
    clipped = ClippedLoss(BATCH, MICROBATCHES, ALL)

    def loss(scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        total, outputs = clipped(scored)
        if scored.index == 1:
            total = total + (scored.log_probs.sum() * value if has_gradient else value)
        return total, outputs

    with pytest.raises(DivergenceError, match=r"\bupdate 1\b.*\bnorm\b"):
        update(policy, MICROBATCHES, loss)
    assert equal(state(policy), before) and policy.num_updates == 1


def test_hidden_states_that_are_not_finite_are_named_with_their_micro_batch(
    folder: Path, groups: ParallelGroups
) -> None:
    policy = build(folder, groups)
    before = state(policy)
    row = len(BATCH.response_ids[3]) + 2  # of the second sequence
    place = int(MICROBATCHES[1].row_index[row])

    def poisoned(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Any:
        if labels is MICROBATCHES[1].labels:
            bad = torch.zeros_like(hidden)
            bad[place] = torch.inf
            hidden = hidden + bad
        return token_log_probs(hidden, weight, labels, **options)

    for run in (
        lambda: log_probs(policy, MICROBATCHES),
        lambda: update(policy, MICROBATCHES, lambda scored: (scored.log_probs.sum(), {})),
    ):
        found = mentions("micro-batch 1", f"row {row}", "sequence 4", f"hidden[{place}]")
        with (
            patch.object(score_module, "token_log_probs", poisoned),
            pytest.raises(DivergenceError, match=found),
        ):
            run()
    assert equal(state(policy), before) and policy.num_updates == 0


def test_a_flag_stops_the_update_whatever_the_loss(folder: Path, groups: ParallelGroups) -> None:
    policy = build(folder, groups)
    before = state(policy)

    def loss(scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        is_raised = torch.tensor(scored.index == 3)
        scored.flags.keep(is_raised, lambda: DivergenceError("sequence 6"))
        return scored.log_probs.sum(), {}

    with pytest.raises(DivergenceError, match=mentions("update 0", "micro-batch 3", "sequence 6")):
        update(policy, MICROBATCHES, loss)
    assert equal(state(policy), before) and policy.num_updates == 0


@pytest.mark.parametrize("head", ["auto", "torch"])
def test_the_head_adds_to_the_gradient_buffer_with_the_code_that_was_chosen(
    folder: Path, groups: ParallelGroups, head: str
) -> None:
    """Results do not show it: dW could go through autograd, or model.head do nothing."""
    seen = []

    def watched(*args: Tensor, **options: object) -> object:
        seen.append((options["main_grad"], options["implementation"]))
        return token_log_probs(*args, **options)

    def sums(*args: Tensor, implementation: str) -> Sequences:
        summed_by.append(implementation)
        return Sequences(*args)

    summed_by: list[str] = []
    policy = build(folder, groups, model={"precision": "bf16", "head": head})
    with (
        patch.object(score_module, "token_log_probs", watched),
        patch.object(score_module, "Sequences", sums),
    ):
        train(policy, ())
    assert summed_by == [policy.head] * len(MICROBATCHES)
    weight = policy.stages[0].head_weight
    assert len(seen) == len(MICROBATCHES)
    for main_grad, implementation in seen:
        assert main_grad is weight.main_grad and implementation == "torch"
    assert weight.main_grad.dtype == torch.float32 and weight.main_grad.any()


def test_entropy_alone_is_a_reason_to_go_back(folder: Path, groups: ParallelGroups) -> None:
    policy = build(folder, groups)
    passes = count_backward(policy)

    def loss(scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        entropy = scored.entropy
        assert entropy is not None
        return (entropy[1:2] if scored.index == 1 else entropy * 0).sum(), {}

    result = update(policy, MICROBATCHES, loss, skip_inactive=True, with_entropy=True)
    assert [outputs["active_rows"].item() for outputs in result.outputs] == [0, 1, 0, 0]
    assert len(passes) == 1 and result.grad_norm > 0


def test_a_gradient_that_is_not_finite_is_not_skipped(folder: Path, groups: ParallelGroups) -> None:
    """The loss is 0, but the root of 0 has no derivative: NaN is neither zero nor above it."""
    policy = build(folder, groups)
    before = state(policy)

    def loss(scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs = scored.log_probs
        return (log_probs - log_probs.detach()).square().sum().sqrt(), {}

    with pytest.raises(DivergenceError, match=r"\bnorm\b.*\bnan\b"):
        update(policy, MICROBATCHES, loss)
    assert equal(state(policy), before)
