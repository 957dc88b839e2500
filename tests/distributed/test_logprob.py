"""The head operator with the vocabulary or the positions sharded over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings

from gapo_megatron.errors import DivergenceError
from gapo_megatron.logprob import token_log_probs
from tests.dist import run_distributed
from tests.logprob_setup import (
    BOUNDS,
    EDGE_CASES,
    KINDS,
    Case,
    cases,
    many_blocks,
    own_part,
    problem,
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
    for dtype, into_main_grad in (
        (torch.float32, False),
        (torch.bfloat16, True),
        (torch.float16, True),
    )
}
# (tensor-parallel ranks, sequence parallelism)
LAYOUTS = ((2, False), (2, True), (4, False), (4, True))
NUM_EXAMPLES = 50

# Three sequences of 30, 30 and 14 tokens, and an empty one; in float32 what the policy does.


def on_every_rank() -> dict[Any, Any]:
    """All cases in one start of four processes."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
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
    """Ranks agree on the blocks of rows even if the last rank has far fewer tokens.

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_vocabulary_over_ranks_agrees_with_float64(
    ranks: list[dict[Any, Any]], kind: str, dtype: torch.dtype
) -> None:
    expected = PRECISION[kind, dtype].expected()
    log_prob, entropy, grad_hidden, grad_weight = BOUNDS[dtype]
    if dtype == torch.float32 and kind.startswith("offset"):
        # Logits of 200 / 0.8 have a last bit of 1.5e-5, probabilities hence that relative error.
        log_prob = entropy = grad_hidden = grad_weight = 5e-5
    if dtype.itemsize == 2:
        grad_weight /= 2  # into the float32 main_grad: the result is not rounded
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
    """`Case.check` compares the results; a failure there ends all ranks."""
    assert [rank["examples"] for rank in ranks] == [NUM_EXAMPLES] * 4
