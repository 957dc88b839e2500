"""The trainer's weights into the rollout engine, and the proof that they arrived."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from gapo_megatron.compat import vllm
from gapo_megatron.config import Config
from gapo_megatron.errors import ConversionError, WeightSyncError
from gapo_megatron.models.checks import num_experts
from gapo_megatron.models.rules import checked
from gapo_megatron.models.tables import rules_for
from gapo_megatron.rollout.vllm.engine import RolloutEngine


def sync_weights(
    engine: RolloutEngine,
    weights: Iterable[tuple[str, Tensor]],
    *,
    policy_version: int,
    on_received: Callable[[], None] = lambda: None,
) -> None:
    """Replace the engine's weights in place, wake it up, and forget what it cached of the old ones.

    The tensors are streamed: vLLM takes them layer by layer as they come, and this rank's share of
    each is copied over the old one (graphs and compiled code stay valid). At most one layer is held
    besides the two copies of the model. With `rollout.quantization` a module's weights are
    quantised when the last of them has come, by scales made of these weights, not of older ones.

    Args:
        engine: asleep or awake; generating afterwards.
        weights: (Hugging Face name, whole tensor), every tensor of the model once, those of one
            module next to each other; the same on every rank (`Policy.iterate_hf_weights`).
        policy_version: becomes `engine.policy_version`.
        on_received: called when the engine has no more use for the tensors, and before its KV cache
            takes its memory.

    Collectives: those of `weights`, in lockstep on all ranks; none of the engine's own.

    Raises:
        WeightSyncError: a tensor is missing, extra, twice or misshapen; names it. The engine's
            weights are then undefined, and its version is -1.
    """
    engine.schedule.wake_for_sync()
    engine.policy_version = -1
    tensors = checked(rules_for(engine.hf_config), weights)
    try:
        vllm.load_weights(engine.llm, tensors)
    except ConversionError as error:
        raise WeightSyncError(f"weight sync, version {policy_version}: {error}") from error
    on_received()
    engine.schedule.wake_for_generation()
    if not engine.llm.reset_prefix_cache():
        raise WeightSyncError("weight sync: requests are in flight, so cached prefixes stay stale")
    engine.policy_version = policy_version


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """How far the engine's log-probs are from the trainer's, over every rank."""

    mean_abs_diff: float
    """Per token, of the sequence where it is largest."""
    max_abs_diff: float
    """Of the worst token."""


def verify_weights(
    engine: RolloutEngine,
    prompt_ids: Sequence[np.ndarray],
    response_ids: Sequence[np.ndarray],
    log_probs: Sequence[np.ndarray],
) -> WeightCheck:
    """Compare the engine's log-probs of a few sequences with the trainer's.

    Args:
        engine: generating, after a sync.
        prompt_ids: B arrays of tokens that are given.
        response_ids: B arrays of tokens that are scored; the same on every rank.
        log_probs: B arrays of float32, aligned with `response_ids`: the trainer's, at temperature
            1; the same on every rank.

    Returns:
        The largest differences over all ranks, the same on every rank.

    Collectives: one gather over all ranks, so that all of them raise when one does.

    Raises:
        WeightSyncError: the mean difference per token of a sequence is above `verify_bound`, or a
            value is not finite; names rank, sequence, worst position, and both values there.
    """
    mine = _compare(engine.log_probs(prompt_ids, response_ids), log_probs)
    found: list[_Worst] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine, group=engine.gloo_group)
    worst = max(range(len(found)), key=lambda rank: found[rank].mean_abs_diff)
    bound = verify_bound(engine.config, engine.hf_config, engine.device)
    result = found[worst]
    if not result.mean_abs_diff <= bound:
        raise WeightSyncError(
            f"weight sync, version {engine.policy_version}: on rank {worst} the mean difference of "
            f"log-probs in sequence {result.sequence} is {result.mean_abs_diff:.3g} per token, "
            f"above rollout.verify_bound ({bound:g}); worst at response token {result.position}: "
            f"trainer {result.trainer:.6f}, engine {result.engine:.6f}"
        )
    return WeightCheck(result.mean_abs_diff, max(item.max_abs_diff for item in found))


def verify_bound(config: Config, hf_config: PretrainedConfig, device: torch.device) -> float:
    """`rollout.verify_bound`, or what rounding alone should stay below by far.

    Mean difference of log-probs of a token: in fp32 some 1e-6 on a CPU, more on CUDA, where vLLM's
    attention in Triton may multiply in TF32 (not yet measured); in bf16 about 0.01 for sampled
    tokens and a few times that for unlikely ones; as much again where rounding sends a token to
    other experts, or products are in fp8. A wrong tensor changes whole units.
    """
    if config.rollout.verify_bound is not None:
        return config.rollout.verify_bound
    if config.model.precision == "fp32" and not config.rollout.quantization:
        return 1e-2 if device.type == "cuda" else 1e-3
    is_fp8 = config.model.precision == "fp8" or bool(config.rollout.quantization)
    return 0.3 if is_fp8 or num_experts(hf_config) else 0.1


@dataclass(frozen=True, slots=True)
class _Worst:
    """The sequence with the largest mean difference, and the token of the largest in it."""

    mean_abs_diff: float
    max_abs_diff: float
    sequence: int
    position: int
    trainer: float
    engine: float


def _compare(engine: Sequence[np.ndarray], trainer: Sequence[np.ndarray]) -> _Worst:
    worst = _Worst(0.0, 0.0, 0, 0, 0.0, 0.0)
    largest = 0.0
    for i, (ours, theirs) in enumerate(zip(trainer, engine, strict=True)):
        if len(ours) == 0:
            continue
        # NaN compares as nothing; as infinity it is the worst of all.
        diff = np.nan_to_num(np.abs(ours.astype(np.float64) - theirs), nan=np.inf, posinf=np.inf)
        at = int(diff.argmax())
        largest = max(largest, float(diff[at]))
        if (mean := float(diff.mean())) >= worst.mean_abs_diff:
            worst = _Worst(mean, 0.0, i, at, float(ours[at]), float(theirs[at]))
    return dataclasses.replace(worst, max_abs_diff=largest)
