"""Old log-probs of sampled tokens whose groups are still open, so that the step does not use them.

A ratio compares with the policy that sampled: the trainer, at the weights of each token's step.
These weights no longer exist after the update, so tokens of open groups are scored in the step that
samples them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from gapo_megatron.exchange import Channel, Column, deal, deal_tokens
from gapo_megatron.learn.checks.routes import StepRoutes
from gapo_megatron.learn.plan import DataParallelRanks, plan_scoring
from gapo_megatron.learn.score import score
from gapo_megatron.policy import Policy
from gapo_megatron.rollouts import Rollouts

_TOKENS, _LOG_PROBS = 3, 4
"""Tags of messages to the ranks that score, and back."""


def carry(
    policy: Policy,
    groups: Rollouts,
    *,
    max_tokens_per_microbatch: int,
    ranks: DataParallelRanks,
    channel: Channel,
) -> Rollouts:
    """Store old log-probs of the tokens that this step has sampled.

    Skips responses begun on generation ranks: their first tokens have none, and the weights that
    sampled them no longer exist.

    Args:
        policy: at the weights that sampled those tokens; unchanged.
        groups: open groups.
        max_tokens_per_microbatch: token budget of a micro-batch.
        ranks: data-parallel rank of every rank.
        channel: channel of all ranks.

    Returns:
        The groups, all tokens carried and, but for those responses, with old log-probs; on the
        same ranks as before.

    Collectives: those of `learn.score.score`, if any token is new, and before and after it at most
    one message between any two ranks.

    Raises:
        DivergenceError: a log-prob is not finite.
    """
    table = groups.table
    num_tokens, num_scored = table["num_response_tokens"], table["num_scored_tokens"]
    is_new = (num_tokens > num_scored) & (num_scored == table["num_carried_tokens"])
    if not is_new.any():
        return groups.carried()
    # Score the responses with new tokens, each data-parallel rank its share.
    new = np.flatnonzero(is_new)
    packing = plan_scoring(
        groups.take(new),
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        data_parallel_size=len(ranks.scorers),
    )
    shares = [sorted(new[[i for one in dealt for i in one]].tolist()) for dealt in packing]
    share = deal_tokens(groups, ranks.by_rank(shares), channel=channel, tag=_TOKENS)
    microbatches = [new[list(indices)].tolist() for indices in packing[policy.groups.dp_rank]]
    routes = StepRoutes(policy, share, replayed="rollout" if share.has_routes else "none")
    mark = partial(routes.following, 0, counts=False)
    scored = score(policy, share, microbatches, mark=mark)
    log_probs = _to_holders(
        {i: values.numpy() for i, values in scored.items()} if policy.groups.is_first_copy else {},
        table,
        shares,
        ranks=ranks,
        channel=channel,
    )
    carried = {**groups.carried_log_probs}
    for i, values in log_probs.items():
        # Earlier values stay; tokens appended by the environment get 0.
        every, before = np.zeros(len(groups.response_ids[i]), dtype=np.float32), carried[i]
        every[groups.is_sampled(i)] = values
        carried[i] = np.concatenate([before, every[len(before) :]])
    changed = groups.carried().changed(num_scored_tokens=np.where(is_new, num_tokens, num_scored))
    return changed.with_tokens({**changed.tokens, "carried_log_probs": carried})


def _to_holders(
    scored: Mapping[int, np.ndarray],
    table: np.ndarray,
    shares: Sequence[Sequence[int]],
    *,
    ranks: DataParallelRanks,
    channel: Channel,
) -> dict[int, np.ndarray]:
    """Log-probs by row of the sequences that this rank holds, from the ranks that scored them."""
    scorer = np.full(len(table), -1, dtype=np.int32)
    for rank, share in zip(ranks.scorers, shares, strict=True):
        scorer[list(share)] = rank
    wanted = [
        np.flatnonzero((scorer >= 0) & (table["holder"] == rank)).tolist()
        for rank in range(channel.size)
    ]
    column = Column(np.float32, table["num_sampled_tokens"])
    found = deal(
        {"log_probs": scored},
        {"log_probs": column},
        scorer,
        wanted,
        channel=channel,
        tag=_LOG_PROBS,
    )
    return found["log_probs"]
