"""Batches with all their tokens here, from judged groups."""

from __future__ import annotations

from collections.abc import Sequence

from gapo_megatron import objective
from gapo_megatron.config.methods import Method
from gapo_megatron.rollout.describe import describe
from gapo_megatron.types import Batch, Group


def make_batch(groups: Sequence[Group], method: Method) -> Batch:
    """The batch of these groups, as on a rank that has sampled all of them."""
    facts, tokens = describe(groups)
    return objective.make_batch(facts, method).with_tokens(dict(enumerate(tokens)))
