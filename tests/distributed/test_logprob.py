"""The operator with the vocabulary, the positions or the tokens of a sequence spread over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings

from gapo_megatron.errors import DivergenceError
from gapo_megatron.logprob import sequence_log_ratio, token_log_probs
from gapo_megatron.objective import METHODS, policy_loss, upper_clip
from gapo_megatron.objective.losses import bounded_exp
from tests.dist import run_distributed
from tests.logprob_setup import (
    BOUNDS,
    EDGE_CASES,
    KINDS,
    Case,
    Result,
    cases,
    many_blocks,
    own_part,
    problem,
    reference,
    relative,
)
from tests.messages import mentions

# Prompts of 10 and of 12 tokens, responses with and without a gradient, padding. Of the 25
# positions of each of four ranks the third's have none that is active, the last's none at all.
POSITIONS = "." * 10 + "a" * 20 + "c" * 5 + "." * 12 + "a" * 3 + "c" * 25 + "." * 25
# 4 shards of 251 tokens, one of them 3 short; tiles of 60 that cut neither evenly.
PRECISION = {
    (kind, dtype): Case(
        POSITIONS,
        padded_size=1004,
        vocab_size=1001,
        kind=kind,
        dtype=dtype,
        hidden_size=64,
        with_entropy=True,
        into_main_grad=into_main_grad,
    )
    for kind in KINDS
    for dtype, into_main_grad in ((torch.float32, False), (torch.bfloat16, True))
}
# (tensor-parallel ranks, sequence parallelism)
LAYOUTS = ((2, False), (2, True), (4, False), (4, True))
NUM_EXAMPLES = 50

# Three sequences of 30, 30 and 14 tokens, and an empty one; in float32 what the policy does.
NUM_TOKENS, LENGTHS = 74, (30, 0, 30, 14)
SEQUENCE_IDS = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
ADVANTAGES = torch.tensor([0.75, 0.0, -0.25, -0.5], dtype=torch.float64)
NUM_CORRECT = torch.tensor([1, 4, 3, 2])
# Ratios just above the upper clip, anywhere, just inside, and just below the lower clip.
LOG_RATIOS = torch.tensor([8e-3, 0.0, -1e-3, -9e-3], dtype=torch.float64)
# What each context-parallel rank holds: one cut inside a sequence, one that leaves nothing.
CUTS = (40, NUM_TOKENS)


def on_every_rank() -> dict[Any, Any]:
    """All cases in one start of four processes."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    groups = {2: pairs[rank // 2], 4: dist.group.WORLD}
    results: dict[Any, Any] = {}
    with many_blocks(num_columns=60):
        for layout in LAYOUTS:
            for key, case in PRECISION.items():
                results[key, layout] = case.run(groups[layout[0]], sequence_parallel=layout[1])
    with many_blocks():
        for layout in LAYOUTS:
            for case in EDGE_CASES:
                case.check(groups[layout[0]], sequence_parallel=layout[1])
        any_case(groups=groups, num_seen=results)
        for cut in CUTS:
            for dtype in (torch.float64, torch.bfloat16):
                for kind in KINDS:
                    for sequence_parallel in (False, True):
                        results["log_ratio", cut, dtype, kind, sequence_parallel] = log_ratio(
                            cut,
                            dtype,
                            kind,
                            groups[2],
                            across[rank % 2],
                            sequence_parallel=sequence_parallel,
                        )
    for group in groups.values():
        one_bad_shard(group)
    shards_of_unequal_tokens(groups[2])
    return results


