"""Old log-probs of what a step has sampled and does not learn from: its groups are still open.

A ratio compares with the policy that sampled: the trainer, at the weights of each token's step.
Once they have moved nobody can ask them, so tokens that wait for the rest of their group are scored
in the step that samples them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from gapo_megatron.config import Config
from gapo_megatron.exchange import Channel, deal
from gapo_megatron.facts import Facts, Spread, Tokens
from gapo_megatron.learn.plan import deal_lengths
from gapo_megatron.learn.score import score
from gapo_megatron.learn.share import Places
from gapo_megatron.policy import Policy
from gapo_megatron.types import Sequences

_TOKENS, _LOG_PROBS = 3, 4
"""Tags of messages: to those that score, and back."""


def carry(
    policy: Policy,
    groups: Spread,
    config: Config,
    *,
    policy_version: int,
    places: Places,
    channel: Channel,
) -> Spread:
    """Make every token of `groups` carried: those that are not have been sampled just now.

    Args:
        policy: at the weights that sampled those tokens; unchanged.
        groups: open groups.
        config: the run's settings: token budget of a micro-batch.
        policy_version: version of these weights.
        places: which rank computes what.
        channel: joins all ranks.

    Returns:
        The groups, their tokens where they were. Responses without a new token are as they were.

    Collectives: those of `learn.score.score`, where a token is new, and before and after it one
    message at most between any two ranks.

    Raises:
        DivergenceError: a log-prob is not finite.
    """
    facts = groups.facts
    new = np.flatnonzero(facts.num_response_tokens > facts.num_carried_tokens)
    if not len(new):
        return groups
    fed = (facts.num_prompt_tokens + facts.num_response_tokens - 1)[new]
    packing = deal_lengths(
        torch.from_numpy(fed).long(),
        max_tokens_per_microbatch=config.batch.max_tokens_per_microbatch,
        data_parallel_size=len(places.scorers),
    )
    shares = [sorted(new[[i for one in dealt for i in one]].tolist()) for dealt in packing]
    wanted = places.by_rank(shares)
    tokens = deal(groups.held, facts, wanted, channel=channel, tag=_TOKENS)
    scored = _score(policy, tokens, new, packing[policy.groups.dp_rank])
    log_probs = _send_back(scored, facts, shares, places=places, channel=channel)
    carried = {
        i: _extend(one, log_probs[i]) if i in log_probs else one for i, one in groups.held.items()
    }
    begun = (facts.num_carried_tokens == 0) & (facts.num_response_tokens > 0)
    changed = facts.changed(
        num_carried_tokens=facts.num_response_tokens,
        num_carried_sampled=facts.num_sampled_tokens,
        oldest_version=np.where(begun, policy_version, facts.oldest_version),
    )
    return Spread(changed, carried)


def _score(
    policy: Policy,
    tokens: Mapping[int, Tokens],
    new: np.ndarray,
    microbatches: Sequence[Sequence[int]],
) -> dict[int, np.ndarray]:
    """Log-probs of this rank's share, by number, on the rank that reports them. Collective.

    `microbatches` are positions in `new`.
    """
    place_of = {number: place for place, number in enumerate(tokens)}
    ours = [tuple(place_of[int(new[i])] for i in indices) for indices in microbatches]
    sequences = Sequences(
        prompt_ids=[one.prompt_ids for one in tokens.values()],
        response_ids=[one.response_ids for one in tokens.values()],
        response_masks=[one.is_sampled for one in tokens.values()],
    )
    scored = score(policy, sequences, ours)
    if not policy.groups.is_first_copy:
        return {}
    numbers = [*tokens]
    return {numbers[place]: values.numpy() for place, values in scored.items()}


def _send_back(
    scored: Mapping[int, np.ndarray],
    facts: Facts,
    shares: Sequence[Sequence[int]],
    *,
    places: Places,
    channel: Channel,
) -> dict[int, np.ndarray]:
    """Log-probs by number of the sequences that this rank holds, from those that scored them."""
    scorer = np.full(len(facts), -1, dtype=np.int32)
    for rank, share in zip(places.scorers, shares, strict=True):
        scorer[list(share)] = rank
    # As a sequence without anything but log-probs.
    zeros = np.zeros(len(facts), dtype=np.int32)
    nothing = np.empty(0, dtype=np.int32)
    described = facts.changed(
        holder=scorer,
        num_prompt_tokens=zeros,
        num_response_tokens=zeros,
        num_sampled_tokens=zeros,
        num_carried_tokens=facts.num_sampled_tokens,
    )
    answers = {
        i: Tokens(nothing, nothing, np.empty(0, dtype=np.float32), values)
        for i, values in scored.items()
    }
    wanted = [
        np.flatnonzero((scorer >= 0) & (facts.holder == rank)).tolist()
        for rank in range(channel.size)
    ]
    received = deal(answers, described, wanted, channel=channel, tag=_LOG_PROBS)
    return {i: one.carried_log_probs for i, one in received.items()}


def _extend(tokens: Tokens, log_probs: np.ndarray) -> Tokens:
    """`log_probs` are those of the sampled tokens now; carried ones keep their own.

    A token that the environment gave has 0.
    """
    if tokens.response_mask is not None:
        sampled, log_probs = log_probs, np.zeros(len(tokens.response_ids), dtype=np.float32)
        log_probs[tokens.response_mask] = sampled
    before = tokens.carried_log_probs
    return replace(tokens, carried_log_probs=np.concatenate([before, log_probs[len(before) :]]))
