"""The packing plan: which rank computes which sequence in which micro-batch.

Made once per rollout batch from lengths alone, identically on every rank without communication. The
old and the new pass both follow it, so that a ratio differs from 1 only if the weights differ.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

import torch

from gapo_megatron.errors import ConfigError
from gapo_megatron.types import Minibatch, Plan


def plan(
    lengths: torch.Tensor,
    advantages: torch.Tensor,
    *,
    num_minibatches: int,
    max_tokens_per_microbatch: int,
    data_parallel_size: int,
    num_response_tokens: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    keep_zero_advantage: bool = False,
) -> Plan:
    """Assign the sequences that can change the weights to ranks and micro-batches.

    Mini-batch m is the m-th run of B / num_minibatches consecutive sequences. Its sequences with A
    = 0 are left out, but count in its denominators. The others are spread over ranks, and on each
    rank over micro-batches, balanced in tokens by a greedy rule (longest first, to the least
    loaded): ranks then finish together, and pipeline stages have equal loads. All ranks get the
    same number of micro-batches, the smallest found that fits the budget, and at least one.

    Args:
        lengths: [B] int64 tokens fed to the model per sequence (`Rollouts.num_fed_tokens`).
        advantages: [B].
        num_minibatches: optimizer steps; divides B.
        max_tokens_per_microbatch: token budget of a micro-batch, before alignment.
        data_parallel_size: number of ranks.
        num_response_tokens: [B] int64, for the global token counts; None counts `lengths`.
        valid: [B] bool, False for unknown verdicts: neither computed nor counted; None: all valid.
        keep_zero_advantage: compute sequences with A = 0 too (a KL or entropy term needs them).

    Returns:
        The plan: every active sequence exactly once; a pure function of the arguments.

    Raises:
        ConfigError: num_minibatches does not divide B, or a sequence exceeds the budget (named).
    """
    num_sequences = len(lengths)
    if num_sequences % num_minibatches:
        raise ConfigError(
            f"{num_sequences} sequences do not split into {num_minibatches} equal mini-batches"
        )
    valid = torch.ones(num_sequences, dtype=torch.bool) if valid is None else valid
    counted = lengths if num_response_tokens is None else num_response_tokens
    too_long = (lengths > max_tokens_per_microbatch).nonzero().flatten().tolist()
    if too_long:
        raise ConfigError(
            f"sequence {too_long[0]} has {int(lengths[too_long[0]])} tokens; each must fit "
            f"batch.max_tokens_per_microbatch ({max_tokens_per_microbatch})"
        )
    active = valid if keep_zero_advantage else valid & (advantages != 0)
    minibatches = []
    for slot in torch.arange(num_sequences).chunk(num_minibatches):
        indices = slot[active[slot]].tolist()
        minibatches.append(
            Minibatch(
                microbatches=_deal(
                    indices,
                    lengths[indices].tolist(),
                    num_ranks=data_parallel_size,
                    budget=max_tokens_per_microbatch,
                ),
                num_tokens_global=int(counted[slot][valid[slot]].sum()),
                num_sequences_global=int(valid[slot].sum()),
            )
        )
    return Plan(
        minibatches=tuple(minibatches),
        num_tokens_skipped=int(lengths[~active].sum()),
        num_tokens_computed=int(lengths[active].sum()),
    )


def _deal(
    indices: Sequence[int], lengths: Sequence[int], *, num_ranks: int, budget: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """[num_ranks][num_microbatches] tuples of `indices`; fullest first, empty last."""
    length_of = dict(zip(indices, lengths, strict=True))
    longest_first = sorted(indices, key=lambda index: (-length_of[index], index))
    ranks = _spread(longest_first, length_of, num_bins=num_ranks)

    def deal(num_microbatches: int) -> list[list[list[int]]]:
        return [_spread(rank, length_of, num_bins=num_microbatches) for rank in ranks]

    def fits(num_microbatches: int) -> bool:
        # The fullest micro-batch of a rank comes first.
        return all(sum(length_of[i] for i in bins[0]) <= budget for bins in deal(num_microbatches))

    heaviest = max(sum(length_of[i] for i in rank) for rank in ranks)
    fewest = max(1, -(-heaviest // budget))
    most = max(fewest, *(len(rank) for rank in ranks))  # a sequence per micro-batch always fits
    candidates = range(fewest, most)
    num_microbatches = fewest + bisect.bisect_left(candidates, True, key=fits)
    return tuple(tuple(tuple(sorted(bin_)) for bin_ in bins) for bins in deal(num_microbatches))


def _spread(
    longest_first: Sequence[int], length_of: dict[int, int], *, num_bins: int
) -> list[list[int]]:
    """Put each sequence in turn into the emptiest bin (in tokens); return the fullest bin first."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, number) for number in range(num_bins)]
    for index in longest_first:
        load, number = loads[0]
        bins[number].append(index)
        heapq.heapreplace(loads, (load + length_of[index], number))
    return [bins[number] for load, number in sorted(loads, key=lambda bin_: (-bin_[0], bin_[1]))]
