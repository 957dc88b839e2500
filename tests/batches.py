"""Judged groups with all their tokens here: the table of them, and the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gapo_megatron import objective
from gapo_megatron.config.methods import Method
from gapo_megatron.rollout.table import to_rollouts
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.types import Episode, Outcome, Prompt, Verdict

OUTCOMES = {"c": Outcome.CORRECT, "w": Outcome.WRONG, "u": Outcome.UNKNOWN}
REWARDS = {"c": 1.0, "w": 0.0, "u": float("nan")}


def make_rollouts(
    groups: Sequence[Sequence[Episode]], verdicts: Sequence[str], **settings: Any
) -> Rollouts:
    """Groups and their verdicts, a letter of `OUTCOMES` each: "cwu" of a group of three.

    Settings are those of `to_rollouts`.
    """
    judged = [[Verdict(OUTCOMES[letter]) for letter in letters] for letters in verdicts]
    return to_rollouts(groups, judged, **settings)


def make_batch(
    groups: Sequence[Sequence[Episode]], verdicts: Sequence[str], method: Method
) -> Batch:
    """The batch of these groups, as on a rank that has sampled all of them."""
    return objective.make_batch(make_rollouts(groups, verdicts), method)


def random_rollouts(seed: int, num_groups: int, **settings: Any) -> Rollouts:
    """Groups of three of any length: the second has carried tokens, the third mostly a mask, and
    three conversations that take turns.

    Routes have the first, of two layers with two experts a token each, and the third, of a part.

    Correct, wrong and unknown; settings are those of `to_rollouts`.
    """
    random = np.random.default_rng(seed)

    def episode(prompt: Prompt, sample: int) -> Episode:
        length = int(random.integers(1, 40))
        num_carried = int(random.integers(1, length + 1)) if sample == 1 else 0
        mask = random.random(length) < 0.5
        mask[0], mask[-1] = True, False
        conversations = (np.arange(length) * 5 // length % 3).astype(np.int32)
        num_routed = len(prompt.token_ids) + (length - 1 if sample == 0 else -1)
        routes = np.random.default_rng(seed).integers(0, 256, (num_routed, 4)).astype(np.uint8)
        return Episode(
            prompt,
            sample,
            random.integers(0, 1000, length).astype(np.int32),
            -random.random(length, dtype=np.float32),
            truncated=bool(random.random() < 0.5),
            response_mask=mask if sample == 2 and length > 1 else None,
            conversations=conversations if sample == 2 and length > 4 else None,
            carried_log_probs=(
                -random.random(num_carried, dtype=np.float32) if num_carried else None
            ),
            carried_versions=(
                3 + np.arange(num_carried, dtype=np.int32) // 8 if num_carried else None
            ),
            routes=None if sample == 1 else routes,
        )

    prompts = [
        Prompt(f"{seed}/{i}", tuple(random.integers(0, 1000, seed + i + 1).tolist()), "")
        for i in range(num_groups)
    ]
    groups = [[episode(prompt, sample) for sample in range(3)] for prompt in prompts]
    return make_rollouts(groups, ["cwu"] * num_groups, **settings)


def readable(rollouts: Rollouts) -> dict[str, dict[int, tuple[str, list[Any]]]]:
    """The tokens that are here, with their types, to be compared."""
    return {
        name: {row: (str(array.dtype), array.tolist()) for row, array in held.items()}
        for name, held in rollouts.tokens.items()
    }
