"""Groups: c and k of every prompt, advantages, and the flat batch made of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from gapo_megatron import user_code
from gapo_megatron.config.methods import Method
from gapo_megatron.errors import ConfigError, said, shown
from gapo_megatron.rollouts import Batch, Rollouts


def group_counts(rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count correct and valid rollouts of each group: the paper's c and k.

    Args:
        rewards: [G, k], 1 correct, 0 wrong, NaN unknown.

    Returns:
        `(num_correct, group_size)`, both [G] int64. Unknown verdicts count in neither.
    """
    _check_rewards(rewards)
    assert bool(((rewards == 0) | (rewards == 1) | rewards.isnan()).all()), (
        "c counts binary rewards: each must be 0, 1 or NaN"
    )
    return (rewards == 1).sum(dim=1), (~rewards.isnan()).sum(dim=1)


EQUAL = 2.0**-20
"""Rewards of a group are equal if they differ by no more than this share of the largest.

Sixteen roundings of float32, in which verifiers may count: a sum of parts in another order differs
by fewer. Whole numbers up to the largest grade, 1e6, differ by more. The largest counts as at least
`EQUAL`: of parts of order one that cancel, float64 leaves less than `EQUAL` squared.
"""


def with_virtual(rewards: torch.Tensor, virtual_correct: int) -> torch.Tensor:
    """Rewards [G, k] beside `virtual_correct` ones: NGRPO's answers that nobody has sampled.

    NaN in place of a 1 in groups with fewer than two known rewards, which say nothing.
    """
    has_group = (~rewards.isnan()).sum(dim=1, keepdim=True) > 1
    virtual = torch.where(has_group, 1.0, torch.nan).to(rewards.dtype)
    return torch.cat([rewards, virtual.expand(-1, virtual_correct)], dim=1)


def rewards_differ(rewards: torch.Tensor, *, virtual_correct: int = 0) -> torch.Tensor:
    """[G] bool: whether a group's valid rewards differ by more than rounding; else all A are 0.

    Args:
        rewards: [G, k], any floating dtype; NaN is an unknown verdict.
        virtual_correct: `Method.virtual_correct`; those of `with_virtual` count, too.
    """
    rewards = with_virtual(rewards, virtual_correct)
    valid, known = ~rewards.isnan(), rewards.double()
    highest = torch.where(valid, known, -torch.inf).amax(dim=1)
    lowest = torch.where(valid, known, torch.inf).amin(dim=1)
    return highest - lowest > EQUAL * torch.maximum(highest.abs(), lowest.abs()).clamp(min=EQUAL)


def group_advantages(
    rewards: torch.Tensor,
    *,
    normalize_std: bool = False,
    focal_gamma: float = 0.0,
    std_floor: float = 0.0,
    virtual_correct: int = 0,
) -> torch.Tensor:
    """Advantage of each rollout over its group: A_i = r_i - mean(r).

    Exactly zero where a group says nothing: unknown verdicts, groups whose valid rewards are all
    equal (c = 0 or c = k) up to rounding (`EQUAL`), groups with fewer than two valid rollouts.

    NGRPO adds virtual correct answers to the mean and the standard deviation of every group. With
    one of them, and the division, where c of k are correct:

        mean = (c + 1) / (k + 1),  A_i = (r_i - mean) / std(r, 1),  -1 / sqrt(k + 1) at c = 0

    So wrong rollouts of c = 0 have a gradient; only c = k has none. They have no tokens, and count
    in no denominator, c or k.

    Args:
        rewards: [G, k], any floating dtype. NaN is an unknown verdict: it leaves mean, standard
            deviation and k.
        normalize_std: divide by the group's sample standard deviation (GRPO). No constant is added
            to the divisor: groups where it would be needed have A = 0.
        focal_gamma: multiply by (1 - mean(r))^gamma, which is (1 - c/k)^gamma for binary rewards
            (F-GRPO); after the division, when both are asked for.
        std_floor: least standard deviation that is divided by.
        virtual_correct: number of virtual rollouts of reward 1 in each group (NGRPO).

    Returns:
        [G, k] float64.

    Raises:
        ConfigError: k < 2; a mean above 1 with `focal_gamma`, or a reward above 1 with
            `virtual_correct`.

    Source: the paper's equation for A_i (section 2.1) and for F-GRPO (section 4.1, baselines);
    NGRPO, arXiv 2509.18851 (abstract and a summary read), by its authors' code
    (nangongrui-ngr/NGRPO, commit e7a3804, `compute_ngrpo_outcome_advantage`).
    """
    _check_rewards(rewards)
    if virtual_correct and bool((rewards > 1).any()):
        raise ConfigError(
            f"objective.method with virtual_correct ({virtual_correct}) needs rewards of at most 1,"
            f" that of a virtual answer, not {float(rewards.nan_to_num().max()):g}"
        )
    num_rollouts = rewards.shape[1]
    rewards = with_virtual(rewards, virtual_correct)
    valid = ~rewards.isnan()
    known = torch.where(valid, rewards, 0).double()
    size = valid.sum(dim=1, keepdim=True)
    mean = known.sum(dim=1, keepdim=True) / size.clamp(min=1)
    deviation = torch.where(valid, known - mean, 0)

    # Decided on the rewards themselves: equal rewards may miss their own mean by a rounding error.
    informative = valid & rewards_differ(rewards)[:, None]

    scale = torch.ones_like(mean)
    if normalize_std:
        variance = deviation.square().sum(dim=1, keepdim=True) / (size - 1).clamp(min=1)
        scale = scale / variance.sqrt().clamp(min=std_floor)
    if focal_gamma:
        if (largest := float(mean.max())) > 1:
            raise ConfigError(
                f"objective.focal_gamma ({focal_gamma:g}) needs rewards of at most 1: a group's "
                f"mean is {largest:g}, and (1 - mean)^focal_gamma is no weight"
            )
        scale = scale * (1 - mean) ** focal_gamma
    return torch.where(informative, deviation * scale, 0)[:, :num_rollouts]