# Every rank generates the same examples: nothing here may depend on time or on an earlier run.
# A failure ends the run of all ranks, so nothing can be shrunk.
@settings(
    max_examples=NUM_EXAMPLES,
    phases=[Phase.generate],
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(case=cases())
def any_case(case: Case, groups: dict[int, dist.ProcessGroup], num_seen: dict[Any, Any]) -> None:
    for size, sequence_parallel in LAYOUTS:
        case.check(groups[size], sequence_parallel=sequence_parallel)
    num_seen["examples"] = num_seen.get("examples", 0) + 1


def ratio_inputs(
    dtype: torch.dtype, kind: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a weight of 18 tokens and 2 of padding, labels, old log-probs in float64."""
    labels = torch.arange(NUM_TOKENS) % 18
    hidden, weight, _ = problem(
        NUM_TOKENS, 20, kind=kind, dtype=dtype, hidden_size=16, labels=labels
    )
    weight[18:] = torch.nan
    current, _ = reference(hidden, weight, labels, temperature=0.7, vocab_size=18)
    noise = torch.randn(NUM_TOKENS, generator=torch.Generator().manual_seed(7)).double()
    for sequence in range(len(LENGTHS)):
        noise[sequence == SEQUENCE_IDS] -= noise[sequence == SEQUENCE_IDS].mean()
    return hidden, weight, labels, current - LOG_RATIOS[SEQUENCE_IDS] - 0.1 * noise


def log_ratio(
    cut: int,
    dtype: torch.dtype,
    kind: str,
    tp_group: dist.ProcessGroup,
    cp_group: dist.ProcessGroup,
    *,
    sequence_parallel: bool,
) -> Result:
    """Sequence ratios and gradients of their loss, from this rank's tokens and vocabulary."""
    hidden, weight, labels, old = ratio_inputs(dtype, kind)
    rows = (slice(0, cut), slice(cut, NUM_TOKENS))[cp_group.rank()]
    shard = own_part(weight, tp_group.rank(), 2).clone().requires_grad_()
    own = hidden[rows]
    if sequence_parallel:
        own = own_part(own, tp_group.rank(), 2)
    leaf = own.clone().requires_grad_()
    lengths = torch.tensor(LENGTHS)
    found, _ = sequence_log_ratio(
        leaf,
        shard,
        labels[rows],
        old[rows],
        sequence_ids=SEQUENCE_IDS[rows],
        num_sequences=len(LENGTHS),
        num_response_tokens=lengths,
        temperature=0.7,
        vocab_start=tp_group.rank() * len(shard),
        vocab_size=18,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        cp_group=cp_group,
    )
    # The loss of `policy_loss`, from one number per sequence.
    method, ratio = METHODS["gapo"], bounded_exp(found)
    high = upper_clip(
        NUM_CORRECT, group_size=4, eps_low=method.eps_low, eps_high_max=method.eps_high_max
    )
    high = torch.where(ADVANTAGES > 0, high, method.eps_low)
    bounded = torch.minimum(ratio.clamp(min=1 - method.eps_low), 1 + high)
    losses = torch.maximum(-ADVANTAGES * ratio, -ADVANTAGES * bounded)
    loss = (lengths * losses).sum() / NUM_TOKENS
    loss.backward()
    assert leaf.grad is not None and shard.grad is not None
    grad_hidden = leaf.grad
    if sequence_parallel:
        parts = [torch.empty_like(grad_hidden) for _ in range(2)]
        dist.all_gather(parts, grad_hidden, group=tp_group)
        grad_hidden = torch.cat(parts)
    return {
        "log_ratio": found.detach(),
        "loss": loss.detach(),
        "hidden": grad_hidden,
        "weight": shard.grad,
    }


def one_bad_shard(group: dist.ProcessGroup) -> None:
    """Every rank raises, so that none is left waiting for another."""
    hidden, weight, labels = problem(8, 12)
    weight[6] = torch.nan
    shard = own_part(weight, group.rank(), group.size())
    start = group.rank() * len(shard)
    with pytest.raises(DivergenceError, match="row 0 "):
        token_log_probs(hidden, shard, labels, vocab_start=start, tp_group=group)
    with pytest.raises(ValueError, match=mentions("vocab_start (1)", "tp_rank")):
        token_log_probs(hidden, shard, labels, vocab_start=1, tp_group=group)


def shards_of_unequal_tokens(group: dist.ProcessGroup) -> None:
    """Ranks agree on the blocks of rows also where the last one has far fewer tokens.

    At the tiles' own sizes, where 7000 rows are two blocks for 1200 columns, and one for 100.
    """
    case = Case("a" * 7000, padded_size=2400, vocab_size=1300, dtype=torch.float32, hidden_size=4)
    found = case.run(group)["hidden"]
    same = [torch.empty_like(found) for _ in range(group.size())]
    dist.all_gather(same, found, group=group)
    assert all(torch.equal(other, found) for other in same)
    assert relative(found, case.expected()["hidden"]) <= BOUNDS[torch.float32][2]


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return run_distributed(on_every_rank, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_vocabulary_over_ranks_agrees_with_float64(
    ranks: list[dict[Any, Any]], kind: str, dtype: torch.dtype
) -> None:
    expected = PRECISION[kind, dtype].expected()
    log_prob, entropy, grad_hidden, grad_weight = BOUNDS[dtype]
    if dtype == torch.float32 and kind.startswith("offset"):
        # Logits of 200 / 0.8 have a last bit of 1.5e-5, probabilities hence that relative error.
        log_prob = entropy = grad_hidden = grad_weight = 5e-5
    if dtype == torch.bfloat16:
        grad_weight = 2e-3  # into the float32 main_grad: the result is not rounded
    for size, sequence_parallel in LAYOUTS:
        where = f"{size} ranks, sequence_parallel {sequence_parallel}"
        found = [rank[(kind, dtype), (size, sequence_parallel)] for rank in ranks[:size]]
        first, hidden = found[0], torch.cat([f["hidden"] for f in found])
        for name in ("log_probs", "entropy", *(() if sequence_parallel else ("hidden",))):
            assert all(torch.equal(f[name], first[name]) for f in found), f"{where}: {name}"
        if not sequence_parallel:
            hidden = first["hidden"]
        weight = torch.cat([f["weight"] for f in found])
        assert hidden.dtype == dtype and weight.dtype == torch.float32
        assert (first["log_probs"] - expected["log_probs"]).abs().max() <= log_prob, where
        assert (first["entropy"] - expected["entropy"]).abs().max() <= entropy, where
        assert relative(hidden, expected["hidden"]) <= grad_hidden, where
        assert relative(weight, expected["weight"]) <= grad_weight, where
        assert not weight[1001:].any(), where


def test_every_rank_saw_every_example(ranks: list[dict[Any, Any]]) -> None:
    """What they have to agree with, `Case.check` says; a failure there ends all ranks."""
    assert [rank["examples"] for rank in ranks] == [NUM_EXAMPLES] * 4


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_sequence_ratios_over_ranks_make_the_loss_of_one_rank(
    ranks: list[dict[Any, Any]],
    dtype: torch.dtype,
    kind: str,
    cut: int,
    sequence_parallel: bool,
) -> None:
    """Ranks 0 and 1 share the vocabulary, ranks 0 and 2 the tokens."""
    found = [rank["log_ratio", cut, dtype, kind, sequence_parallel] for rank in ranks]
    for name in ("log_ratio", "loss"):
        assert all(torch.equal(f[name], found[0][name]) for f in found), name
    # On one rank, in float64, as the trainer's loop computes it.
    hidden, weight, labels, old = ratio_inputs(dtype, kind)
    leaves = hidden.double().requires_grad_(), weight[:18].double().requires_grad_()
    log_probs = token_log_probs(*leaves, labels, temperature=0.7)
    assert isinstance(log_probs, torch.Tensor)
    result = policy_loss(
        log_probs,
        old,
        sequence_ids=SEQUENCE_IDS,
        advantages=ADVANTAGES,
        num_correct=NUM_CORRECT,
        group_size=4,
        num_tokens_global=NUM_TOKENS,
        method=METHODS["gapo"],
    )
    result.loss.backward()
    assert result.clipped.tolist() == [True, False, False, True]
    grad_hidden = torch.cat([found[0]["hidden"], found[2]["hidden"]])
    parts = [found[rank]["weight"].double() + found[2 + rank]["weight"] for rank in (0, 1)]
    # float64: sums of 74 terms. bfloat16: D to 1e-5, and the bounds of the gradients as always.
    bound, grad_bound = (1e-13, 1e-11) if dtype == torch.float64 else (1e-5, BOUNDS[dtype][2])
    assert (found[0]["log_ratio"] - LOG_RATIOS).abs().max() <= bound
    assert float(found[0]["loss"]) == pytest.approx(float(result.loss.detach()), abs=bound)
    assert leaves[0].grad is not None and leaves[1].grad is not None
    assert relative(grad_hidden, leaves[0].grad) <= grad_bound
    assert relative(torch.cat(parts)[:18], leaves[1].grad) <= grad_bound
