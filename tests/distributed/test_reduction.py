"""Overlapping the gradient reduction changes no weight, whichever passes ranks skip."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gapo_megatron import checkpoint
from gapo_megatron.config import Config, counts
from gapo_megatron.errors import DivergenceError
from gapo_megatron.learn.score import log_probs
from gapo_megatron.learn.update import update
from gapo_megatron.policy import ParallelGroups, Policy, destroy, initialize
from gapo_megatron.policy.reduction import GradientReduction
from tests.attempt_setup import make_attempt
from tests.dist import run_distributed, single_rank
from tests.distributed import conversion_setup
from tests.distributed.checkpoint_setup import make_state
from tests.distributed.policy_setup import (
    CP,
    EP,
    PP,
    SP,
    TP,
    VPP,
    ClippedLoss,
    WeightedLoss,
    copies,
    load_policy,
    make_batch,
    make_config,
    save_model,
)
from tests.messages import mentions

BATCH = make_batch(vocab_size=conversion_setup.VOCAB_SIZE)
# Which sequences are clipped in each update: of one rank or the other the last micro-batch, of the
# second rank all, of the first rank the first one, and of both all (nothing may move).
CLIPPED = ((5, 6, 7), (1, 2, 3), (4, 5, 6, 7), (0,), tuple(range(8)))
# The micro-batches of each data parallel rank.
Shares = list[list[tuple[int, ...]]]
APART: Shares = [[(0,), (1, 2, 3)], [(4,), (5, 6, 7)]]
TOGETHER: Shares = [[(0,), (4,), (1, 2, 3, 5, 6, 7)]]
# With two virtual stages a fourth micro-batch is added, of nothing.
THREE: Shares = [[(0,), (), (1, 2, 3)], [(4,), (), (5, 6, 7)]]
MORE_OF_ONE: Shares = [[(0,), (1,), (2, 3)], [(4, 5, 6, 7)]]


@dataclass(frozen=True)
class Case:
    """A model and its layout."""

    model: str
    shares: Shares
    parallel: dict[str, Any] = field(default_factory=dict)
    bucket_size: int = 1
    """With 1: a bucket for each parameter. Autograd produces them in another order than memory."""
    recompute: str = "none"


# Sums of two ranks only: they do not depend on where a bucket ends.
TWO_RANKS = {
    "tied": Case("qwen2_tied", APART),
    "untied, recomputed": Case("qwen2_untied", APART, recompute="full"),
    "larger buckets": Case("qwen2_tied", APART, bucket_size=20_000),
    "other numbers of micro-batches": Case("qwen3", MORE_OF_ONE),
    "context": Case("qwen2_tied", TOGETHER, {CP: 2}),
    "experts": Case("qwen3_moe", APART),
    "experts apart": Case("qwen3_moe", APART, {EP: 2}),
}
FOUR_RANKS = {
    "tensor": Case("qwen2_tied", APART, {TP: 2}),
    "sequence, experts apart": Case("qwen3_moe", APART, {TP: 2, SP: True, EP: 2}),
    "pipeline": Case("qwen2_tied", APART, {PP: 2}),
    "pipeline, experts": Case("qwen3_moe", APART, {PP: 2}),
    "virtual": Case("qwen2_tied", APART, {PP: 2, VPP: 2}),
    "virtual, filled up": Case("qwen2_tied", THREE, {PP: 2, VPP: 2}),
}


@dataclass
class Report:
    """Results of one rank."""

    weights: dict[str, Tensor]
    grad_norms: list[float]
    num_buckets: int = 0
    num_begun: list[int] = field(default_factory=list)
    """Buckets in progress at the end of the last backward pass of each update."""


def configure(folder: Path, case: Case, *, overlap: bool) -> Config:
    return make_config(
        folder / case.model,
        model={"recompute": case.recompute},
        parallel=case.parallel | {"overlap_grad_reduce": overlap},
        # Nothing is clipped: the norm adds up shards, and what lies in a shard differs.
        optimizer={"clip_grad": 1e6, "weight_decay": 0.1},
    )


def train(folder: Path, case: Case, groups: ParallelGroups, *, overlap: bool) -> Report:
    config = configure(folder, case, overlap=overlap)
    with patch.object(counts, "bucket_size", lambda _: case.bucket_size):
        policy = load_policy(config, groups)
    microbatches = [policy.pack(BATCH, indices) for indices in case.shares[groups.dp_rank]]
    report = Report({}, [])
    with watch(report.num_begun):
        for clipped in CLIPPED:
            log_probs(policy, microbatches)
            loss = ClippedLoss(BATCH, microbatches, clipped)
            result = update(policy, microbatches, loss, skip_inactive=True)
            report.grad_norms.append(result.grad_norm)
            policy.make_room()
    report.weights = copies(policy)
    if policy.reduction is not None:
        report.num_buckets = policy.reduction.num_buckets
    return report


@contextlib.contextmanager
def watch(num_begun: list[int]) -> Iterator[None]:
    """Record the number of started buckets whenever the rest is started."""
    begin_rest = GradientReduction.begin_rest

    def watched(self: GradientReduction) -> None:
        num_begun.append(self.num_begun)
        begin_rest(self)

    with patch.object(GradientReduction, "begin_rest", watched):
        yield


def train_cases(folder: Path, cases: dict[str, Case]) -> dict[str, tuple[Report, ...]]:
    """Every case with and without the overlap, in the same groups."""
    found = {}
    for name, case in cases.items():
        groups = initialize(configure(folder, case, overlap=True).parallel)
        found[name] = tuple(train(folder, case, groups, overlap=on) for on in (True, False))
        destroy()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of four layers and one vocabulary, by name."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen2_tied", "qwen2_untied", "qwen3"):
        save_model(folder / name, name, num_layers=4)
    conversion_setup.save_model(folder / "qwen3_moe", "qwen3_moe")
    return folder


def compare(reports: list[tuple[Report, ...]], *, where: str) -> None:
    first = reports[0][0]
    assert first.num_buckets >= 5, where
    assert first.grad_norms[-1] == 0 < min(first.grad_norms[:-1]), where
    for overlapping, plain in reports:
        # fp32 sums of squares in another order.
        assert overlapping.grad_norms == pytest.approx(plain.grad_norms, rel=1e-6), where
        for name, weight in overlapping.weights.items():
            assert torch.equal(weight, plain.weights[name]), f"{where}: {name}"
            assert torch.equal(weight, first.weights[name]), f"{where}: {name}"


def num_begun(case: Case, *, num_buckets: int, dp_rank: int, stage: int) -> list[int]:
    """All buckets start within a last backward pass, if there is one; otherwise none."""
    if PP in case.parallel and (stage == 0 or VPP in case.parallel):
        # Zeros go back; and a virtual stage is over when the schedule says so.
        return [num_buckets] * len(CLIPPED)
    last = set(case.shares[dp_rank][-1])
    if case.parallel.get(EP) == 2 and TP not in case.parallel:
        last = set().union(*(shares[-1] for shares in case.shares))  # they go back together
    return [num_buckets if last - set(clipped) else 0 for clipped in CLIPPED]


def resume(folder: Path, run_dir: Path) -> list[dict[str, Tensor]]:
    """Weights after two updates, and after each way to stop and resume between them."""
    case = TWO_RANKS["larger buckets"]
    groups = initialize(configure(folder, case, overlap=True).parallel)
    found = []

    def build(overlap: bool) -> tuple[Config, Policy]:
        config = configure(folder, case, overlap=overlap)
        with patch.object(counts, "bucket_size", lambda _: case.bucket_size):
            policy = load_policy(config, groups)
        return config, policy

    def move(policy: Policy) -> None:
        microbatches = [policy.pack(BATCH, indices) for indices in case.shares[groups.dp_rank]]
        update(policy, microbatches, WeightedLoss(BATCH, microbatches))

    for before in (True, False):
        config, policy = build(before)
        move(policy)
        path = run_dir / str(before)
        checkpoint.save(
            path,
            make_state(1),
            policy=policy,
            config=config,
            attempt=make_attempt(path),
        )
        move(policy)
        found.append(copies(policy))
        for after in (True, False):
            config, policy = build(after)
            assert checkpoint.load_latest(path, policy=policy, config=config)
            move(policy)
            found.append(copies(policy))
    destroy()
    return found


@pytest.mark.parametrize(
    "cases",
    [
        {name: TWO_RANKS[name] for name in ("tied", "larger buckets", "experts apart")},
        pytest.param(TWO_RANKS, marks=pytest.mark.system),
        pytest.param(FOUR_RANKS, marks=pytest.mark.system),
    ],
    ids=["some", "two", "four"],
)
def test_ranks_move_as_without_the_overlap(folder: Path, cases: dict[str, Case]) -> None:
    ranks = run_distributed(train_cases, 4 if cases is FOUR_RANKS else 2, folder, cases)
    for name, case in cases.items():
        compare([found[name] for found in ranks], where=name)
        for rank, found in enumerate(ranks):
            outer, inner = divmod(rank, len(ranks) // 2)
            dp_rank, stage = (inner, outer) if PP in case.parallel else (outer, 0)
            if CP in case.parallel:
                dp_rank = 0
            report = found[name][0]
            expected = num_begun(case, num_buckets=report.num_buckets, dp_rank=dp_rank, stage=stage)
            assert report.num_begun == expected, (name, rank)


def test_a_run_resumes_with_and_without_the_overlap(folder: Path, tmp_path: Path) -> None:
    for first, *others in run_distributed(resume, 2, folder, tmp_path):
        assert len(others) == 5
        for other in others:
            assert all(torch.equal(other[name], weight) for name, weight in first.items())


@pytest.fixture
def policy(folder: Path) -> Iterator[Policy]:
    """On one rank, with a bucket for each parameter."""
    case = TWO_RANKS["tied"]
    config = configure(folder, case, overlap=True)
    with single_rank(), patch.object(counts, "bucket_size", lambda _: 1):
        policy = load_policy(config)
        yield policy
        destroy()


def test_a_gradient_that_is_not_finite_leaves_nothing_behind(policy: Policy) -> None:
    microbatches = [policy.pack(BATCH, indices) for indices in APART[0]]
    before = copies(policy)
    with pytest.raises(DivergenceError, match=mentions("gradient norm", "nan")):
        update(policy, microbatches, lambda scored: (scored.log_probs.sum() * torch.nan, {}))
    assert all(torch.equal(before[name], weight) for name, weight in copies(policy).items())
    assert update(policy, microbatches, WeightedLoss(BATCH, microbatches)).grad_norm > 0


def test_a_gradient_too_late_is_an_error_and_not_lost(policy: Policy) -> None:
    """As if the schedule treated every backward pass as the last."""
    microbatches = [policy.pack(BATCH, indices) for indices in APART[0]]
    reduction: Any = policy.reduction

    @contextlib.contextmanager
    def never() -> Iterator[None]:
        reduction._is_last = True
        yield

    reduction.not_last = never
    with pytest.raises(RuntimeError, match=r"bucket .* had started"):
        update(policy, microbatches, WeightedLoss(BATCH, microbatches))
    # And what it has begun is not taken for the next update's.
    with pytest.raises(RuntimeError, match="bucket 0"):
        update(policy, microbatches, WeightedLoss(BATCH, microbatches))