Advantages = Callable[[torch.Tensor], torch.Tensor]
"""From rewards [G, k] float64, NaN where a verdict is unknown, to advantages [G, k]."""


def find_advantages(method: Method) -> Advantages:
    """The function that makes advantages for a method; user code is loaded once per process.

    User code is called on every rank with the rewards of all groups of a step, and must return the
    same on all: any floating dtype, finite where the reward is known. Rewards are 0 and 1, or the
    verifier's numbers with `reward.graded`. Where a reward is unknown, or is the only known one of
    its group, A is 0, whatever it returns.

    Raises:
        ConfigError: user code cannot be loaded or called; or, in a call, what it returned.
    """
    if method.advantages:
        return _load_advantages(method.advantages)
    return functools.partial(
        group_advantages,
        normalize_std=method.normalize_std,
        focal_gamma=method.focal_gamma,
        std_floor=method.std_floor,
        virtual_correct=method.virtual_correct,
    )


@functools.cache
def _load_advantages(name: str) -> Advantages:
    """The user's function, with a check of what it returns in every call; called once here."""
    setting = "advantages of objective.method"
    function = user_code.load(name, setting=setting)
    if not callable(function):
        raise ConfigError(
            f"{setting} ({name!r}) must be a function from rewards to advantages, not "
            f"{type(function).__name__}"
        )

    def checked(rewards: torch.Tensor) -> torch.Tensor:
        try:
            with user_code.contained():
                found = function(rewards.clone())
        except Exception as error:
            raise ConfigError(f"{setting} ({name!r}): {said(error)}") from error
        if not isinstance(found, torch.Tensor) or found.shape != rewards.shape:
            there = tuple(found.shape) if isinstance(found, torch.Tensor) else shown(found)
            raise ConfigError(
                f"{setting} ({name!r}) must return [G, k], {tuple(rewards.shape)}, not {there}"
            )
        known = ~rewards.isnan()
        known &= known.sum(dim=1, keepdim=True) > 1
        advantages = torch.where(known, found.detach().double(), 0)
        if not advantages.isfinite().all():
            row = int((~advantages.isfinite()).any(dim=1).nonzero()[0])
            raise ConfigError(
                f"{setting} ({name!r}): advantages {found[row].tolist()} of rewards "
                f"{rewards[row].tolist()} must be finite"
            )
        return advantages

    checked(torch.tensor([[0.0, 1.0, 1.0, torch.nan]], dtype=torch.float64))
    return checked


def make_batch(rollouts: Rollouts, method: Method) -> Batch:
    """Give every sequence of a rollout batch its group's c and k and its advantage.

    Args:
        rollouts: G groups of the same size, all finished; the table is the same on every rank.
        method: decides how rewards become advantages.

    Returns:
        B = G x rollouts per prompt sequences, with the tokens that `rollouts` holds.

    Raises:
        ConfigError: k < 2; or as `find_advantages`.
    """
    assert len(rollouts), "a batch needs at least one group"
    assert rollouts.table["is_finished"].all(), "a batch is of finished rollouts"
    num_rows = rollouts.rollouts_per_prompt
    rewards = torch.from_numpy(rollouts.rewards).view(-1, num_rows)
    advantages = find_advantages(method)(rewards)
    num_correct, group_size = group_counts(torch.from_numpy(rollouts.outcomes).view(-1, num_rows))
    return Batch(
        rollouts.table,
        rollouts.tokens,
        metrics=rollouts.metrics,
        advantages=advantages.flatten(),
        num_correct=num_correct.repeat_interleave(num_rows),
        group_size=group_size.repeat_interleave(num_rows),
        valid=~rewards.isnan().flatten(),
    )


def _check_rewards(rewards: torch.Tensor) -> None:
    assert rewards.dim() == 2 and rewards.is_floating_point(), (
        f"rewards must be floating [G, k], not {rewards.dtype} {tuple(rewards.shape)}"
    )
    if rewards.shape[1] < 2:
        raise ConfigError(
            f"batch.rollouts_per_prompt ({rewards.shape[1]}) must be at least 2: "
            "one rollout has no group to compare with"
        )
    assert not bool(rewards.isinf().any()), "rewards must be finite, or NaN for an unknown verdict"
