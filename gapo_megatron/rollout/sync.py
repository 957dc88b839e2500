"""Weight sync after an update: send the engine the policy's weights, and verify a few log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch.distributed as dist

from gapo_megatron.learn.score import score
from gapo_megatron.policy import Policy
from gapo_megatron.rollout.adapter_sync import Sending, needs_of, update_adapter
from gapo_megatron.rollout.engine import Engine
from gapo_megatron.rollout.verify import WeightCheck, verify_weights
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.types import Prompt

_PROBE_TOKENS = 256
"""Largest number of scored tokens of a sequence: enough to detect a wrong weight, at no cost."""


def sync(
    policy: Policy,
    engine: Engine,
    probe: Rollouts,
    *,
    policy_version: int,
) -> WeightCheck:
    """Send the engine the policy's weights and verify the log-probs of `probe`.

    The trainer scores the probe first, sequence by sequence, while a sleeping engine leaves it the
    memory. Then it frees memory for the engine's weights (`Policy.make_room`), and after their
    arrival for the engine's KV cache (`Policy.make_room_of_weights`). For a policy with low-rank
    factors see `adapter_sync`.

    Args:
        policy: its gradients are freed, and offloaded tensors are on the host afterwards.
        engine: asleep or awake; awake afterwards, at `policy_version`.
        probe: a few sequences, the same on every rank (`first_sequences`, `prompts_as_sequences`).
        policy_version: number of steps that the weights have been trained for.

    Returns:
        The largest difference of log-probs at temperature 1, and the rounding of merged weights;
        the same on every rank.

    Collectives: those of `score_probe` and `Sending`, then those of `Policy.iterate_hf_weights` if
    weights are sent; a gather of the differences.

    Raises:
        WeightSyncError: tensors or log-probs do not agree, or not all were taken; on every rank.
    """
    log_probs = score_probe(policy, probe, engine.replicas.gloo_group)
    sending = Sending(policy, needs_of(engine), keeps_factors=True)
    policy.make_room()
    if not sending.brings_weights:
        policy.make_room_of_weights()
    engine.wake()
    if sending.brings_weights:
        with sending.weights() as weights:
            engine.update_weights(
                weights,
                policy_version=policy_version,
                on_received=policy.make_room_of_weights,
            )
    if sending.brings_factors:
        update_adapter(
            engine, sending.factors(), scale=sending.scale, policy_version=policy_version
        )
    check = verify_weights(engine, probe, log_probs)
    return replace(check, merge_rounding=sending.rounding)


def score_probe(
    policy: Policy, probe: Rollouts, gloo_group: dist.ProcessGroup | None
) -> list[np.ndarray]:
    """The trainer's log-probs of a few sequences, sequence by sequence, at temperature 1.

    Args:
        policy: unchanged.
        probe: the same on every rank.
        gloo_group: gloo group of all ranks of the trainer.

    Returns:
        An array of float32 for each sequence, one value per sampled response token; the same on
        every rank.

    Collectives: those of the forward pass; a broadcast from the last rank, which holds the head.
    """
    scored = score(policy, probe, [(i,) for i in range(len(probe))], temperature=1.0)
    holder = [[values.numpy() for values in scored.values()]]
    dist.broadcast_object_list(holder, src=dist.get_world_size() - 1, group=gloo_group)
    return holder[0]


def first_sequences(batch: Batch, count: int) -> Rollouts:
    """Probe: the first `count` sequences of a batch, whose tokens are on every rank.

    Of an episode with several conversations the first.
    """
    rows = range(min(count, len(batch)))
    responses = [batch.response_ids[i][batch.conversations_of(i) == 0] for i in rows]
    return _probe([batch.prompt_ids[i] for i in rows], responses)


def prompts_as_sequences(prompts: Sequence[Prompt], count: int) -> Rollouts:
    """Probe before the first rollout: prompts whose first token is input and the others scored.

    One-token prompts cannot be scored; if all are that short, the check is skipped.
    """
    tokens = [np.array(prompt.token_ids, dtype=np.int32) for prompt in prompts]
    tokens = [ids for ids in tokens if len(ids) > 1][:count]
    return _probe([ids[:1] for ids in tokens], [ids[1:] for ids in tokens])


def _probe(prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray]) -> Rollouts:
    # Without masks: the engine scores every token of a response, appended tokens included.
    return Rollouts.of(prompt_ids, [ids[:_PROBE_TOKENS] for ids in response_ids])
